"""A comparison as CSV: one row for each plan and figure, and one for each term of its step."""

from collections.abc import Iterator

from tuner.compare.comparison import ComparedPlan, Comparison, FigureRatio
from tuner.csv_text import csv_text

HEADER = (
    *("plan", "kind", "name", "value", "low", "high"),
    *("ratio", "ratio_low", "ratio_high", "is_objective", "is_best", "is_tie"),
)


def comparison_csv(compared: Comparison) -> str:
    """Return the text of the file; ratios and differences of terms are to the first plan."""
    return csv_text(HEADER, _rows(compared))


def _rows(compared: Comparison) -> Iterator[tuple[object, ...]]:
    for place, plan in enumerate(compared.plans):
        flags = (place == compared.best, plan.is_tie)
        for name, value in plan.figures.items():
            ratio = plan.ratios.get(name)
            row = (plan.plan, "figure", name, value, *_band(plan, name), *_ratio(ratio))
            yield (*row, name == compared.objective, *flags)
        for name, value in plan.terms_s.items():
            yield (plan.plan, "difference_s", name, value, *[""] * 5, False, *flags)


def _band(plan: ComparedPlan, name: str) -> tuple[object, object]:
    return plan.bands.get(name, ("", ""))


def _ratio(ratio: FigureRatio | None) -> tuple[object, object, object]:
    if ratio is None:
        return "", "", ""
    return ratio.ratio, *(ratio.band or ("", ""))
