"""A chain of stages over pools as fields of a plan: decision, prediction, whole run, placement.

The objective of a chain is the larger of its closed form and its simulated schedule, as for one
pool, so that every bound on the closed form bounds it.

Each pool's nodes fail at the stated rate and are replaced by spares of the same pool
(tuner/faults/kinds.py), those that the spec keeps back; pools that a chain does not use are neither
waited for nor paid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.config.shapes import number, single
from tuner.config.train import TrainDecision
from tuner.faults.forecast import RunForecast
from tuner.faults.goodput import goodput_step_s
from tuner.faults.kinds import jobs_together, slowest
from tuner.faults.reliability import FailureModel, Jobs
from tuner.plans.stage_placement import StageDevices, StagePlacement
from tuner.plans.train import Band, RankAtRisk, StagePrediction, TrainPrediction
from tuner.search.train.layouts import to_stages
from tuner.search.train.memory_risk import (
    MemoryForecast,
    chances,
    forecast_memory,
    loss_prices,
    uneven_bytes,
)
from tuner.search.train.options import OptionSpace
from tuner.search.train.plan_fields import failure_model, forecast_run, predict_step
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain, stretches
from tuner.search.train.search_result import decision_fields
from tuner.simulate.pipeline import Pipeline, can_simulate, simulate_step
from tuner.spec.cluster import Pool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedChain:
    """A chain with its simulated step."""

    chain: Chain
    simulated_s: float

    @property
    def objective_s(self) -> float:
        """Seconds that chains are ranked by."""
        return max(self.chain.price.step_s, self.simulated_s)


def simulate_chain(chain: Chain) -> SimulatedChain:
    """Simulate one step of a chain; use its closed form where it is too long to be simulated."""
    price = chain.price
    pipeline = Pipeline(
        forward_s_S=price.forward_s_S,
        backward_s_S=price.backward_s_S,
        num_devices=len(chain.pool_S),
        num_microbatches=chain.candidate.num_microbatches,
        sends_s=price.send_s,
    )
    if not can_simulate(pipeline):
        return SimulatedChain(chain=chain, simulated_s=price.step_s)
    return SimulatedChain(chain=chain, simulated_s=simulate_step(pipeline).step_s + price.once_s)


def to_decision(chain: Chain, problem: PoolsProblem, options: OptionSpace) -> TrainDecision:
    """Return the decision of a chain."""
    fields = decision_fields(problem.any_pool, options, chain.candidate.row, chain.layers_S)
    ranks = int(chain.candidate.pools[0].devices_C[0])
    experts = fields["expert_model_parallel_size"] * fields["expert_tensor_parallel_size"]
    pipeline = {
        "pipeline_model_parallel_size": len(chain.layers_S),
        "virtual_pipeline_model_parallel_size": 1,
        "expert_data_parallel_size": ranks // experts,
    }
    return TrainDecision.model_validate(fields | pipeline)


def to_prediction(simulated: SimulatedChain, problem: PoolsProblem) -> TrainPrediction:
    """Return the prediction of a chain."""
    chain, price = simulated.chain, simulated.chain.price
    step_s = simulated.objective_s
    busy_s = chain.candidate.num_microbatches * float(
        np.mean(np.add(price.forward_s_S, price.backward_s_S))
    )
    seconds = {
        "computation": busy_s - price.collectives_s,
        "collectives": price.collectives_s,
        "once": price.once_s,
        "bubble": step_s - busy_s - price.once_s,
    }
    return predict_step(
        problem.any_pool,
        step_s=step_s,
        simulated_s=simulated.simulated_s,
        band=band_over(problem, sorted(set(chain.pool_S))),
        devices=len(chain.pool_S) * int(chain.candidate.pools[0].devices_C[0]),
        flop_per_s=_peak_flop_per_s(chain, problem),
        peak_bytes=price.bytes_S,
        risk=chain_memory_risk(chain, problem),
        rank_at_risk=rank_at_risk(chain, problem),
        activation_bytes=tuple(
            round(float(memory.activations_PC[stage, 0]))
            for stage, memory in enumerate(price.memory_S)
        ),
        breakdown_s=seconds,
        communication_s=price.collectives_s + seconds["bubble"],
        stages=tuple(_stage(chain, stage) for stage in range(len(chain.pool_S))),
        run=_forecast_run(chain, problem, step_s=step_s),
    )


def chain_memory_risk(chain: Chain, problem: PoolsProblem) -> MemoryForecast:
    """The chance that any stage runs out of memory on its own pool's devices."""
    return forecast_memory(
        np.array(chain.price.bytes_S),
        stage_uneven_bytes(chain, problem),
        capacity_bytes=_capacity_bytes(chain, problem),
        software=problem.any_pool.software,
        prices=loss_prices(problem.specs[0].goal),
    )


