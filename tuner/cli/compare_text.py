"""A comparison of plans: the differences of each to the first, a table of figures, the verdict."""

from collections.abc import Iterator

from tuner.cli.text import whole_text
from tuner.explain.comparison import ComparedPlan, Comparison
from tuner.report.content import Paragraph, Section, Table, named, word
from tuner.report.what_if import FIGURES, figure_text, terms_words
from tuner.units import format_times


def comparison_text(comparison: Comparison) -> str:
    """Format the comparison as `moetune compare` prints it."""
    first, *others = comparison.plans
    differences = tuple(
        Section(
            name=plan.plan,
            heading=f"{plan.plan}: {plan.decision or plan.status}",
            blocks=(named(*_differences(plan)),),
        )
        for plan in others
    )
    figures = Table(
        caption=f"Figures; the reference is {first.plan}: {first.decision or first.status}",
        header=("", *(plan.plan for plan in comparison.plans)),
        rows=tuple(
            (
                word(FIGURES.get(name, name) + " (objective)" * (name == comparison.objective)),
                *(word(_figure(plan, name)) for plan in comparison.plans),
            )
            for name in dict.fromkeys(name for plan in comparison.plans for name in plan.figures)
        ),
    )
    source = comparison.band_source and f"; band of the ratios: {comparison.band_source}"
    verdict = Paragraph(text=f"{comparison.verdict}{source}")
    return whole_text(*differences, figures, verdict)


def _differences(plan: ComparedPlan) -> Iterator[tuple[str, str]]:
    yield from (("problem", change) for change in plan.question_changes)
    yield from (("decision", change) for change in plan.decision_changes)
    if not plan.question_changes and not plan.decision_changes and plan.decision:
        yield "decision", "the same, of the same problem"
    if plan.terms_s:
        yield "time", f"term by term: {terms_words(plan.terms_s)}"


def _figure(plan: ComparedPlan, name: str) -> str:
    if name not in plan.figures:
        return "-"
    shown, ratio = figure_text(name, plan.figures[name]), plan.ratios.get(name)
    if ratio is None:
        return shown
    band = "" if ratio.band is None else f", band {format_times(ratio.band)}"
    digits = f"{ratio.ratio:.3g}"
    return f"{shown} ({'equal' if digits == '1' else f'{digits} times'}{band})"
