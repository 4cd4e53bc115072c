"""Training runs, from the spec to the report."""

from pathlib import Path
from typing import Final

from tuner.config.train_words import short_decision, train_changes
from tuner.goals.goal import (
    MOST_RIVALS,
    Figures,
    Goal,
    PlannedSpec,
    changes_of_pools,
    pools_of,
    profiled_memory,
    seconds_by_cause,
    terms,
)
from tuner.goals.plan_ratios import train_ratio_band
from tuner.goals.stored_figures import train_figures
from tuner.goals.train_folder import read_plan
from tuner.goals.train_plan import plan_training, write_planned
from tuner.goals.wanted_sizes import train_sizes
from tuner.plans.folder import name_used_profiles
from tuner.plans.train import Plan
from tuner.plans.what_if import LimitChange, Rival, Why
from tuner.spec.documents import LengthFile
from tuner.spec.spec_file import Keys
from tuner.verify.records import Verified


class ExplainedPlan(Plan):
    """Output of `moetune explain --json` for a training plan: `plan.json` with the reasons."""

    why: Why


def _spec(plan: Plan, keys: Keys, used: Path) -> PlannedSpec:
    pools = pools_of(keys)
    for position, pool in enumerate(pools):
        pool.pop("profile", None)
        if "link_matrix" in pool:
            pool["link_matrix"] = str(used / f"links-{position}.csv")
    name_used_profiles(pools, plan.provenance.profile_sha256, used)
    goal = keys["goal"]
    if goal.get("routing"):
        goal["routing"] = {**goal["routing"], "path": str(used / "routing.json")}
    if isinstance(plan.goal.sequence_lengths, LengthFile):
        goal["sequence_lengths"] = str(used / "lengths.csv")
    if (goal.get("reliability") or {}).get("log"):
        goal["reliability"]["log"]["path"] = str(used / "failures.json")
    return PlannedSpec(
        keys=keys,
        cluster=plan.cluster,
        is_reference=bool(plan.provenance.device_kind),
        residual=plan.provenance.residual,
        memory_bytes=profiled_memory(keys) if plan.provenance.device_kind else {},
    )


def _figures(plan: Plan) -> Figures | None:
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


def _rivals(plan: Plan) -> tuple[Rival, ...]:
    if plan.predicted is None:
        return ()
    chosen = plan.predicted
    return tuple(
        Rival(
            decision=short_decision(alternative.decision),
            within_band=alternative.within_band,
            ratio_band=alternative.ratio_band,
            lost_by=alternative.lost_by,
            slower_s=alternative.predicted.step_time_s - chosen.step_time_s,
            terms_s=terms(chosen.breakdown_s, alternative.predicted.breakdown_s),
            figures={
                "step_time_s": alternative.predicted.step_time_s,
                "peak_memory_bytes": float(max(alternative.predicted.peak_memory_bytes)),
            },
        )
        for alternative in plan.alternatives[:MOST_RIVALS]
    )


def _usual_changes(plan: Plan) -> tuple[LimitChange, ...]:
    requested = changes_of_pools(plan)
    if not plan.provenance.device_kind:
        requested.append(LimitChange(key="bandwidth", value="x2"))
    if any(pool.nodes > 1 for pool in plan.cluster.pools):
        requested.append(LimitChange(key="nodes", value="x2"))
    return (*requested, LimitChange(key="batch", value="x2"))


def _gains_nothing(plan: Plan, base: Plan, gain_ratio: float) -> bool:
    more = plan.cluster.num_devices > base.cluster.num_devices
    return more and base.decision is not None and gain_ratio <= 0.0


GOAL: Final = Goal(
    kind="train",
    plan_type=Plan,
    explained=ExplainedPlan,
    plan=plan_training,
    write=write_planned,
    read=read_plan,
    verified=Verified,
    spec=_spec,
    words=short_decision,
    differences=train_changes,
    figures=_figures,
    rivals=_rivals,
    changes=("nodes", "memory", "bandwidth", "batch", "sequence-length"),
    usual_changes=_usual_changes,
    wanted_sizes=train_sizes,
    ratio_band=train_ratio_band,
    stored_figures=train_figures,
    has_price=True,
    seconds=seconds_by_cause,
    gains_nothing=_gains_nothing,
)
