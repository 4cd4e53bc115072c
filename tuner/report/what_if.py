"""A plan under other limits, each solved again, as sections of its report.

what_if_section  the results, as a report and `explain` show them
why_sections     all that `explain` adds to a plan
figure_text      a figure that plans are compared by, with its unit
"""

from collections.abc import Mapping
from typing import Final

from tuner.plans.breakdown import cause_words
from tuner.plans.what_if import IDLE, WhatIf, WhatIfOutcome, Why
from tuner.report.content import Cell, Paragraph, Section, Table, bullets, word
from tuner.units import format_bytes, format_counted, format_number, format_ratio, format_s

FIGURES: Final = {
    "step_time_s": "step time",
    "tokens_per_s": "tokens/s",
    "fastest_step_time_s": "fastest step found",
    "tokens_per_s_per_device": "tokens/s per device",
    "peak_memory_bytes": "peak memory",
    "mfu_ratio": "MFU",
    "run_s": "whole run",
    "run_cost": "cost of the run",
    "num_devices": "devices",
    "requests_per_s": "requests/s",
    "goodput_per_device": "goodput per device",
    "ttft_mean_s": "TTFT mean",
    "ttft_p90_s": "TTFT P90",
    "tpot_mean_s": "TPOT mean",
    "tpot_p90_s": "TPOT P90",
    "cost_per_hour": "cost per hour",
    "cost_per_million_input_tokens": "cost per million input tokens",
    "cost_per_million_output_tokens": "cost per million output tokens",
    "objective": "objective",
    "busiest_rank_ratio": "load of the most-loaded ranks",
}
"""Names of the figures that plans are compared by (tuner/goals/goal.py)."""

MOST_TERMS: Final = 6
"""Causes by which two steps differ that are named."""
NO_GAIN_RATIO: Final = 0.0005
"""Share of the objective below which a difference is no change."""
MORE_IS_BETTER: Final = frozenset({"tokens_per_s", "requests_per_s", "goodput_per_device"})
UNSOLVED: Final[Mapping[str, str]] = {
    "refused": "not possible",
    "out_of_time": "not solved",
    "infeasible": "nothing fits",
    "unknown": "not decided",
}
SHOWN_FIGURES: Final = (
    *("step_time_s", "tokens_per_s", "peak_memory_bytes", "num_devices", "cost_per_hour"),
    *("requests_per_s", "ttft_p90_s", "tpot_p90_s", "goodput_per_device", "busiest_rank_ratio"),
    "objective",
)


def figure_text(name: str, value: float) -> str:
    """Write a figure by the unit in its name."""
    if name.endswith("_s") and not name.endswith("_per_s"):
        return format_s(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("_ratio"):
        return format_ratio(value)
    return format_number(value)


def why_sections(why: Why) -> tuple[Section, ...]:
    """Return what would change a plan, and the terms in which its runners-up differ."""
    terms = (
        f"{rival.decision}: {terms_words(rival.terms_s)}" for rival in why.rivals if rival.terms_s
    )
    listed = {
        "Runners-up, by the seconds in which they differ": bullets(terms, counted_as="runners-up"),
        "Notes on what-ifs": bullets(why.notes, counted_as="notes"),
    }
    return (
        *(() if why.what_if is None else (what_if_section(why.what_if),)),
        *(
            Section(name=heading.split()[0].lower(), heading=heading, blocks=(notes,))
            for heading, notes in listed.items()
            if notes is not None
        ),
    )


def what_if_section(result: WhatIf) -> Section:
    """Return the outcome of every change, and first that of none, solved in the same way."""
    solved = sum(outcome.status != "out_of_time" for outcome in result.outcomes)
    total_s = sum(outcome.solve_s for outcome in result.outcomes)
    cases = (
        f"what-if: {format_counted(solved, 'case')} solved again in {format_s(total_s)} "
        f"(--time-limit {format_s(result.time_limit_s)} for their searches)"
    )
    blocks = (Paragraph(text=cases), _table(result))
    return Section(name="what-if", heading="What if", blocks=blocks)


def terms_words(terms_s: Mapping[str, float]) -> str:
    """Say by which seconds a step differs: in all, and the largest causes."""
    terms = list(terms_s.items())
    shown = ", ".join(
        f"{cause_words(name)} {_signed_s(spent)}" for name, spent in terms[:MOST_TERMS]
    )
    more = f" and {len(terms) - MOST_TERMS} smaller" if len(terms) > MOST_TERMS else ""
    return f"{_signed_s(sum(terms_s.values()))} = {shown}{more}"


def _signed_s(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_s(abs(seconds))}"


def _table(result: WhatIf) -> Table:
    return Table(
        caption="All results",
        header=("limit", "result", "figures", "what changes"),
        rows=tuple(
            (
                word(outcome.says or outcome.change or "as planned"),
                _gain(outcome),
                word(
                    ", ".join(
                        f"{FIGURES[name]} {figure_text(name, outcome.figures[name])}"
                        for name in SHOWN_FIGURES
                        if name in outcome.figures
                    )
                ),
                word(_what_changes(outcome)),
            )
            for outcome in (result.base, *result.outcomes)
        ),
    )


def _gain(outcome: WhatIfOutcome) -> Cell:
    gain = outcome.gain_ratio
    if outcome.status in UNSOLVED or not outcome.change:
        return word(UNSOLVED.get(outcome.status, outcome.status))
    if gain is None:
        return word("fits")
    if abs(gain) < NO_GAIN_RATIO:
        return word("no change")
    grows = gain > 0 if outcome.objective in MORE_IS_BETTER else gain < 0
    name = FIGURES.get(outcome.objective, outcome.objective)
    text = f"{'+' if grows else '-'}{format_ratio(abs(gain))} {name}"
    return Cell(text=text, value=gain)


def _what_changes(outcome: WhatIfOutcome) -> str:
    """Say how the decision differs, or why nothing fits."""
    if not outcome.figures:
        return outcome.reason
    if outcome.change and outcome.gain_ratio is None:
        return outcome.decision
    return "; ".join((*outcome.decision_changes, *([IDLE] if IDLE in outcome.reason else [])))
