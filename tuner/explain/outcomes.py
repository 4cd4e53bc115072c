"""A plan as the outcome of a what-if: the same figures for every change, so that outcomes compare.

Training is compared by tokens per second of all devices (step times do not compare where the batch
or the sequence changes) of the chosen decision, so that nothing is called better whose own numbers
are worse. Among decisions near the fastest a plan prefers the easier one, so a gain may come from
another preference; the fastest is reported too. A deployment is compared by the objective of its
goal, a balanced placement by the share of all token copies on its most-loaded ranks over hold-out
passes (imbalance does not compare where the number of ranks changes), another placement by the
objective of its certificate.
"""

from typing import NamedTuple

from tuner.explain.planned_spec import StoredPlan
from tuner.explain.words import differences, words
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.plans.what_if import Band, Outcome
from tuner.spec.place import Objective


class Figures(NamedTuple):
    """Figures of a plan, with the objective by which outcomes compare."""

    values: dict[str, float]
    bands: dict[str, Band]
    objective: str
    more_is_better: bool


def to_outcome(
    plan: StoredPlan,
    *,
    change: str,
    says: str,
    base: StoredPlan | None,
    solve_s: float,
) -> Outcome:
    """Return the outcome of a plan, compared with the unchanged plan."""
    plan_figures = to_figures(plan)
    return Outcome(
        change=change,
        says=says,
        status=plan.certificate.status,
        reason=_reason(plan),
        num_devices=None if plan.decision is None else plan.decision.num_devices,
        decision="" if plan.decision is None else words(plan.decision),
        decision_changes=_changes(base, plan),
        objective="" if plan_figures is None else plan_figures.objective,
        figures={} if plan_figures is None else plan_figures.values,
        bands={} if plan_figures is None else plan_figures.bands,
        gain_ratio=None
        if base is None or plan_figures is None
        else _gain(plan_figures, to_figures(base)),
        solve_s=solve_s,
    )


def to_figures(plan: StoredPlan) -> Figures | None:
    """Return the figures of a plan; None where it has no decision."""
    if isinstance(plan, Plan):
        return _training(plan)
    if isinstance(plan, ServePlan):
        return _deployment(plan)
    return _placement(plan)


def _reason(plan: StoredPlan) -> str:
    """What binds the plan; where nothing fits, with the first relaxation too."""
    if plan.decision is not None or isinstance(plan, PlacePlan) or not plan.relaxations:
        return plan.binding_constraint
    relaxation = plan.relaxations[0]
    return f"{plan.binding_constraint}; nearest relaxation: {relaxation.change}"


def _changes(base: StoredPlan | None, plan: StoredPlan) -> tuple[str, ...]:
    if base is None or base.decision is None or plan.decision is None:
        return ()
    return differences(base.decision, plan.decision)


def _gain(figures: Figures, base: Figures | None) -> float | None:
    if base is None or base.objective != figures.objective:
        return None
    before, after = base.values[figures.objective], figures.values[figures.objective]
    if before <= 0.0 or after <= 0.0:
        return None
    return (after - before if figures.more_is_better else before - after) / before


def _training(plan: Plan) -> Figures | None:
    predicted = plan.predicted
    if predicted is None:
        return None
    # The certificate's objective uses the engine's own gradient buckets, a step does not.
    fastest_s = predicted.step_time_s if plan.preferred is None else plan.preferred.fastest_step_s
    tokens = plan.goal.tokens_per_step
    low, high = predicted.step_time_s_band
    values = {
        "step_time_s": predicted.step_time_s,
        "tokens_per_s": tokens / predicted.step_time_s,
        "fastest_step_time_s": fastest_s,
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device,
        "peak_memory_bytes": float(max(predicted.peak_memory_bytes)),
    }
    if predicted.mfu_ratio is not None:
        values["mfu_ratio"] = predicted.mfu_ratio
    if predicted.run is not None and predicted.run.wall_clock_s is not None:
        values["run_s"] = predicted.run.wall_clock_s
    if predicted.run is not None and predicted.run.cost is not None:
        values["run_cost"] = predicted.run.cost
    bands = {
        "step_time_s": (low, high),
        "tokens_per_s": (tokens / high, tokens / low),
        "tokens_per_s_per_device": predicted.tokens_per_s_per_device_band,
        "peak_memory_bytes": max(predicted.peak_memory_bytes_band, key=lambda band: band[1]),
    }
    return Figures(values, bands, objective="tokens_per_s", more_is_better=True)


def _deployment(plan: ServePlan) -> Figures | None:
    predicted, decision = plan.predicted, plan.decision
    if predicted is None or decision is None:
        return None
    values = {
        "num_devices": float(decision.num_devices),
        "requests_per_s": predicted.requests_per_s,
        "goodput_per_device": predicted.goodput_per_device,
        "ttft_mean_s": predicted.ttft_s.mean,
        "ttft_p90_s": predicted.ttft_s.p90,
        "tpot_mean_s": predicted.tpot_s.mean,
        "tpot_p90_s": predicted.tpot_s.p90,
    }
    if predicted.cost_per_hour is not None:
        values["cost_per_hour"] = predicted.cost_per_hour
    if predicted.token_cost is not None:
        values["cost_per_million_input_tokens"] = predicted.token_cost.input_per_million
        values["cost_per_million_output_tokens"] = predicted.token_cost.output_per_million
    objective = {
        "goodput": "goodput_per_device",
        "devices": "num_devices",
        "cost": "cost_per_hour",
        "rate": "requests_per_s",
    }[plan.goal.objective]
    return Figures(
        values,
        {"ttft_mean_s": predicted.ttft_s_band, "tpot_mean_s": predicted.tpot_s_band},
        objective=objective if objective in values else "num_devices",
        more_is_better=objective in ("goodput_per_device", "requests_per_s"),
    )


def _placement(plan: PlacePlan) -> Figures | None:
    predicted, objective, decision = plan.predicted, plan.certificate.objective, plan.decision
    if predicted is None or decision is None or objective is None:
        return None
    values = {"objective": objective}
    values |= {f"imbalance:{name}": one for name, one in predicted.imbalance.items()}
    values |= {f"layer_time_s:{one.workload}": one.after_s for one in predicted.layer_times}
    bands = {f"imbalance:{name}": band for name, band in predicted.imbalance_band.items()}
    bands |= {f"layer_time_s:{one.workload}": one.after_s_band for one in predicted.layer_times}
    if plan.goal.objective is not Objective.BALANCE:
        return Figures(values, bands, objective="objective", more_is_better=False)
    weights = {one.name: one.weight for one in plan.goal.workloads}
    mean = sum(weights[name] * one for name, one in predicted.imbalance.items())
    values["busiest_rank_ratio"] = mean / sum(weights.values()) / decision.ranks
    return Figures(values, bands, objective="busiest_rank_ratio", more_is_better=False)
