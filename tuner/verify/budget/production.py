"""Prices a decision on the analytic model, like plans of production engines.

The search builds a layout for each decision and prices many; here the layout is the decision's own,
so scaled-down jobs can be priced too. A pipeline's step is the larger of closed form and
simulation, as in a plan, and the plan's band applies to every job.

A recording's imbalance is that of all its layers, whichever are kept; machines are the job's own.

Letters: P devices of a pipeline, S stages, C columns (one).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tuner.config.candidates import strategies_of
from tuner.config.columns import Strategies
from tuner.config.train import TrainDecision
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory import price_memory
from tuner.costs.train.shapes import Stages, number
from tuner.costs.train.step import price_step
from tuner.plans.train import Plan, TrainPrediction
from tuner.search.train.finalists import simulated_s
from tuner.search.train.layouts import to_stages
from tuner.search.train.plan_fields import stage_predictions
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import Detail


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
    return replace(
        strategies_of(
            decision,
            sequence_length=problem.sequence_length,
            global_batch_size=problem.global_batch_size,
        ),
        linear_bytes=problem.linear_bytes,
        expert_imbalance=mean,
        expert_imbalance_p99=p99,
        **problem.tuned,
    )
