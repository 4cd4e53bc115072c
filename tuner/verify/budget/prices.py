"""Prices decisions and scaled-down jobs with the model that a plan was made with.

A plan of the reference step was priced on its profile. One of a production engine was priced on the
analytic model; its inputs are in the plan's folder, except `--uncalibrated`, so the plan's own
choice is priced first, with residuals and without. If neither matches the plan, another release
wrote it, and scaled-down jobs have no price.

On the analytic model the search builds a layout for each decision and prices many; here the layout
is the decision's own, so scaled-down jobs can be priced too. A pipeline's step is the larger of
closed form and simulation, as in a plan, and the plan's band applies to every job.

A recording's imbalance is that of all its layers, whichever are kept; machines are the job's own.

Letters: P devices of a pipeline, S stages, C columns (one).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from tuner.config.candidates import strategies_of
from tuner.config.columns import Strategies
from tuner.config.shapes import Stages, number
from tuner.config.train import TrainDecision
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory import price_memory
from tuner.costs.train.step import price_step
from tuner.engines.targets import programs
from tuner.errors import OutsideProfileError
from tuner.plans.train import Plan, TrainPrediction
from tuner.search.train.finalists import simulated_s
from tuner.search.train.layouts import to_stages
from tuner.search.train.plan_fields import stage_predictions
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import Detail
from tuner.spec.routing import read_routing
from tuner.spec.spec import Spec
from tuner.units import format_s
from tuner.verify.space import Price, TrainSpace, measured_prices


def production_prices(
    problem: TrainProblem, whole: TrainPrediction
) -> Callable[[Plan, TrainDecision], TrainPrediction]:
    """Return the pricer of decisions of a plan and of scaled-down plans.

    Args:
        problem: that the plan solves.
        whole: the plan's prediction of its choice; its band applies to every job.
    """
    low, high = (end / whole.step_time_s for end in whole.step_time_s_band)

    def priced(plan: Plan, decision: TrainDecision) -> TrainPrediction:
        job_problem = replace(
            problem,
            model=plan.model,
            shape=shape_of_model(plan.model, mtp_layers=decision.mtp_num_layers),
            global_batch_size=plan.goal.global_batch_size,
            num_devices=decision.num_devices,
        )
        layers_SC = np.array(decision.pipeline_layout)[:, None]
        stages = to_stages(plan.model, layers_SC)
        detail = _detail(job_problem, decision, stages)
        step_s = max(number(detail.step.step_s), simulated_s(detail))
        seconds = detail.step.by_cause(simulated_s=step_s)
        tokens = plan.goal.tokens_per_step / decision.num_devices
        peaks = tuple(round(float(peak)) for peak in detail.memory.total_PC[:, 0])
        return TrainPrediction(
            step_time_s=step_s,
            step_time_s_band=(step_s * low, step_s * high),
            tokens_per_s_per_device=tokens / step_s,
            tokens_per_s_per_device_band=(tokens / step_s / high, tokens / step_s / low),
            peak_memory_bytes=peaks,
            peak_memory_bytes_band=tuple((float(peak), float(peak)) for peak in peaks),
            memory_limit_bytes=int(problem.memory_limit_bytes),
            activation_bytes=tuple(round(float(b)) for b in detail.memory.activations_PC[:, 0]),
            breakdown_s=seconds,
            communication_s=sum(
                seconds[name] for name in ("tensor", "context", "expert", "sharding", "bubble")
            ),
            stages=stage_predictions(detail),
        )

    return priced


def _detail(problem: TrainProblem, decision: TrainDecision, stages: Stages) -> Detail:
    strategies = _strategies(problem, decision)
    memory = price_memory(
        problem.shape,
        strategies,
        problem.hardware,
        stages,
        constants=problem.memory_constants,
    )
    step = price_step(
        problem.shape,
        strategies,
        problem.hardware,
        problem.constants,
        stages,
        prices=problem.prices,
        order=tuple(decision.rank_order.split("-")),
    )
    return Detail(strategies=strategies, stages=stages, step=step, memory=memory)


def _strategies(problem: TrainProblem, decision: TrainDecision) -> Strategies:
    """Return a decision as a column of the formulas, priced like the problem."""
    imbalance = problem.expert_imbalance
    experts = decision.expert_model_parallel_size
    mean, p99 = (1.0, 1.0) if imbalance is None else imbalance.of_degree(experts)
    strategies = strategies_of(
        decision,
        sequence_length=problem.sequence_length,
        global_batch_size=problem.global_batch_size,
    )
    return replace(
        strategies,
        linear_bytes=problem.linear_bytes,
        expert_imbalance=mean,
        expert_imbalance_p99=p99,
        **problem.tuned,
        **problem.packed_columns(
            micro_batch=strategies.micro_batch,
            has_graphs=strategies.partial_graph + strategies.full_graph,
        ),
    )


SAME_RATIO = 1e-3
"""Tolerance within which two predictions of a decision come from the same model."""


def build_pricer(space: TrainSpace, *, used: Path) -> Price | None:
    """Return a pricer that matches the plan's model; None if there is none.

    Args:
        space: the plan and its decisions.
        used: folder of the plan's inputs.
    """
    if space.machine is not None:
        return measured_prices(space.machine)
    plan = space.plan
    if len(plan.cluster.pools) > 1 or plan.decision is None or plan.predicted is None:
        return None
    # Read on first use: most verifications launch full-scale jobs only.
    decision, whole = plan.decision, plan.predicted
    pricer = cache(lambda: _production(plan, decision, whole, used))
    return lambda smaller, decision: pricer()(smaller, decision)


def _production(plan: Plan, decision: TrainDecision, whole: TrainPrediction, used: Path) -> Price:
    """Return the analytic pricer that reproduces the plan's prediction of its choice.

    Raises:
        OutsideProfileError: none does.
    """
    predictions = []
    for is_calibrated in (True, False):
        price = _priced(plan, whole, used, is_calibrated=is_calibrated)
        step_s = price(plan, decision).step_time_s
        if abs(step_s / whole.step_time_s - 1.0) <= SAME_RATIO:
            return price
        predictions.append(format_s(step_s))
    raise OutsideProfileError(
        f"the plan predicts {format_s(whole.step_time_s)} a step and this release"
        f" {' or '.join(predictions)}: plan anew to launch smaller jobs"
    )


def _priced(
    plan: Plan, whole: TrainPrediction, used: Path, *, is_calibrated: bool
) -> Callable[[Plan, TrainDecision], TrainPrediction]:
    from tuner.costs.train.calibration import shipped
    from tuner.costs.train.measured_profile import read_measured
    from tuner.search.train.build_problem import build_problem, price_pool

    (pool,) = plan.cluster.pools
    is_measured = pool.name in plan.provenance.profile_sha256
    priced_pool = price_pool(
        pool,
        residuals=shipped() if is_calibrated else None,
        measured=read_measured(used / "profile", calibrated=is_calibrated) if is_measured else None,
    )
    routing = read_routing(used / "routing.json") if plan.goal.routing is not None else None
    spec = Spec(
        path=used / "spec.yaml",
        model_path=used / "config.json",
        model=plan.model,
        cluster=plan.cluster,
        goal=plan.goal,
        routing=routing,
        search=plan.search,
        programs=programs(plan.emit),
    )
    return production_prices(build_problem(spec, priced_pool), whole)
