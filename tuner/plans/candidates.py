"""The candidates of a plan as a data frame; only columns if the plan has no decision.

train   the plan, its runners-up, their variants and the Pareto front of time and memory
serve   the Pareto front of tokens/s per device and per user, by mode
place   every workload, current and planned
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from tuner.config.train_words import train_words
from tuner.tables import typed_table

if TYPE_CHECKING:
    import pandas as pd

    from tuner.config.train import TrainDecision
    from tuner.plans.place import PlacePlan
    from tuner.plans.serve import ServePlan
    from tuner.plans.train import Plan, TrainPrediction

TRAIN: Final = {
    **{"kind": "string", "decision": "string"},
    **dict.fromkeys(("step_time_s", "step_time_s_low", "step_time_s_high"), "float64"),
    **{"tokens_per_s_per_device": "float64", "peak_memory_bytes": "Int64"},
    **dict.fromkeys(("cost_per_step", "ratio_low", "ratio_high"), "float64"),
    **{"within_band": "boolean", "lost_by": "string"},
}
SERVE: Final = {
    "mode": "string",
    **dict.fromkeys(("tokens_per_s_per_user", "tokens_per_s_per_device"), "float64"),
    **{"running": "int64", "instance": "string", "prefill": "string"},
    **{"prefill_per_instance": "float64", "ttft_s": "float64"},
    **{"within_targets": "bool", "on_joint_front": "bool"},
}
PLACE: Final = {
    "workload": "string",
    **dict.fromkeys(("imbalance_before", "imbalance_rule", "imbalance_after"), "float64"),
    **dict.fromkeys(("before_s", "rule_s", "after_s"), "float64"),
}


def train_candidates(plan: "Plan") -> "pd.DataFrame":
    """Return the decisions that were compared."""
    return typed_table(_decisions(plan), TRAIN)


def serve_candidates(plan: "ServePlan") -> "pd.DataFrame":
    """Return the points of the front."""
    return typed_table(map(dict, plan.pareto), SERVE)


def place_candidates(plan: "PlacePlan") -> "pd.DataFrame":
    """Return every workload under the current placement, EPLB's and the planned one."""
    outcomes = () if plan.predicted is None else plan.predicted.outcomes
    times = () if plan.predicted is None else plan.predicted.layer_times
    seconds = {layer_time.workload: dict(layer_time) for layer_time in times}
    return typed_table(
        (dict(outcome) | seconds.get(outcome.workload, {}) for outcome in outcomes), PLACE
    )


def _decisions(plan: "Plan") -> Iterator[Mapping[str, object]]:
    if plan.decision is None or plan.predicted is None:
        return
    yield {"kind": "plan", **_predicted(plan.decision, plan.predicted)}
    for kind, others in (("alternative", plan.alternatives), ("variant", plan.variants)):
        for alternative in others:
            low, high = alternative.ratio_band or (None, None)
            ratios = {"ratio_low": low, "ratio_high": high}
            yield {
                "kind": kind,
                **dict(alternative),
                **_predicted(alternative.decision, alternative.predicted),
                **ratios,
            }
    for point in plan.pareto:
        yield {"kind": "front", **dict(point), "decision": train_words(point.decision)}


def _predicted(decision: "TrainDecision", prediction: "TrainPrediction") -> Mapping[str, object]:
    low, high = prediction.step_time_s_band
    edges = {"step_time_s_low": low, "step_time_s_high": high}
    words = {
        "decision": train_words(decision),
        "peak_memory_bytes": max(prediction.peak_memory_bytes),
    }
    return {**dict(prediction), **edges, **words}
