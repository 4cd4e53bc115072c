"""Why a plan was chosen, as text: runners-up term by term, and what-ifs."""

from collections.abc import Iterator
from typing import Final

from tuner.cli.figures import FIGURES, figure_text
from tuner.cli.text import asides, columns, format_times
from tuner.explain.other_limits import IDLE
from tuner.plans.breakdown import cause_words
from tuner.plans.what_if import Rival, WhatIf, WhatIfOutcome, Why
from tuner.units import format_ratio, format_s

SHOWN_TERMS: Final = 3
SHOWN_CHANGES: Final = 4
NO_GAIN_RATIO: Final = 0.0005
"""Of the objective; less is printed as no change."""

_FIGURES: Final = {
    "step_time_s": ("", " a step"),
    "tokens_per_s": ("", " tokens/s"),
    "fastest_step_time_s": ("fastest found ", ""),
    "peak_memory_bytes": ("peak memory ", ""),
    "num_devices": ("", " devices"),
    "cost_per_hour": ("cost ", " per hour"),
    "requests_per_s": ("", " requests/s"),
    "ttft_p90_s": ("TTFT P90 ", ""),
    "tpot_p90_s": ("TPOT P90 ", ""),
    "goodput_per_device": ("goodput ", " requests/s per device"),
    "busiest_rank_ratio": ("most-loaded ranks carry ", " of a layer's token copies"),
    "objective": ("objective ", ""),
}
"""Printed figures, in this order: words before and after the number."""

_MORE_IS_BETTER: Final = frozenset({"tokens_per_s", "requests_per_s", "goodput_per_device"})


def why_lines(why: Why, *, verbose: bool = False) -> Iterator[str]:
    """Describe what would change the plan; with `verbose`, why the runners-up lost."""
    if verbose and any(rival.terms_s for rival in why.rivals):
        yield ""
        yield "runners-up, by the seconds in which they differ from the plan"
        yield from (_rival(rival) for rival in why.rivals if rival.terms_s)
    if why.what_if is not None:
        yield ""
        yield from _what_if(why.what_if)
    yield from asides("notes", why.notes, verbose=verbose)


def _rival(rival: Rival) -> str:
    terms = list(rival.terms_s.items())
    shown = ", ".join(
        f"{cause_words(name)} {signed_s(seconds)}" for name, seconds in terms[:SHOWN_TERMS]
    )
    left = len(terms) - SHOWN_TERMS
    more = f" and {left} smaller" if left > 0 else ""
    tie = " (tie)" if rival.within_band else ""
    if rival.ratio_band is not None:
        tie = f" ({format_times(rival.ratio_band)}{', a tie' if rival.within_band else ''})"
    total = "" if rival.slower_s is None else f": {signed_s(rival.slower_s)}"
    lost = f"; {rival.lost_by}" if "num_devices" in rival.figures else ""
    return f"  {rival.decision}{tie}{total} = {shown}{more}{lost}"


def signed_s(seconds: float) -> str:
    """Write a difference of times with its sign."""
    return f"{'-' if seconds < 0 else '+'}{format_s(abs(seconds))}"


def _what_if(what_if: WhatIf) -> Iterator[str]:
    solved = [one for one in what_if.outcomes if one.status != "out_of_time"]
    total_s = sum(one.solve_s for one in what_if.outcomes)
    yield (
        f"what-if: {len(solved)} case{'s' * (len(solved) != 1)} solved again in "
        f"{format_s(total_s)} (--time-limit {format_s(what_if.time_limit_s)} for their searches)"
    )
    rows = [_row(what_if.base, "as planned")]
    rows += [_row(one, one.change) for one in what_if.outcomes]
    yield columns(rows)
    yield from (line for one in what_if.outcomes for line in _details(one))


def _row(one: WhatIfOutcome, name: str) -> tuple[str, str, str]:
    return f"  {name}", _verdict(one), _figures(one)


def _verdict(one: WhatIfOutcome) -> str:
    if one.status in ("refused", "out_of_time", "infeasible", "unknown"):
        return {
            "refused": "not possible",
            "out_of_time": "not solved",
            "infeasible": "nothing fits",
            "unknown": "not decided",
        }[one.status]
    if not one.change:
        return one.status
    if one.gain_ratio is None:
        return "fits"
    if abs(one.gain_ratio) < NO_GAIN_RATIO:
        return "no change"
    grows = one.gain_ratio > 0 if one.objective in _MORE_IS_BETTER else one.gain_ratio < 0
    name = FIGURES.get(one.objective, one.objective)
    return f"{'+' if grows else '-'}{format_ratio(abs(one.gain_ratio))} {name}"


def _figures(one: WhatIfOutcome) -> str:
    return ", ".join(
        f"{before}{figure_text(name, one.figures[name])}{after}"
        for name, (before, after) in _FIGURES.items()
        if name in one.figures and not _is_repeated(name, one)
    )


def _is_repeated(name: str, one: WhatIfOutcome) -> bool:
    """Whether no faster decision than the plan's own was found, as far as is printed."""
    if name != "fastest_step_time_s":
        return False
    fastest_s, step_s = one.figures[name], one.figures["step_time_s"]
    return fastest_s >= step_s or format_s(fastest_s) == format_s(step_s)


def _details(one: WhatIfOutcome) -> Iterator[str]:
    """What changes in the decision, or why nothing fits; nothing where the decision is the same."""
    if one.figures and one.gain_ratio is None:
        yield f"  {one.change}: {one.says}: {one.decision}"
        return
    if one.figures and not one.decision_changes:
        return
    if one.figures:
        changes = list(one.decision_changes[:SHOWN_CHANGES])
        left = len(one.decision_changes) - SHOWN_CHANGES
        changes += [f"{left} more"] if left > 0 else []
        yield f"  {one.change}: {one.says}: {'; '.join(changes)}"
        if IDLE in one.reason:
            yield f"  {one.change}: {IDLE}"
        return
    message = f"{one.says}: " if one.says else ""
    yield f"  {one.change}: {message}{one.reason}"
