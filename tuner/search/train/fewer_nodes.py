"""A plan's layout for one node less, and whether the job goes on in it without a spare node.

The nodes that are left are searched as the plan's were, with the same model, goal and global batch.
Every number of nodes from one less to half is searched for a faster step than those before, the
largest first, and the rest is idle: where the target's replicas run equal numbers of micro-batches,
few divide the batch, and the best layout may be one of fewer devices still. The fastest is then
planned like any other.

The layout must restore the checkpoints of the plan's, and the other way round: the ZeRO stage
stays, and what else the engine needs (tuner/catalog/manifest.py). The decision between the two is
that of the larger effective share (tuner/faults/fewer_nodes.py), or the stated one. All nodes
together are planned as if the job waited: without a spare node it is the same for every layout.

Not covered: several pools, nodes that share a scale-up domain, measured links between nodes (of the
layout of fewer nodes, as any may be missing), and bytes that would move if the state were resharded
from memory of the nodes that are left.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tuner.config.train import TrainDecision
from tuner.config.train_words import short_layout, unequal_words
from tuner.errors import SpecError
from tuner.faults.fewer_nodes import (
    ContinuedRun,
    LayoutShares,
    continued_run,
    layout_shares,
    node_losses,
)
from tuner.faults.forecast import RunForecast, TrainingRun, forecast_shares
from tuner.faults.reliability import FailureModel, Jobs
from tuner.faults.run_shares import RunShares, run_shares
from tuner.faults.without_spare import FewerNodes, WithoutSpare, ratios
from tuner.plans.train import Plan
from tuner.search.progress import PlanningEvent, ignore_progress
from tuner.search.settings import SearchSettings
from tuner.search.train.priced_layouts import PricedLayouts
from tuner.search.train.rules import divisors
from tuner.spec.cluster import Pool
from tuner.spec.goal import TWO_LEVELS
from tuner.spec.node_numbers import (
    ON_SHARED_STORAGE,
    NodeNumbers,
    changed_spec,
    changed_yaml,
    fewer_nodes,
)
from tuner.spec.spec import Spec

LEAST_SHARE: Final = 0.5
"""Smallest number of nodes that is searched, as a share of the plan's."""
SEARCH_SHARE: Final = 0.5
"""Share of the time limit for finding how many nodes are best."""

_JOINT: Final = (
    "checkpoint.levels: auto is decided together with without_spare: for a job that waits for"
    " repairs other levels are better"
)

