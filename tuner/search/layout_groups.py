"""Runner-ups grouped by layout: one for each, the others as its variants.

A layout is how the devices are divided: TP, CP, PP, DP, EP and ETP. Decisions that differ in
anything else (micro-batch, interleaving, ZeRO, dispatcher, recomputation, overlap ...) are variants
of it. They are often within a percent of each other, and would hide the layouts that really differ.
A verification still launches them, since measuring can tell them apart.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from tuner.config.train import TrainDecision
from tuner.plans.train import Alternative, Plan
from tuner.units import format_counted, format_ratio

Layout = tuple[int, ...]

MOST_VARIANTS: Final = 3
"""Rows of a search per requested layout, on average: variants of a few layouts may fill thousands
of rows before the next layout comes."""


def layout_of(decision: TrainDecision) -> Layout:
    """Return the layout of a decision; expert data parallelism follows from it."""
    return (
        decision.tensor_model_parallel_size,
        decision.context_parallel_size,
        decision.pipeline_model_parallel_size,
        decision.data_parallel_size,
        decision.expert_model_parallel_size,
        decision.expert_tensor_parallel_size,
    )


def rows_of_layouts(layouts: Iterable[Layout], *, top: int) -> int | None:
    """Return how many rows, best first, hold so many layouts; None where there are too few rows.

    Never more than `MOST_VARIANTS` times as many rows as layouts.
    """
    known: set[Layout] = set()
    for count, layout in enumerate(layouts, start=1):
        known.add(layout)
        if len(known) == top or count == MOST_VARIANTS * top:
            return count
    return None


def num_runners_up(layouts: Sequence[Layout], *, top: int) -> int:
    """Return how many rows after the first show `top` layouts with it, or as many as there are."""
    return (rows_of_layouts(layouts, top=top) or len(layouts)) - 1


def by_layout(
    decision: TrainDecision, runners_up: Sequence[Alternative]
) -> dict[str, tuple[Alternative, ...]]:
    """Return a plan's `alternatives`, one for each other layout, and `variants`, all the rest.

    Args:
        decision: of the plan, whose own layout is no alternative.
        runners_up: in any order; the fastest of its layout stands for it, the first of equals.
    """
    fastest_first = sorted(runners_up, key=lambda runner_up: runner_up.predicted.step_time_s)
    groups: dict[Layout, list[Alternative]] = {layout_of(decision): []}
    for alternative in fastest_first:
        groups.setdefault(layout_of(alternative.decision), []).append(alternative)
    _own, *others = groups.values()
    firsts = {id(group[0]) for group in others}
    return {
        "alternatives": tuple(
            group[0].model_copy(update={"num_variants": len(group) - 1}) for group in others
        ),
        "variants": tuple(
            runner_up.model_copy(update={"num_variants": 0})
            for runner_up in fastest_first
            if id(runner_up) not in firsts
        ),
    }


def variants_of(layout: Layout, variants: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Return those of one layout."""
    return tuple(variant for variant in variants if layout_of(variant.decision) == layout)


def variants_words(plan: Plan, alternative: Alternative) -> str:
    """Say how many variants an alternative has, and how far their steps differ from its own."""
    variants = variants_of(layout_of(alternative.decision), plan.variants)
    if not variants:
        return ""
    step_s = alternative.predicted.step_time_s
    spread = max(abs(variant.predicted.step_time_s / step_s - 1.0) for variant in variants)
    counted = format_counted(len(variants), "variant")
    return f"{counted} of this layout within {format_ratio(spread)} of its step"
