"""Changes of a plan in words: one clause each, numbers with unit and change in percent."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tuner.goals.stored_figures import Json, StoredFigure
from tuner.regress.observed import PlanFacts, spec_differences
from tuner.units import format_bytes, format_ratio, format_s

MOST_FIELDS: Final = 3
LONGEST_VALUE: Final = 40


def figure_words(accepted: StoredFigure, current: StoredFigure) -> str:
    """Say how a predicted number changed, and whether it left the accepted band."""
    name = current.name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
    words = f"{name} {shown(accepted)} -> {shown(current)}{percent(accepted.value, current.value)}"
    if accepted.band is not None and not accepted.band[0] <= current.value <= accepted.band[1]:
        low, high = (StoredFigure(name="", value=edge, unit=current.unit) for edge in accepted.band)
        words += f", outside its band of {shown(low)} to {shown(high)}"
    return words


def shown(figure: StoredFigure) -> str:
    """Return a number with its unit."""
    if figure.unit == "s":
        return format_s(figure.value)
    if figure.unit == "bytes":
        return format_bytes(figure.value)
    if figure.unit == "per_s":
        return f"{figure.value:.4g}/s"
    return f"{figure.value:.5g}"


def percent(accepted: float, current: float) -> str:
    """Return the change as ` (+1.2 %)`; nothing where there is nothing to relate it to."""
    return f" ({100.0 * (current / accepted - 1.0):+.2f} %)" if accepted else ""


def gap_words(accepted: PlanFacts, current: PlanFacts) -> str:
    """Say how the proof changed."""
    status = accepted.status
    if current.status != accepted.status:
        status = f"{accepted.status} -> {current.status}"
    return (
        f"certificate {status}, gap {format_ratio(accepted.gap_ratio, digits=2)} ->"
        f" {format_ratio(current.gap_ratio, digits=2)}"
    )


def spec_difference_words(differences: Sequence[tuple[str, Any, Any]]) -> str:
    """Say that the spec differs."""
    more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
    return (
        "the spec differs from that of the accepted plan:"
        f" {change_words(*differences[0])}{more}; accept the new plan with --update"
    )


def change_words(at: str, before: Any, after: Any) -> str:
    """Say how one field differs, e.g. `goal.traffic.rate 20.0 -> 40.0`."""
    return f"{at} {_short(before)} -> {_short(after)}"


def decision_words(accepted: Json, current: Json) -> tuple[str, str, str]:
    """Say which choices changed, and return them before and after."""
    if "physical_to_logical" in accepted and "physical_to_logical" in current:
        slots = [
            (old, new)
            for row, now in zip(
                accepted["physical_to_logical"], current["physical_to_logical"], strict=False
            )
            for old, new in zip(row, now, strict=False)
        ]
        changed = sum(old != new for old, new in slots)
        if changed:
            return f"{changed} of {len(slots)} slots hold another expert", "", f"{changed} slots"
    differences = list(spec_differences(accepted, current))
    listed = [change_words(*difference) for difference in differences]
    more = f" and {len(listed) - MOST_FIELDS} more" if len(listed) > MOST_FIELDS else ""
    before = ", ".join(f"{at}={_short(value)}" for at, value, _ in differences)
    after = ", ".join(f"{at}={_short(value)}" for at, _, value in differences)
    return ", ".join(listed[:MOST_FIELDS]) + more, before, after


def moved_words(accepted: Mapping[str, float], current: Mapping[str, float]) -> str:
    """Name the term of the breakdown that moved most; empty where none did."""
    shared = accepted.keys() & current.keys()
    if not shared:
        return ""
    name = max(sorted(shared), key=lambda term: abs(current[term] - accepted[term]))
    if current[name] == accepted[name]:
        return ""
    change = percent(accepted[name], current[name])
    return f"most of it in {name} {format_s(accepted[name])} -> {format_s(current[name])}{change}"


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
