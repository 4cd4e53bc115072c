"""Placements in the order in which a plan takes them, and what is said of those not taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from solvers.placement.balance.problem import Dispatch as Solved
from solvers.placement.ranks import Placement
from tuner.errors import SpecError
from tuner.place_plan import PlaceAlternative, PlaceDecision
from tuner.planner.place.candidates import TRAFFIC, Rule, solved_dispatch
from tuner.planner.place.comparison import judge_workload
from tuner.planner.place.cost import parts_cost, planned_cost
from tuner.planner.place.dispatch_choice import launch_misfits
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.passes import weighs_passes
from tuner.planner.place.prices import Pricing
from tuner.planner.place.sampled import Tokens
from tuner.planner.place.traffic import broken_limits, traffic_of
from tuner.spec.files import shown_path
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

SAME_RATIO: Final = 1e-9
"""Between costs that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """Placements on the passes that are planned from, under one dispatch rule."""

    placements: Mapping[str, Placement]
    """By name, the one to take first."""
    values: Mapping[str, float]
    """Of the objective."""
    ordered_by: Mapping[str, float]
    order_is_of: str
    """What the order is by, in words; empty: the objective."""
    broken: Mapping[str, str]
    """The limit that a placement breaks; empty: none."""

    @property
    def method(self) -> str:
        """Name of the one to take."""
        return next(iter(self.placements))

    @property
    def chosen(self) -> Placement:
        """The one to take."""
        return self.placements[self.method]


def weigh(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    candidates: Mapping[str, Placement],
    rule: Rule,
    pricing: Pricing | None,
    links: LinkCosts,
    dispatch: str,
    unseen: Mapping[str, float],
) -> Weighed:
    """Order what the goal's method placed, else all by cost, beside EPLB and what runs.

    Where methods were weighed on passes that they did not see, by that: what was not counts as
    fitted to what it was made from as the worst of them.

    Raises:
        SpecError: no placement found can be launched with the dispatch that the goal names.
    """
    method = spec.goal.method.value
    named = _named(spec, candidates, rule)
    if spec.goal.objective in TRAFFIC:
        values = {
            name: traffic_of(spec, evidence, one, rule, links, tokens=Tokens.PLANNED)
            for name, one in named.items()
        }
        broken = {
            name: (*broken_limits(spec, evidence, one, rule, links), "")[0]
            for name, one in named.items()
        }
    else:
        values = {
            name: planned_cost(spec, evidence, one, pricing, dispatch)
            for name, one in named.items()
        }
        broken = dict.fromkeys(named, "")
    if unseen:
        made = {name: unseen.get(name.removesuffix(f" for {dispatch}")) for name in named}
        worst = max(cost / values[name] for name, cost in made.items() if cost is not None)
        ordered_by = {name: cost or worst * values[name] for name, cost in made.items()}
    else:
        ordered_by = {
            name: parts_cost(spec, evidence, one, values[name], dispatch, pricing)
            for name, one in named.items()
        }
    unlaunched = launch_misfits(spec, named, dispatch)
    order = sorted(
        named,
        key=lambda name: (
            name != method,
            bool(unlaunched[name]),
            bool(broken[name]),
            ordered_by[name],
        ),
    )
    if unlaunched[order[0]]:
        raise SpecError(f"{shown_path(spec.path)}: goal.dispatch: {unlaunched[order[0]]}")
    broken = {name: unlaunched[name] or words for name, words in broken.items()}
    return Weighed(
        placements={name: named[name] for name in order},
        values=values,
        ordered_by=ordered_by,
        order_is_of=_order_is_of(spec, dispatch, is_unseen=bool(unseen)),
        broken=broken,
    )


def _named(
    spec: PlaceSpec, candidates: Mapping[str, Placement], rule: Rule
) -> dict[str, Placement]:
    named = dict(candidates)
    limited = spec.goal.max_moved_experts is not None or spec.goal.max_moved_bytes is not None
    if not limited and spec.goal.method is not Method.EPLB:
        named[rule.name] = rule.placement
    if spec.current.expert_LS.shape == rule.placement.expert_LS.shape:
        named["as it runs"] = spec.current
    return named


def _order_is_of(spec: PlaceSpec, dispatch: str, *, is_unseen: bool) -> str:
    """Say what `parts_cost` or the folds look at, where that is not the objective itself."""
    if is_unseen:
        return "on planned passes that a method did not see"
    solved = solved_dispatch(dispatch)
    if spec.goal.objective is Objective.LAYER_TIME and solved is Solved.STATIC:
        return "over other launches"
    is_balance = spec.goal.objective is Objective.BALANCE
    if is_balance and solved.is_near and not weighs_passes(dispatch):
        return "over drawn loads of other passes"
    return ""


def alternatives_of(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], weighed: Weighed, dispatch: str
) -> tuple[PlaceAlternative, ...]:
    """Tell of the placements that were not taken, judged under the plan's rule."""
    return tuple(
        PlaceAlternative(
            method=name,
            decision=decision_of(spec, placement),
            objective=weighed.values[name],
            imbalance={
                one.name: judge_workload(spec, one, placement, dispatch).imbalance
                for one in evidence
            },
            is_legal=not weighed.broken[name],
            lost_by=weighed.broken[name] or _lost_by(weighed, name),
        )
        for name, placement in tuple(weighed.placements.items())[1:]
    )


def _lost_by(weighed: Weighed, name: str) -> str:
    """Say how its objective differs from the plan's and, where they are not ordered by it, what."""
    of = weighed.method
    words = f"{more_of(weighed.values[name], weighed.values[of])} of the objective"
    if weighed.order_is_of:
        decides = more_of(weighed.ordered_by[name], weighed.ordered_by[of])
        words += f"; {weighed.order_is_of}, which decides, {decides}"
    is_better = weighed.ordered_by[name] < weighed.ordered_by[of] * (1.0 - SAME_RATIO)
    return words + (", but the goal names its method" if is_better else "")


def more_of(value: float, least: float) -> str:
    """Say how much more, or less, a value is than another."""
    if value < least * (1.0 - SAME_RATIO):
        return f"{1.0 - value / least:.2%} less"
    if value <= least * (1.0 + SAME_RATIO):
        return "as much"
    return f"{value / max(least, 1e-12) - 1.0:.2%} more"


def decision_of(spec: PlaceSpec, chosen: Placement) -> PlaceDecision:
    """State a placement as a plan does."""
    goal = spec.goal
    return PlaceDecision(
        physical_to_logical=tuple(tuple(row) for row in chosen.expert_LS.tolist()),
        layer_ids=spec.layer_ids,
        num_experts=spec.num_experts,
        num_layers=spec.num_layers,
        ranks=goal.ranks,
        ranks_per_node=goal.ranks_per_node or goal.ranks,
        slots_per_rank=tuple(spec.ranks.slots_G.tolist()),
    )
