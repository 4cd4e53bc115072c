"""The facts of a plan that are compared, for plans of any kind and version.

The facts are taken from the JSON of a plan, not from its type: another version of moetune writes
fields that this one may lack. The figures are those of the goal (tuner/goals/stored_figures.py).

    train   step time, highest peak memory of a rank; terms: seconds by cause
    serve   goodput per device, TTFT, TPOT, highest memory of a device, cost; seconds by operation
    place   imbalance and time of the expert layers, by workload

Every planner minimises its objective. The spec is what the plan was made for: model, cluster, goal,
limits and targets, without paths, which differ between checkouts.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tuner.goals.registry import load_goal
from tuner.goals.stored_figures import Json, StoredFigure

SPEC_FIELDS: Final = ("model", "cluster", "goal", "search", "emit")
PATHS: Final = frozenset({"path", "profile", "link_matrix", "current", "trace", "name"})
"""Fields of a spec that hold paths, or names derived from them."""
ENGINE: Final = "engine"
"""The field whose `name` is not a label but the engine to launch."""

SOLVED: Final = ("optimal", "feasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """An alternative to the chosen decision."""

    decision: Json
    price: float | None
    """First figure of the alternative; None where another kind of number was stored."""
    is_tie: bool
    """Whether the alternative ties with the chosen decision, within the error band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """The facts of one plan."""

    kind: str
    has_price: bool
    """The first figure is what the search minimises (`Goal.has_price`)."""
    status: str
    decision: Json | None
    objective: float | None
    """Minimised: seconds per request where the goal is the most requests a second."""
    bound: float | None
    gap_ratio: float
    binding: str
    verdict_word: str
    """Verdict of a placement; empty for other kinds."""
    made_for: Mapping[str, Json]
    """Release, nodes and ranks that a placement was made for, by engine; empty for other kinds."""
    figures: tuple[StoredFigure, ...]
    terms_s: Mapping[str, float]
    """Seconds by cause."""
    runners_up: tuple[RunnerUp, ...]
    spec: Json
    version: str
    inputs: Mapping[str, str]
    """Hashes of profiles and recordings by name."""

    @property
    def has_decision(self) -> bool:
        """Return whether there is a decision."""
        return self.status in SOLVED


def plan_facts(plan: Json) -> PlanFacts:
    """Extract the facts from a plan's JSON.

    Raises:
        KeyError: a field is missing that every version has written, or the goal is none of ours.
    """
    certificate, predicted = plan["certificate"], plan["predicted"] or {}
    goal = load_goal(str(plan["goal"]["kind"]))
    provenance = plan["provenance"]
    verdict = plan.get("verdict") or {}
    return PlanFacts(
        kind=goal.kind,
        has_price=goal.has_price,
        status=str(certificate["status"]),
        decision=plan["decision"],
        objective=_least(plan, certificate["objective"]),
        bound=_least(plan, certificate["bound"]),
        gap_ratio=float(certificate["gap_ratio"]),
        binding=str(plan["binding_constraint"]),
        verdict_word=str(verdict.get("word", "")),
        made_for={str(deployment["engine"]): deployment for deployment in plan.get("made_for", ())},
        figures=tuple(goal.stored_figures(predicted) if predicted else ()),
        terms_s={name: float(value) for name, value in predicted.get("breakdown_s", {}).items()},
        runners_up=tuple(
            _runner_up(goal.stored_figures, runner_up)
            for name in ("alternatives", "variants")
            for runner_up in plan.get(name, ())
        ),
        spec=_planned_spec(plan),
        version=str(provenance.get("moetune_version", "")),
        inputs={
            **provenance.get("profile_sha256", {}),
            **provenance.get("links_sha256", {}),
            **provenance.get("recording_sha256", {}),
        },
    )


def spec_differences(
    accepted: Any, current: Any, *, at: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences of two specs: field, accepted and current value.

    A field that only one version knows is no difference: it has a default in the other.
    """
    if isinstance(accepted, Mapping) and isinstance(current, Mapping):
        ignored = PATHS if at.rpartition(".")[2] != ENGINE else frozenset()
        for name in sorted((accepted.keys() & current.keys()) - ignored):
            yield from spec_differences(
                accepted[name], current[name], at=f"{at}.{name}" if at else name
            )
    elif isinstance(accepted, list | tuple) and isinstance(current, list | tuple):
        if len(accepted) != len(current):
            yield at, f"{len(accepted)} entries", f"{len(current)} entries"
            return
        for number, (old, new) in enumerate(zip(accepted, current, strict=True)):
            yield from spec_differences(old, new, at=f"{at}[{number}]")
    elif accepted != current:
        yield at, accepted, current


def _runner_up(figures_of: Callable[[Json], Iterator[StoredFigure]], alternative: Json) -> RunnerUp:
    predicted = alternative.get("predicted")
    first = next(figures_of(predicted), None) if predicted else None
    return RunnerUp(
        decision=alternative["decision"],
        price=None if first is None else first.value,
        is_tie=bool(alternative.get("within_band")),
    )


def _asks_rate(plan: Json) -> bool:
    """Return whether the goal is the highest rate, which the plan stores as its traffic's rate."""
    return bool(plan["goal"].get("objective") == "rate")


def _least(plan: Json, value: float | None) -> float | None:
    return 1.0 / value if value and _asks_rate(plan) else value


def _planned_spec(plan: Json) -> Json:
    spec = {name: plan[name] for name in SPEC_FIELDS if name in plan}
    if _asks_rate(plan):
        goal = spec["goal"]
        spec["goal"] = goal | {"traffic": goal["traffic"] | {"rate": None}}
    return spec
