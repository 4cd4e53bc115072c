"""The facts of a plan that are compared, for plans of any kind and version.

The facts are taken from the JSON of a plan, not from its type: another version of moetune writes
fields that this one may lack.

    train   step time, highest peak memory of a rank; terms: seconds by cause
    serve   goodput per device, TTFT, TPOT, highest memory of a device, cost; seconds by operation
    place   imbalance and time of the expert layers, by workload

Every planner minimises its objective. The spec is what the plan was made for: model, cluster, goal,
limits and targets, without paths, which differ between checkouts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

Json = Mapping[str, Any]

SPEC_FIELDS: Final = ("model", "cluster", "goal", "search", "emit")
PATHS: Final = frozenset({"path", "profile", "link_matrix", "current", "trace", "name"})
"""Fields of a spec that hold paths, or names derived from them."""
ENGINE: Final = "engine"
"""The field whose `name` is not a label but the engine to launch."""

SOLVED: Final = ("optimal", "feasible")

Unit = Literal["s", "bytes", "per_s", "money", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A predicted number."""

    name: str
    value: float
    unit: Unit
    band: tuple[float, float] | None = None
    is_better_high: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """An alternative to the chosen decision."""

    decision: Json
    price: float | None
    """Its first figure; None where another kind of number was stored."""
    is_tie: bool
    """It ties with the chosen one: within the error band."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """The facts of one plan."""

    kind: str
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
    """Of a placement: the release, nodes and ranks that it was made for, by engine."""
    figures: tuple[Figure, ...]
    terms_s: Mapping[str, float]
    """Seconds by cause."""
    runners_up: tuple[RunnerUp, ...]
    spec: Json
    version: str
    inputs: Mapping[str, str]
    """Hashes of profiles and recordings by name."""

    @property
    def has_decision(self) -> bool:
        """Whether there is a decision."""
        return self.status in SOLVED


def plan_facts(plan: Json) -> PlanFacts:
    """Extract the facts from a plan's JSON.

    Raises:
        KeyError: a field is missing that every version has written.
    """
    certificate, predicted = plan["certificate"], plan["predicted"] or {}
    kind = str(plan["goal"]["kind"])
    provenance = plan["provenance"]
    verdict = plan.get("verdict") or {}
    return PlanFacts(
        kind=kind,
        status=str(certificate["status"]),
        decision=plan["decision"],
        objective=_least(plan, certificate["objective"]),
        bound=_least(plan, certificate["bound"]),
        gap_ratio=float(certificate["gap_ratio"]),
        binding=str(plan["binding_constraint"]),
        verdict_word=str(verdict.get("word", "")),
        made_for={str(one["engine"]): one for one in plan.get("made_for", ())},
        figures=tuple(_figures(kind, predicted)),
        terms_s={name: float(value) for name, value in predicted.get("breakdown_s", {}).items()},
        runners_up=tuple(
            _runner_up(kind, one)
            for name in ("alternatives", "variants")
            for one in plan.get(name, ())
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
        own = PATHS if at.rpartition(".")[2] != ENGINE else frozenset()
        for name in sorted((accepted.keys() & current.keys()) - own):
            yield from spec_differences(
                accepted[name], current[name], at=f"{at}.{name}" if at else name
            )
    elif isinstance(accepted, list | tuple) and isinstance(current, list | tuple):
        if len(accepted) != len(current):
            yield at, f"{len(accepted)} entries", f"{len(current)} entries"
            return
        for number, (one, other) in enumerate(zip(accepted, current, strict=True)):
            yield from spec_differences(one, other, at=f"{at}[{number}]")
    elif accepted != current:
        yield at, accepted, current


def _runner_up(kind: str, alternative: Json) -> RunnerUp:
    first = next(_figures(kind, alternative.get("predicted") or {}), None)
    return RunnerUp(
        decision=alternative["decision"],
        price=None if first is None else first.value,
        is_tie=bool(alternative.get("within_band")),
    )


def _asks_rate(plan: Json) -> bool:
    """Whether the goal is the highest rate, which the plan stores as its traffic's rate."""
    return bool(plan["goal"].get("objective") == "rate")


def _least(plan: Json, value: float | None) -> float | None:
    return 1.0 / value if value and _asks_rate(plan) else value


def _planned_spec(plan: Json) -> Json:
    spec = {name: plan[name] for name in SPEC_FIELDS if name in plan}
    if _asks_rate(plan):
        goal = spec["goal"]
        spec["goal"] = goal | {"traffic": goal["traffic"] | {"rate": None}}
    return spec


def _figures(kind: str, predicted: Json) -> Iterator[Figure]:
    if not predicted:
        return
    if kind == "train":
        yield from _train_figures(predicted)
    elif kind == "serve":
        yield from _serve_figures(predicted)
    else:
        yield from _place_figures(predicted)


def _train_figures(predicted: Json) -> Iterator[Figure]:
    yield _banded(predicted, "step_time_s", unit="s")
    memory = [float(size) for size in predicted["peak_memory_bytes"]]
    bands = predicted.get("peak_memory_bytes_band") or [None] * len(memory)
    peak_rank = max(range(len(memory)), key=memory.__getitem__)
    yield Figure(
        name="peak_memory_bytes",
        value=memory[peak_rank],
        unit="bytes",
        band=_band(bands[peak_rank]),
    )


def _serve_figures(predicted: Json) -> Iterator[Figure]:
    yield Figure(
        name="goodput_per_device",
        value=float(predicted["goodput_per_device"]),
        unit="per_s",
        is_better_high=True,
    )
    for name in ("ttft_s", "tpot_s"):
        mean = float(predicted[name]["mean"])
        yield Figure(name=name, value=mean, unit="s", band=_band(predicted.get(f"{name}_band")))
    memory = predicted.get("memory_bytes") or {}
    if memory:
        yield Figure(name="memory_bytes", value=float(max(memory.values())), unit="bytes")
    if predicted.get("cost_per_hour") is not None:
        yield Figure(name="cost_per_hour", value=float(predicted["cost_per_hour"]), unit="money")


def _place_figures(predicted: Json) -> Iterator[Figure]:
    bands = predicted.get("imbalance_band") or {}
    for workload, value in predicted["imbalance"].items():
        yield Figure(
            name=f"imbalance {workload}",
            value=float(value),
            unit="ratio",
            band=_band(bands.get(workload)),
        )
    for times in predicted.get("layer_times") or ():
        yield Figure(
            name=f"expert layers {times['workload']}",
            value=float(times["after_s"]),
            unit="s",
            band=_band(times.get("after_s_band")),
        )


def _banded(predicted: Json, name: str, *, unit: Unit) -> Figure:
    band = _band(predicted.get(f"{name}_band"))
    return Figure(name=name, value=float(predicted[name]), unit=unit, band=band)


def _band(values: Any) -> tuple[float, float] | None:
    return (float(values[0]), float(values[1])) if values is not None else None