MakePlan = Callable[[Spec, bytes], Plan]
"""Plans a spec that is written in a file of these bytes."""
Priced = Callable[[Pool], PricedLayouts]
"""Prices layouts on a pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerNodesPlan:
    """The plan of the layout with fewer nodes, and its spec."""

    plan: Plan
    spec: Spec
    spec_yaml: bytes
    """Content of a spec file that states the same."""


def plan_without_spare(
    spec: Spec,
    *,
    plan_all: Callable[[Spec], Plan],
    price: Priced,
    make_plan: MakePlan,
    settings: SearchSettings,
) -> tuple[Plan, FewerNodesPlan | None]:
    """Plan all nodes, and decide what the job does without a spare node.

    Open checkpoint levels are decided together with it: those that are best for a job that waits
    may have no checkpoints that fewer nodes restore, or few of them.

    Args:
        spec: of all nodes.
        plan_all: plans a spec of all nodes as if the job waited.
        price: prices layouts on a pool.
        make_plan: plans a spec of fewer nodes.
        settings: of the search for the number of nodes.

    Returns:
        The plan with the decision in `predicted.run`, and the plan of fewer nodes where the job
        continues; the plan of all nodes itself where the spec says that the job waits.
    """
    plan = plan_all(spec)
    made = _decide_for(plan, spec, price=price, make_plan=make_plan, settings=settings)
    stated, run = spec.goal.reliability, _run(plan)
    if stated is None or stated.without_spare == "wait" or run is None:
        return made
    if stated.checkpoint.levels != "auto":
        return made
    on_hosts = {"goal.reliability.checkpoint.levels": TWO_LEVELS}
    releveled = changed_spec(spec, ON_SHARED_STORAGE if _keeps_host_copies(run) else on_hosts)
    try:
        replanned = plan_all(releveled)
    except SpecError:
        # The engine has no copies on hosts, or no layout whose copies fit.
        return made
    alternative = _decide_for(
        replanned, releveled, price=price, make_plan=make_plan, settings=settings
    )
    notes = (*alternative[0].provenance.notes, _JOINT)
    provenance = alternative[0].provenance.model_copy(update={"notes": notes})
    alternative = (alternative[0].model_copy(update={"provenance": provenance}), alternative[1])
    must_continue = stated.without_spare == "continue"
    return max(
        made,
        alternative,
        key=lambda result: (must_continue and result[1] is not None, _training_speed(result[0])),
    )


def _decide_for(
    plan: Plan, spec: Spec, *, price: Priced, make_plan: MakePlan, settings: SearchSettings
) -> tuple[Plan, FewerNodesPlan | None]:
    """Decide what the job of a plan with known checkpoint levels does without a spare node."""
    stated = spec.goal.reliability
    if stated is None or stated.without_spare == "wait" or plan.decision is None:
        return plan, None
    run = _run(plan)
    if run is None:
        return plan, None
    nodes = _num_nodes(plan.decision, spec.cluster.pools)
    waits = WithoutSpare(
        decision="wait", nodes=nodes, wait_effective_time_ratio=run.effective_time_ratio
    )
    reason = _obstacle(plan, spec, run, nodes=nodes)
    if reason:
        return _with_run(plan, _with_record(run, waits, reason=reason)), None
    settings.watch(PlanningEvent(stage="nodes", text="layouts of one node less"))
    quiet = replace(settings, watch=ignore_progress)
    searched = _best_nodes(
        plan.decision,
        spec,
        price=price,
        settings=quiet,
        nodes=nodes,
        is_shared_only=not _keeps_host_copies(run),
    )
    if searched.best is None:
        reason = (
            f"no layout of {searched.fewest} to {nodes - 1} nodes fits at the same global batch"
        )
        return _with_run(plan, _with_record(run, waits, reason=reason)), None
    return _decide(plan, spec, searched, waits, price=price, make_plan=make_plan)


def _decide(
    plan: Plan,
    spec: Spec,
    searched: "_Searched",
    waits: WithoutSpare,
    *,
    price: Priced,
    make_plan: MakePlan,
) -> tuple[Plan, FewerNodesPlan | None]:
    fewer = searched.best
    assert fewer is not None
    smaller, text = changed_spec(spec, fewer.values), changed_yaml(spec, fewer.values)
    try:
        smaller_plan = make_plan(smaller, text)
        refused = "" if smaller_plan.decision is not None else smaller_plan.binding_constraint
    except SpecError as error:
        refused = str(error)
    full = _PricedRun.of(plan, spec, price(spec.cluster.pools[0]))
    if refused:
        reason = f"no plan of {fewer.nodes - fewer.spare_nodes} nodes: {refused}"
        return _with_run(plan, _with_record(full.forecast, waits, reason=reason)), None
    small = _PricedRun.of(smaller_plan, smaller, price(smaller.cluster.pools[0]))
    losses = node_losses(full.jobs, small.jobs, full.reliability, idle_nodes=fewer.spare_nodes)
    continued = continued_run(losses, full.shares, small.shares)
    record = waits.model_copy(
        update={
            "fewer": _layout(full, small, continued, searched, batch=spec.goal.global_batch_size)
        }
    )
    stated = spec.goal.reliability
    assert stated is not None
    if stated.without_spare == "auto" and continued.training <= full.time_shares.training:
        return _with_run(plan, full.forecast.model_copy(update={"without_spare": record})), None
    record = record.model_copy(update={"decision": "continue"})
    time_shares = replace(
        full.time_shares,
        training=min(1.0, continued.training),
        checkpoints=continued.checkpoints,
        restarting=continued.restarting,
        waiting=continued.waiting,
        slower=continued.slower,
        switches_per_s=continued.switches_per_s,
    )
    run = forecast_shares(time_shares, full.run, jobs=full.jobs, reliability=full.reliability)
    run = run.model_copy(update={"process_restart": full.forecast.process_restart})
    of_fewer = small.forecast.model_copy(
        update={"without_spare": record.model_copy(update={"is_fewer": True})}
    )
    return (
        _with_run(plan, run.model_copy(update={"without_spare": record})),
        FewerNodesPlan(plan=_with_run(smaller_plan, of_fewer), spec=smaller, spec_yaml=text),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PricedRun:
    """The run of a plan on one pool, as it was priced."""

    decision: TrainDecision
    forecast: RunForecast
    run: TrainingRun
    jobs: Jobs
    reliability: FailureModel
    time_shares: RunShares
    shares: LayoutShares

    @classmethod
    def of(cls, plan: Plan, spec: Spec, priced: PricedLayouts) -> "_PricedRun":
        decision, predicted, goal = plan.decision, plan.predicted, spec.goal
        assert decision is not None
        assert predicted is not None
        assert predicted.run is not None
        jobs, reliability = priced.failure_model(spec, decision)
        assert reliability is not None
        step_s = predicted.step_time_s
        time_shares = run_shares(jobs, reliability, step_s=step_s)
        return cls(
            decision=decision,
            forecast=predicted.run,
            run=TrainingRun(
                step_s=step_s,
                tokens_per_step=goal.tokens_per_step,
                tokens=goal.tokens,
                devices_per_node=priced.pool.devices_per_node,
                price_per_device_hour=priced.pool.price_per_device_hour,
            ),
            jobs=jobs,
            reliability=reliability,
            time_shares=time_shares,
            shares=layout_shares(time_shares, jobs, reliability, step_s=step_s),
        )


def _layout(
    full: _PricedRun,
    small: _PricedRun,
    continued: ContinuedRun,
    searched: "_Searched",
    *,
    batch: int,
) -> FewerNodes:
    assert searched.best is not None
    read, nodes = float(full.jobs.read_bytes), float(small.jobs.nodes)
    return FewerNodes.model_validate(
        {
            "nodes": round(nodes),
            "idle_nodes": searched.best.spare_nodes,
            "fewest_searched": searched.fewest,
            "devices": small.decision.num_devices,
            "layout": _layout_words(small.decision, batch),
            "step_time_s": small.run.step_s,
            "throughput_ratio": full.run.step_s / small.run.step_s,
            "restart_s": small.shares.shared_restart_s,
            "return_s": small.shares.background_s + full.shares.shared_restart_s,
            "read_bytes": math.ceil(read),
            "fewer_node_read_bytes": math.ceil(read / nodes),
            "node_read_bytes": math.ceil(read / float(full.jobs.nodes)),
            **ratios(continued),
        }
    )


def _layout_words(decision: TrainDecision, batch: int) -> str:
    unequal = unequal_words(decision, global_batch_size=batch)
    return short_layout(decision) + (f" with {unequal} micro-batches" if unequal else "")


def _run(plan: Plan) -> RunForecast | None:
    return None if plan.predicted is None else plan.predicted.run


def _training_speed(plan: Plan) -> float:
    """Steps per second of the wall clock; zero where nothing fits."""
    run = _run(plan)
    if run is None or plan.predicted is None:
        return 0.0
    return run.effective_time_ratio / plan.predicted.step_time_s


def _with_run(plan: Plan, run: RunForecast) -> Plan:
    assert plan.predicted is not None
    return plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"run": run})})


def _with_record(run: RunForecast, waits: WithoutSpare, *, reason: str) -> RunForecast:
    return run.model_copy(update={"without_spare": waits.model_copy(update={"reason": reason})})


def _num_nodes(decision: TrainDecision, pools: Sequence[Pool]) -> int:
    if len(pools) > 1:
        return sum(pool.nodes for pool in pools)
    return math.ceil(decision.num_devices / pools[0].devices_per_node)


def _fewest(nodes: int) -> int:
    return max(1, math.ceil(LEAST_SHARE * nodes))


def _obstacle(plan: Plan, spec: Spec, run: RunForecast, *, nodes: int) -> str:
    """Say why no layout of fewer nodes can be used; empty where one may."""
    decision, pools = plan.decision, spec.cluster.pools
    assert decision is not None
    if len(pools) > 1:
        names = ", ".join(pool.name for pool in pools)
        return f"layouts of fewer nodes are planned on one pool, and there are several: {names}"
    return fewer_nodes_obstacle(spec, decision, nodes=nodes, on_hosts=_keeps_host_copies(run))


def fewer_nodes_obstacle(spec: Spec, decision: TrainDecision, *, nodes: int, on_hosts: bool) -> str:
    """Say why no layout of fewer nodes of one pool can follow another one; empty where one may.

    Args:
        spec: of one pool.
        decision: the other one.
        nodes: that it uses.
        on_hosts: it keeps copies of checkpoints on hosts.
    """
    (pool,) = spec.cluster.pools
    if nodes < 2:
        return "the plan uses a single node, so that none is left without it"
    if pool.domain > pool.devices_per_node:
        return (
            f"several nodes share a scale-up domain of {pool.domain} devices, and a domain that"
            " lacks a node is not priced"
        )
    return spec.programs.reshard_obstacle(zero_stage=decision.zero_stage, on_hosts=on_hosts)


def _keeps_host_copies(run: RunForecast) -> bool:
    levels = run.checkpoint_levels
    return levels is not None and levels.host_interval_steps is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Searched:
    """Numbers of nodes that were searched."""

    best: NodeNumbers | None
    """Nodes whose layout has the fastest step; None: no layout fits."""
    fewest: int


def _best_nodes(
    decision: TrainDecision,
    spec: Spec,
    *,
    price: Priced,
    settings: SearchSettings,
    nodes: int,
    is_shared_only: bool,
) -> _Searched:
    """Find how many of the nodes that are left have the fastest step."""
    limits = kept_limits(decision, spec)
    deadline = settings.begin(SEARCH_SHARE)
    best: NodeNumbers | None = None
    below_s, fewest = math.inf, nodes
    for used in deadline.before_end(range(nodes - 1, _fewest(nodes) - 1, -1)):
        left = replace(settings.until(deadline), top=1, band_ratio=0.0, below_s=below_s)
        fewer = fewer_nodes(
            nodes - 1,
            spare_nodes=nodes - 1 - used,
            limits=limits,
            is_shared_only=is_shared_only,
        )
        smaller = changed_spec(spec, fewer.values)
        fastest = price(smaller.cluster.pools[0]).fastest(smaller, left)
        fewest = used
        if fastest is not None and fastest.step_s < below_s:
            best, below_s = fewer, fastest.step_s
    return _Searched(best=best, fewest=fewest)


def kept_limits(decision: TrainDecision, spec: Spec) -> dict[str, tuple[int, ...]]:
    """Return what of a layout stays, so that the targets restore its checkpoints."""
    able, moe = spec.programs.capabilities(), spec.model.moe
    limits: dict[str, tuple[int, ...]] = {"zero_stage": (decision.zero_stage,)}
    if not able.reshards_data_parallel:
        limits["data_parallel_size"] = (decision.data_parallel_size,)
    if able.reshard_needs_expert_ranks and moe is not None:
        has_ranks = decision.expert_model_parallel_size > 1
        allowed = spec.search.expert_model_parallel_size or divisors(moe.num_experts).tolist()
        limits["expert_model_parallel_size"] = tuple(
            degree for degree in allowed if (degree > 1) is has_ranks
        )
    return limits
