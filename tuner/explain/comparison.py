"""Compares plans of one goal: what differs, term by term, and which is better.

The first plan is the reference: specs, decisions, terms and figures are compared with it. Plans are
ranked by the objective of their goal (tuner/explain/outcomes.py): the best plan against each of the
others, better beyond the band of their ratio, or a tie (tuner/goals/plan_ratios.py). Where the
specs differ (another batch, cluster, traffic), the figures are of different workloads, and the
differences say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pydantic import Field

from profilers.records import Record
from tuner.errors import TunerError
from tuner.goals.goal import Figures, Kind, StoredPlan, terms
from tuner.goals.plan_ratios import PlanRatio
from tuner.goals.registry import goal_of, read_any_plan
from tuner.paths import AnyPath, plan_folder
from tuner.plans.train import Band
from tuner.regress.observed import plan_facts, spec_differences
from tuner.regress.words import change_words
from tuner.report.what_if import FIGURES
from tuner.search.ratios import is_tie
from tuner.tables import typed_table

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_PLANS: Final = 64
FEWEST_PLANS: Final = 2

_RATIO: Final = ("ratio", "ratio_low", "ratio_high")
_TYPES: Final = {
    **dict.fromkeys(("plan", "kind", "name"), "string"),
    **dict.fromkeys(("value", "low", "high", *_RATIO), "float64"),
    **dict.fromkeys(("is_objective", "is_best", "is_tie"), "bool"),
}
"""Columns of a comparison's table."""


class FigureRatio(Record):
    """A figure of a plan over the same one of the reference."""

    ratio: float
    """Predicted figure over the reference's."""
    band: Band | None = None
    """Lowest and highest ratio as it may be measured; None where nothing states one."""


class ComparedPlan(Record):
    """One plan compared with the first."""

    plan: str
    """Folder of the plan, as given."""
    status: str
    """Status of the plan's certificate."""
    decision: str = ""
    """Short form of the decision; empty where there is none."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Predicted figures by name, in SI units as the names say."""
    bands: dict[str, Band] = Field(default_factory=dict)
    """Error bands of those figures that have one."""
    question_changes: tuple[str, ...] = ()
    """Differences of the plan's spec from the first plan's."""
    decision_changes: tuple[str, ...] = ()
    """Differences of the plan's decision from the first plan's."""
    terms_s: dict[str, float] = Field(default_factory=dict)
    """Additional seconds (negative: fewer) against the first plan, by cause, largest first."""
    ratios: dict[str, FigureRatio] = Field(default_factory=dict)
    """Figures that both plans have, over the first plan's; empty for the first."""
    against_best: FigureRatio | None = None
    """Objective over that of the best plan; None for the best itself and without a figure."""
    is_tie: bool = False
    """The band of `against_best` contains 1: a tie with the best plan."""


class Comparison(Record):
    """Output of `moetune compare --json`."""

    goal: Kind
    objective: str
    """Name of the figure by which plans are better or worse."""
    more_is_better: bool
    plans: tuple[ComparedPlan, ...]
    """Plans in the order in which they were named, the reference first."""
    best: int | None
    """Position of the plan with the best objective; None where none has a decision."""
    band_source: str = ""
    """Source of the band of the ratio to the best, of the plan nearest to it."""
    verdict: str
    """Result of the comparison, in a sentence."""

    def table(self) -> "DataFrame":
        """Return a row for each plan and figure, and one for each term of its step.

        Ratios and differences of terms are to the first plan.
        """
        return typed_table(self._rows(), _TYPES)

    def _rows(self) -> Iterator[dict[str, object]]:
        for place, plan in enumerate(self.plans):
            row = {"plan": plan.plan, "is_best": place == self.best, "is_tie": plan.is_tie}
            for name, value in plan.figures.items():
                low, high = plan.bands.get(name, (None, None))
                figure = {"kind": "figure", "name": name, "value": value, "low": low, "high": high}
                figure_ratio = plan.ratios.get(name)
                edges = (figure_ratio and figure_ratio.band) or (None, None)
                ratio = dict(
                    zip(_RATIO, (figure_ratio and figure_ratio.ratio, *edges), strict=True)
                )
                yield {**row, **figure, **ratio, "is_objective": name == self.objective}
            for name, value in plan.terms_s.items():
                term = {"kind": "difference_s", "name": name, "value": value}
                yield {**row, **term, "is_objective": False}


def compare(plans: Sequence[AnyPath]) -> Comparison:
    """Compare plans of one goal with the first of them.

    Args:
        plans: folders of two or more.

    Raises:
        PlanUnreadableError: one of them is missing or damaged.
        TunerError: there are fewer than two, or they are of several goals.
    """
    if not FEWEST_PLANS <= len(plans) <= MOST_PLANS:
        raise TunerError(
            f"{len(plans)} plan{'s' * (len(plans) != 1)}; name {FEWEST_PLANS} to {MOST_PLANS}"
            " folders of plans to compare, the reference first"
        )
    names = [str(plan) for plan in plans]
    read = [read_any_plan(plan_folder(plan)) for plan in plans]
    kinds = [goal_of(plan).kind for plan in read]
    for name, kind in zip(names, kinds, strict=True):
        if kind != kinds[0]:
            raise TunerError(
                f"{name} is a plan to {kind}, {names[0]} one to {kinds[0]}; compare plans of one"
                " goal"
            )
    return compare_stored(read, names=names)


