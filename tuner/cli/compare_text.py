"""A comparison of plans in words: the differences of each to the first, a table, the verdict."""

from collections.abc import Iterator
from typing import Final

from tuner.cli.explain_text import signed_s
from tuner.cli.figures import FIGURES, figure_text
from tuner.cli.text import columns, format_times
from tuner.compare.comparison import ComparedPlan, Comparison
from tuner.plans.breakdown import cause_words

SHOWN_TERMS: Final = 6
SHOWN_CHANGES: Final = 12


def comparison_text(comparison: Comparison) -> str:
    """What `moetune compare` prints."""
    first, *others = comparison.plans
    lines = [f"reference {first.plan}: {first.decision or first.status}"]
    for plan in others:
        lines += ["", f"{plan.plan}: {plan.decision or plan.status}", *_differences(plan)]
    lines += [
        "",
        columns(list(_rows(comparison)), header=("", *(one.plan for one in comparison.plans))),
    ]
    lines += ["", comparison.verdict]
    if comparison.band_source:
        lines.append(f"band of the ratios: {comparison.band_source}")
    return "\n".join(lines)


def _differences(plan: ComparedPlan) -> Iterator[str]:
    listed = (("problem", plan.question_changes), ("decision", plan.decision_changes))
    for name, changes in listed:
        yield from (f"  {name}: {change}" for change in changes[:SHOWN_CHANGES])
        left = len(changes) - SHOWN_CHANGES
        if left > 0:
            yield f"  {name}: {left} more"
    if not any(changes for _, changes in listed) and plan.decision:
        yield "  same problem and decision"
    if plan.terms_s:
        terms = list(plan.terms_s.items())
        shown = ", ".join(
            f"{cause_words(name)} {signed_s(seconds)}" for name, seconds in terms[:SHOWN_TERMS]
        )
        more = f" and {len(terms) - SHOWN_TERMS} smaller" if len(terms) > SHOWN_TERMS else ""
        total = signed_s(sum(plan.terms_s.values()))
        yield f"  time, term by term: {total} = {shown}{more}"


def _rows(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    names = dict.fromkeys(name for plan in comparison.plans for name in plan.figures)
    for name in names:
        mark = " (objective)" if name == comparison.objective else ""
        yield f"{FIGURES.get(name, name)}{mark}", *(_cell(plan, name) for plan in comparison.plans)


def _cell(plan: ComparedPlan, name: str) -> str:
    if name not in plan.figures:
        return "-"
    shown = figure_text(name, plan.figures[name])
    ratio = plan.ratios.get(name)
    if ratio is None:
        return shown
    if ratio.band is None:
        return f"{shown} ({ratio.ratio:.3g} times)"
    return f"{shown} ({ratio.ratio:.3g} times: {format_times(ratio.band)})"
