"""Candidate placements in order of preference, and the alternatives of a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from solvers.placement.ranks import Placement
from tuner.config.place import PlaceDecision
from tuner.errors import SpecError
from tuner.plans.place import PlaceAlternative
from tuner.search.place.candidates import TRAFFIC, EplbBaseline
from tuner.search.place.comparison import evaluate_workload
from tuner.search.place.cost import fit_cost
from tuner.search.place.dispatch_choice import launch_misfits
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.links import LinkCosts
from tuner.search.place.prices import Pricing
from tuner.search.place.traffic import broken_limits, placement_traffic
from tuner.search.place.transitions import Tokens
from tuner.spec.files import shown_path
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec
from tuner.units import format_ratio

SAME_RATIO: Final = 1e-9
"""Relative difference of costs that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidateScores:
    """Candidates scored on the fit passes, under one dispatch rule."""

    placements: Mapping[str, Placement]
    """Candidate placements by name, best first."""
    values: Mapping[str, float]
    """Objective of each candidate, by name."""
    broken: Mapping[str, str]
    """The limit that a placement breaks; empty: none."""

    @property
    def method(self) -> str:
        """Name of the best candidate."""
        return next(iter(self.placements))

    @property
    def chosen(self) -> Placement:
        """The best candidate."""
        return self.placements[self.method]


def score_candidates(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    candidates: Mapping[str, Placement],
    baseline: EplbBaseline,
    pricing: Pricing | None,
    links: LinkCosts,
    dispatch: str,
) -> CandidateScores:
    """Order the candidates, EPLB's and the current placement by cost; the goal's method first.

    Raises:
        SpecError: no placement found can be launched with the dispatch that the goal names.
    """
    method = spec.goal.method.value
    named = _name_candidates(spec, candidates, baseline)
    if spec.goal.objective in TRAFFIC:
        values = {
            name: placement_traffic(spec, evidence, one, baseline, links, tokens=Tokens.FIT)
            for name, one in named.items()
        }
        broken = {
            name: (*broken_limits(spec, evidence, one, baseline, links), "")[0]
            for name, one in named.items()
        }
    else:
        values = {
            name: fit_cost(spec, evidence, one, pricing, dispatch) for name, one in named.items()
        }
        broken = dict.fromkeys(named, "")
    misfits = launch_misfits(spec, named, dispatch)
    order = sorted(
        named,
        key=lambda name: (
            name != method,
            bool(misfits[name]),
            bool(broken[name]),
            values[name],
        ),
    )
    if misfits[order[0]]:
        raise SpecError(f"{shown_path(spec.path)}: goal.dispatch: {misfits[order[0]]}")
    broken = {name: misfits[name] or words for name, words in broken.items()}
    return CandidateScores(
        placements={name: named[name] for name in order},
        values=values,
        broken=broken,
    )


def _name_candidates(
    spec: PlaceSpec, candidates: Mapping[str, Placement], baseline: EplbBaseline
) -> dict[str, Placement]:
    named = dict(candidates)
    limited = spec.goal.max_moved_experts is not None or spec.goal.max_moved_bytes is not None
    if not limited and spec.goal.method is not Method.EPLB:
        named[baseline.name] = baseline.placement
    if spec.current.expert_LS.shape == baseline.placement.expert_LS.shape:
        named["as it runs"] = spec.current
    return named


def to_alternatives(
    spec: PlaceSpec, evidence: tuple[WorkloadEvidence, ...], scores: CandidateScores, dispatch: str
) -> tuple[PlaceAlternative, ...]:
    """Format the other candidates, evaluated under the plan's dispatch rule."""
    return tuple(
        PlaceAlternative(
            method=name,
            decision=to_decision(spec, placement),
            objective=scores.values[name],
            imbalance={
                one.name: evaluate_workload(spec, one, placement, dispatch).imbalance
                for one in evidence
            },
            is_legal=not scores.broken[name],
            lost_by=scores.broken[name] or _lost_by(scores, name),
        )
        for name, placement in tuple(scores.placements.items())[1:]
    )


def _lost_by(scores: CandidateScores, name: str) -> str:
    """Compare its objective with the plan's."""
    value, least = scores.values[name], scores.values[scores.method]
    is_better = value < least * (1.0 - SAME_RATIO)
    words = f"{more_of(value, least)} of the objective"
    return words + (", but the goal names its method" if is_better else "")


def more_of(value: float, least: float) -> str:
    """Format how much more, or less, a value is than another."""
    if value < least * (1.0 - SAME_RATIO):
        return f"{format_ratio(1.0 - value / least, digits=2)} less"
    if value <= least * (1.0 + SAME_RATIO):
        return "as much"
    return f"{format_ratio(value / max(least, 1e-12) - 1.0, digits=2)} more"


def to_decision(spec: PlaceSpec, chosen: Placement) -> PlaceDecision:
    """Format a placement for the plan."""
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