def rank_at_risk(chain: Chain, problem: PoolsProblem) -> RankAtRisk:
    """The stage with the chance of `chain_memory_risk`."""
    capacity_bytes_S = _capacity_bytes(chain, problem)
    every = chances(
        np.array(chain.price.bytes_S),
        capacity_bytes=capacity_bytes_S,
        software=problem.any_pool.software,
        pipeline_C=len(chain.pool_S),
        uneven_bytes_C=stage_uneven_bytes(chain, problem),
    )
    stage = int(np.argmax(every.ever_C))
    return RankAtRisk(
        pipeline_rank=stage,
        pool=problem.cluster.pools[chain.pool_S[stage]].name,
        peak_memory_bytes=round(chain.price.bytes_S[stage]),
        memory_capacity_bytes=int(capacity_bytes_S[stage]),
    )


def _capacity_bytes(chain: Chain, problem: PoolsProblem) -> npt.NDArray[np.float64]:
    """Return the bytes of memory of a device of every stage, [S]."""
    return np.array([problem.by_pool[pool].capacity_bytes for pool in chain.pool_S])


def stage_uneven_bytes(chain: Chain, problem: PoolsProblem) -> npt.NDArray[np.float64]:
    """Growth of each stage's peak when the most-loaded expert rank's load doubles, [S]."""
    any_pool, stages_S = problem.any_pool, range(len(chain.pool_S))
    if any_pool.expert_imbalance is not None or any_pool.model.moe is None:
        return np.zeros(len(chain.pool_S))
    layout = to_stages(any_pool.model, np.array(chain.layers_S)[:, None])
    by_pool = {
        index: uneven_bytes(
            pool_problem.shape,
            replace(chain.candidate.on(index).strategies, pipeline=float(len(chain.pool_S))),
            pool_problem.hardware,
            layout,
            constants=pool_problem.memory_constants,
        )
        for index, pool_problem in enumerate(problem.by_pool)
        if index in chain.pool_S
    }
    return np.array([by_pool[chain.pool_S[stage]][stage] for stage in stages_S])


def band_over(problem: PoolsProblem, pools: Sequence[int]) -> Band:
    """The widest band of the pools that take part, since the slowest stage may be on any."""
    return min(problem.bands[p][0] for p in pools), max(problem.bands[p][1] for p in pools)