def compare_stored(plans: Sequence[StoredPlan], *, names: Sequence[str]) -> Comparison:
    """Compare plans of one goal that are read already; the first is the reference."""
    sides = [
        NamedPlan(name=name, plan=plan, outcome=goal_of(plan).figures(plan))
        for name, plan in zip(names, plans, strict=True)
    ]
    stated = next((side.outcome for side in sides if side.outcome is not None), None)
    objective = "" if stated is None else stated.objective
    more = stated is not None and stated.more_is_better
    with_objective = [at for at, side in enumerate(sides) if objective in side.values]
    best = min(
        with_objective,
        key=lambda at: (-1.0 if more else 1.0) * sides[at].values[objective],
        default=None,
    )
    leader = None if best is None else sides[best]
    rows = tuple(_row(side, sides[0], leader, objective=objective) for side in sides)
    bands = [
        goal_of(side.plan).ratio_band(leader.plan, side.plan, objective)
        for side in sides
        if leader is not None and side is not leader and objective in side.values
    ]
    return Comparison(
        goal=goal_of(plans[0]).kind,
        objective=objective,
        more_is_better=more,
        plans=rows,
        best=best,
        band_source="; ".join(dict.fromkeys(band.source for band in bands if band is not None)),
        verdict=_verdict(rows, best, objective),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NamedPlan:
    """A plan under its name."""

    name: str
    plan: StoredPlan
    outcome: Figures | None

    @property
    def values(self) -> Mapping[str, float]:
        """Figures of the plan; none without a decision."""
        return {} if self.outcome is None else self.outcome.values


def _row(
    side: NamedPlan, first: NamedPlan, leader: NamedPlan | None, *, objective: str
) -> ComparedPlan:
    goal = goal_of(side.plan)
    before, decision = first.plan.decision, side.plan.decision
    against = None
    if leader is not None and side is not leader:
        against = _ratios(leader, side, only=objective).get(objective)
    return ComparedPlan(
        plan=side.name,
        status=side.plan.certificate.status,
        decision="" if decision is None else goal.words(decision),
        figures=dict(side.values),
        bands={} if side.outcome is None else side.outcome.bands,
        question_changes=tuple(_spec_changes(first.plan, side.plan)),
        decision_changes=(
            () if decision is None or before is None else goal.differences(before, decision)
        ),
        terms_s=(
            {}
            if decision is None or before is None
            else terms(*(goal.seconds(plan) for plan in (first.plan, side.plan)))
        ),
        ratios={} if side is first else _ratios(first, side),
        against_best=against,
        is_tie=against is not None and against.band is not None and is_tie(against.band),
    )


def _spec_changes(first: StoredPlan, plan: StoredPlan) -> Iterator[str]:
    """Say what differs in the specs of two plans."""
    before, after = (
        plan_facts(stored_plan.model_dump(mode="json")).spec for stored_plan in (first, plan)
    )
    yield from (change_words(*difference) for difference in spec_differences(before, after))


def _ratios(first: NamedPlan, second: NamedPlan, *, only: str = "") -> dict[str, FigureRatio]:
    return {
        name: _figure_ratio(
            second.values[name] / value,
            goal_of(first.plan).ratio_band(first.plan, second.plan, name),
        )
        for name, value in first.values.items()
        if name in second.values and value > 0.0 and only in ("", name)
    }


def _figure_ratio(ratio: float, known: PlanRatio | None) -> FigureRatio:
    if known is None:
        return FigureRatio(ratio=ratio)
    return FigureRatio(ratio=ratio, band=(ratio * known.band[0], ratio * known.band[1]))


def _verdict(rows: Sequence[ComparedPlan], best: int | None, objective: str) -> str:
    if best is None:
        return "no plan has a decision"
    ties = [row.plan for row in rows if row.is_tie]
    behind = [row for row in rows if row.against_best is not None and not row.is_tie]
    unsure = [row.plan for row in behind if row.against_best and row.against_best.band is None]
    sure = [row.plan for row in behind if row.against_best and row.against_best.band is not None]
    lacking = [row.plan for row in rows if not row.decision]
    parts = {
        f"best by {FIGURES.get(objective, objective)}": [rows[best].plan],
        "tied with it, within the band of the ratio": ties,
        "worse beyond the band": sure,
        "worse, no band known": unsure,
        "without a decision": lacking,
    }
    return "; ".join(f"{said}: {', '.join(names)}" for said, names in parts.items() if names)
