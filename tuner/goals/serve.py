"""Deployments, from the spec to the report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from tuner.config.serve import Instances, ServeDecision
from tuner.config.serve_words import (
    describe_kv_transfer,
    group_changes,
    island_words,
    router_words,
    short_group,
    short_serve,
)
from tuner.goals.goal import (
    MOST_RIVALS,
    Figures,
    Goal,
    changes_of_pools,
    seconds_by_cause,
    terms,
)
from tuner.goals.plan_ratios import serve_ratio_band
from tuner.goals.serve_folder import read_serve_plan, write_serve_plan
from tuner.goals.serve_plan import deploy, price_serving_pools
from tuner.goals.serve_planned import (
    other_kernels,
    planned_keys,
    read_planned_serve_spec,
    recorded_hits,
)
from tuner.goals.stored_figures import serve_figures
from tuner.goals.wanted_sizes import serve_sizes
from tuner.plans.serve import ServePlan, ServePrediction
from tuner.plans.what_if import LimitChange, Rival, Why
from tuner.report.replay import Replay, replayed
from tuner.search.progress import PlanningEvent, ProgressListener, ignore_progress
from tuner.verify.deployments.records import ServeVerified


class ExplainedServePlan(ServePlan):
    """Output of `moetune explain --json` for a deployment: `plan.json` with the reasons."""

    why: Why


def _changes(before: ServeDecision, after: ServeDecision) -> Iterator[str]:
    """Yield changes of mode, of instances, and of what lies between them.

    Where one kind of instance of a role and pool became one other kind, only what differs between
    the two is named.
    """
    if before.mode != after.mode:
        yield f"{before.mode} -> {after.mode}"
    old, new = _kinds(before), _kinds(after)
    for kind in dict.fromkeys((*old, *new)):
        gone = [group for group in old.get(kind, ()) if group not in new.get(kind, ())]
        come = [group for group in new.get(kind, ()) if group not in old.get(kind, ())]
        if len(gone) == len(come) == 1:
            yield f"{' '.join(filter(None, kind))}: {', '.join(group_changes(gone[0], come[0]))}"
        else:
            yield from (f"without {short_group(group)}" for group in gone)
            yield from (f"with {short_group(group)}" for group in come)
    transfers, other_transfers = _transfers(before), _transfers(after)
    for pools in dict.fromkeys((*transfers, *other_transfers)):
        was, will_be = transfers.get(pools, "none"), other_transfers.get(pools, "none")
        if was != will_be:
            yield f"KV transfer {pools}: {was} -> {will_be}"
    links, other_links = _between(before), _between(after)
    yield from (f"without {link}" for link in links if link not in other_links)
    yield from (f"with {link}" for link in other_links if link not in links)


def _kinds(decision: ServeDecision) -> dict[tuple[str, ...], list[Instances]]:
    kinds: dict[tuple[str, ...], list[Instances]] = {}
    for group in decision.instances:
        kinds.setdefault((group.role.value, "on", group.pool, group.island), []).append(group)
    return kinds


def _transfers(decision: ServeDecision) -> dict[str, str]:
    """KV transfers in words, by the pools that they connect."""
    by_pools: dict[str, str] = {}
    for transfer in decision.handovers:
        pools = f"{transfer.from_pool} to {transfer.to_pool}"
        words = describe_kv_transfer(transfer).removeprefix(pools).strip(" :")
        by_pools[pools] = f"{by_pools[pools]} and {words}" if pools in by_pools else words
    return by_pools


def _between(decision: ServeDecision) -> list[str]:
    above = decision.offload_above_tokens
    return [
        *([] if decision.router is None else [router_words(decision.router)]),
        *island_words(decision),
        *([] if above is None else [f"prompts above {above:,} tokens on the remote pool"]),
    ]


def _figures(plan: ServePlan) -> Figures | None:
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


def _rivals(plan: ServePlan) -> tuple[Rival, ...]:
    if plan.predicted is None:
        return ()
    before = plan.predicted.breakdown_s
    return tuple(
        Rival(
            decision=short_serve(alternative.decision),
            within_band=alternative.within_band,
            lost_by=alternative.lost_by,
            slower_s=sum(alternative.predicted.breakdown_s.values()) - sum(before.values()),
            terms_s=terms(before, alternative.predicted.breakdown_s),
            figures=_served(alternative.predicted, num_devices=alternative.decision.num_devices),
        )
        for alternative in plan.alternatives[:MOST_RIVALS]
    )


def _served(predicted: ServePrediction, *, num_devices: int) -> dict[str, float]:
    figures = {
        "num_devices": float(num_devices),
        "ttft_p90_s": predicted.ttft_s.p90,
        "tpot_p90_s": predicted.tpot_s.p90,
        "goodput_per_device": predicted.goodput_per_device,
    }
    if predicted.cost_per_hour is not None:
        figures["cost_per_hour"] = predicted.cost_per_hour
    return figures


def _usual_changes(plan: ServePlan) -> tuple[LimitChange, ...]:
    requested = [*changes_of_pools(plan), LimitChange(key="bandwidth", value="x2")]
    if plan.goal.objective == "rate":
        return tuple(requested)  # It is as much as the devices serve.
    key = "concurrency" if plan.goal.traffic.is_closed_loop else "rate"
    return (*requested, LimitChange(key=key, value="x2"))


def _replay(
    folder: Path, *, profiles: Sequence[Path] = (), watch: ProgressListener = ignore_progress
) -> Replay | None:
    """Simulate the traffic of a deployment's plan again; None where that is not possible.

    Raises:
        PlanUnreadableError: the folder no longer has its plan or spec.
        SpecError: the spec can no longer be read.
    """
    text = "the traffic, at the planned rate and at others"
    watch(PlanningEvent(stage="simulating", text=text))
    plan = read_serve_plan(folder)
    if plan.decision is None:
        return None
    spec = read_planned_serve_spec(folder, plan)
    priced_pools = price_serving_pools(spec, profiles, residual=plan.provenance.residual)
    return replayed(spec, priced_pools, plan.decision, hits=recorded_hits(spec, plan))


GOAL: Final = Goal(
    kind="serve",
    plan_type=ServePlan,
    explained=ExplainedServePlan,
    plan=deploy,
    write=lambda folder, made: write_serve_plan(
        folder, made.plan, spec=made.spec, profiles=made.profiles
    ),
    read=read_serve_plan,
    verified=ServeVerified,
    spec=planned_keys,
    words=short_serve,
    differences=lambda before, after: tuple(_changes(before, after)),
    figures=_figures,
    rivals=_rivals,
    changes=(
        *("nodes", "memory", "bandwidth", "rate", "concurrency"),
        *("input-tokens", "output-tokens", "ttft", "tpot"),
    ),
    usual_changes=_usual_changes,
    replay=_replay,
    wanted_sizes=serve_sizes,
    ratio_band=serve_ratio_band,
    stored_figures=serve_figures,
    seconds=seconds_by_cause,
    other_kernels=other_kernels,
)