def to_placement(chain: Chain, problem: PoolsProblem) -> StagePlacement:
    """Return which nodes run which stage."""
    devices = int(chain.candidate.pools[0].devices_C[0])
    pools, hosts, unused = problem.cluster.pools, [], {}
    for index, stages in stretches(chain.pool_S):
        pool = pools[index]
        nodes = -(-stages * devices // pool.devices_per_node)
        hosts += [f"{pool.name}-{node}" for node in range(nodes)]
    for index, pool in enumerate(pools):
        left = pool.num_devices - chain.pool_S.count(index) * devices
        if left:
            unused[pool.name] = left
    return StagePlacement(
        stages=tuple(
            StageDevices(pool=pools[index].name, layers=layers, devices=devices)
            for index, layers in zip(chain.pool_S, chain.layers_S, strict=True)
        ),
        hosts=tuple(hosts),
        unused_devices=unused,
        spare_nodes=_spare_nodes(chain.pool_S, problem),
        notes=_launch_notes(chain, problem),
    )


def _launch_notes(chain: Chain, problem: PoolsProblem) -> tuple[str, ...]:
    """Return notes on what a launch over several pools needs.

    Megatron-LM numbers ranks with pipeline stages outermost (order tp-cp-ep-dp-pp) and torchrun
    numbers processes by node rank, so nodes listed in stage order put whole stages on each pool.
    """
    used = list(dict.fromkeys(chain.pool_S))
    standing_by = _spare_notes(used, problem)
    if len(used) == 1:
        return standing_by
    pools = [problem.cluster.pools[index] for index in used]
    names = " then ".join(pool.name for pool in pools)
    notes = [
        f"start the nodes in the order of hosts ({names}), under Slurm with SLURM_HOSTFILE and "
        "--distribution=arbitrary: node rank decides the stage, and a node of one pool in the "
        "place of another runs layers that do not suit it",
        "all pools run one process group: the same release, precision, tensor, context, data and "
        "expert parallelism and micro-batch everywhere, and a NCCL transport that both ends have",
    ]
    sizes = {pool.devices_per_node for pool in pools}
    if len(sizes) > 1:
        sizes_by_pool = ", ".join(f"{pool.name} {pool.devices_per_node}" for pool in pools)
        notes.append(f"processes per node differ: {sizes_by_pool}")
    return (*notes, *standing_by)


def _spare_nodes(used: Sequence[int], problem: PoolsProblem) -> dict[str, int]:
    """Return the spare nodes of each pool that has any."""
    return {
        pool.name: spare
        for index in dict.fromkeys(used)
        if (
            spare := (pool := problem.priced_pools[index].pool).nodes
            - problem.cluster.pools[index].nodes
        )
    }


def _spare_notes(used: Sequence[int], problem: PoolsProblem) -> tuple[str, ...]:
    """Note the spare nodes of each pool."""
    spares = _spare_nodes(used, problem)
    kept = ", ".join(f"{spare} of pool {name!r}" for name, spare in spares.items())
    return (f"spare nodes that replace those of their own pool: {kept}",) if kept else ()


def _stage(chain: Chain, stage: int) -> StagePrediction:
    price, memory = chain.price, chain.price.memory_S[stage]

    def at(name: str) -> int:
        return round(float(getattr(memory, name)[stage, 0]))

    return StagePrediction(
        layers=chain.layers_S[stage],
        forward_s=price.forward_s_S[stage],
        backward_s=price.backward_s_S[stage],
        parameter_bytes=at("weights_PC"),
        gradient_bytes=at("gradients_PC"),
        optimizer_bytes=at("optimizer_PC"),
        activation_bytes=at("activations_PC"),
        other_bytes=at("buffers_PC") + at("reserve_PC") + at("context_PC"),
    )


def _peak_flop_per_s(chain: Chain, problem: PoolsProblem) -> float:
    devices = int(chain.candidate.pools[0].devices_C[0])
    return sum(
        devices * float(problem.by_pool[index].hardware.matmul_flop_per_s) for index in chain.pool_S
    )


def effective_step_s(chain: Chain, problem: PoolsProblem, *, step_s: float) -> float:
    """Seconds of wall clock per step with failures; the step itself where none are priced."""
    jobs, reliability = _failure_model(chain, problem)
    return number(goodput_step_s(step_s, jobs=jobs, reliability=reliability))


def _forecast_run(chain: Chain, problem: PoolsProblem, *, step_s: float) -> RunForecast | None:
    jobs, reliability = _failure_model(chain, problem)
    pools = [problem.priced_pools[index].pool for index in _used(chain)]
    spares = [float(kind.spare_nodes) for kind in jobs.kinds]
    standing_by = sum(n * pool.devices_per_node for n, pool in zip(spares, pools, strict=True))
    return forecast_run(
        problem.specs[0].goal,
        jobs,
        reliability,
        step_s=step_s,
        devices_per_node=standing_by / sum(spares) if sum(spares) else 0.0,
        price_per_device_hour=_price(jobs.kinds, pools),
    )


def _failure_model(chain: Chain, problem: PoolsProblem) -> tuple[Jobs, FailureModel | None]:
    """Return the jobs of a chain and their reliability; None where no failures are priced."""
    kinds, reliabilities = [], []
    for index in _used(chain):
        stages = float(chain.pool_S.count(index))
        jobs, reliability = failure_model(
            problem.specs[index],
            problem.priced_pools[index],
            replace(single(chain.candidate.on(index).strategies), pipeline=stages),
        )
        kinds.append(jobs)
        if reliability is not None:
            reliabilities.append(reliability)
    # Each was given all parameters of the model.
    jobs = jobs_together(kinds, checkpoint_bytes=number(kinds[0].checkpoint_bytes))
    return jobs, slowest(reliabilities) if reliabilities else None


def _used(chain: Chain) -> list[int]:
    return sorted(set(chain.pool_S))


def _price(kinds: Sequence[Jobs], pools: Sequence[Pool]) -> float | None:
    """Mean price of a device hour, spares included; None where a pool states none."""
    devices_total, paid = 0.0, 0.0
    for kind, pool in zip(kinds, pools, strict=True):
        if pool.price_per_device_hour is None:
            return None
        devices = float(kind.devices) + float(kind.spare_nodes) * pool.devices_per_node
        devices_total += devices
        paid += devices * pool.price_per_device_hour
    return paid / devices_total
