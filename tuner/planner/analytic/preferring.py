"""Which of the decisions that the model cannot tell apart an engineer would rather launch.

The search proves how fast a step can be; beside its fastest decision stand others that take a
percent longer and are easier to run. Every way of every row whose step is within `TOLERANCE_RATIO`
of the fastest is put in one total order, the first criterion that differs decides:

    memory        none of the peak's error band above what a device may use, or up to a quarter of
                  it, or more: a run that dies of memory costs more than any percent
    kinds         of parallelism in use, of tensor, context, pipeline, virtual and expert tensor:
                  each brings a communicator, a launch flag and a way to fail
    context       one rank a sequence needs no balanced cut of it and no other attention kernel
    expert tensor whole experts keep their products large
    stages        pipeline times virtual: fewer sends, and a layout that survives another depth
    pipeline      fewer ranks, less bubble when the batch shrinks
    copies        of the training state, then its ZeRO stage: what is gathered late fails late
    expert        fewer ranks exchange, so fewer nodes feel an uneven routing
    tensor        larger products
    offload       of optimizer state and activations, which ties a step to the host
    chunks        of MemFine
    recompute     as little as possible: modules, then layers
    time          of a step

Not applied beyond the tolerance, and not to what the proof is about: objective, bound and gap stay
those of the fastest, and the chosen decision's own gap is told beside them.

Letters: C candidates, K criteria.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.answer import Detail, detail_of
from tuner.planner.analytic.axes import Recomputed
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.counting import by_facts
from tuner.planner.analytic.fitting import fits_somehow
from tuner.planner.analytic.found import Found, Search
from tuner.planner.analytic.leaning import price_to_fit
from tuner.planner.analytic.memory_band import above_ratio
from tuner.planner.analytic.pricing import least_s
from tuner.planner.analytic.rules import Ints
from tuner.planner.analytic.ways import Ways
from tuner.planner.analytic.waytable import way_table
from tuner.units import format_ratio

Floats = npt.NDArray[np.float64]

TOLERANCE_RATIO: Final = 0.02
"""Steps this share apart count as equally fast. Of several nodes the best of the model's first
three was up to 4.5 % from the measured best (README, choice), so the model does not see less."""

MOST_ROWS: Final = 48
"""Rows whose ways are put in order, the fastest ones: more seldom lie within the tolerance."""

MOST_PLAYED: Final = 32
"""Decisions whose schedule is played in search of one that stays within the tolerance."""

MEMORY_STEPS: Final = (0.0, 0.25)
"""Shares of the memory band above the limit up to which risks count as alike: none, a small one.
Beyond, whether a run fits is a coin toss, and a few percent less of it are worth nothing."""

KINDS: Final = ("tensor", "context", "pipeline", "virtual_pipeline", "expert_tensor")

CRITERIA: Final[tuple[tuple[str, str], ...]] = (
    ("memory", "less of the memory band above the limit"),
    ("kinds", "fewer kinds of parallelism"),
    ("context", "smaller CP"),
    ("expert_tensor", "smaller ETP"),
    ("stages", "fewer pipeline stages"),
    ("pipeline", "smaller PP"),
    ("copies", "fewer copies of the sharded state"),
    ("zero_stage", "a lower ZeRO stage"),
    ("expert", "smaller EP"),
    ("tensor", "smaller TP"),
    ("offload", "less offloading"),
    ("chunks", "fewer chunks"),
    ("recompute", "less recomputation"),
)
"""Criteria in their order, smaller first, and what a smaller value is called."""

MODULES_TOGETHER: Final = 64
"""Recomputed layers weigh more than any set of modules."""

MOST_REASONS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preferred:
    """A decision in place of the fastest one."""

    row: Found
    """One column."""
    detail: Detail
    played_s: float
    reasons: tuple[str, ...]
    """What is better about it, in words."""


def preferred(
    search: Search,
    fastest: Found,
    *,
    limit_s: float,
    play: Callable[[Detail], float],
    is_near: Callable[[Detail, float], bool],
) -> Preferred | None:
    """Return the decision that comes first in the order; None where the fastest does.

    Args:
        search: with the rows near the fastest found.
        fastest: one column.
        limit_s: closed form of a step that may still be within the tolerance.
        play: seconds of a step whose schedule is played.
        is_near: whether a priced decision and its step are within the tolerance.
    """
    tied = _near_ways(search, limit_s=limit_s)
    if tied is None:
        return None
    own_K, keys_CK = criteria(search, fastest)[0], criteria(search, tied)
    near = replace(search, found=tied)
    for index in np.lexsort((tied.step_s, *keys_CK.T[::-1]))[:MOST_PLAYED]:
        if tuple(keys_CK[index]) >= tuple(own_K):
            return None
        detail, row = detail_of(near, int(index)), tied.taken(np.array([index]))
        played_s = play(detail)
        if is_near(detail, max(float(tied.step_s[index]), played_s)):
            reasons = tuple(_reasons(search, fastest, row))
            return Preferred(row=row, detail=detail, played_s=played_s, reasons=reasons)
    return None


def criteria(search: Search, found: Found) -> Ints:
    """Every criterion of every candidate but time, [C, K]; smaller is better."""
    rows, ways = found.candidates.rows, found.candidates.ways
    is_copied = np.array([one == "domain" for one in search.ways.choices["sharding"]])
    columns = {
        "memory": np.searchsorted(MEMORY_STEPS, _above_ratio(search, found)),
        "kinds": sum((rows[name] > 1).astype(np.int64) for name in KINDS),
        "stages": rows["pipeline"] * rows["virtual_pipeline"],
        "copies": np.where(is_copied[ways["sharding"]], rows["copies"], 1),
        "zero_stage": _choices(search.ways, ways, "zero_stage"),
        "offload": _choices(search.ways, ways, "optimizer_offload")
        + _choices(search.ways, ways, "activation_offload"),
        "chunks": _choices(search.ways, ways, "chunks"),
        "recompute": _recomputed(search.ways)[ways["recompute"]],
    }
    return np.stack([columns[n] if n in columns else rows[n] for n, _ in CRITERIA], axis=1)


def _near_ways(search: Search, *, limit_s: float) -> Found | None:
    """Price the legal ways of the rows near the fastest; keep those that fit and are near too."""
    if search.found is None:
        return None
    near = np.flatnonzero(search.found.step_s <= limit_s)[:MOST_ROWS]
    found: Found | None = None
    for candidates in _unfolded(search, search.found.candidates.taken(near)):
        bound_s = least_s(search.question, search.ways, candidates)
        kept = np.flatnonzero(bound_s <= limit_s)
        kept = kept[fits_somehow(search.question, search.ways, candidates.taken(kept))]
        if not len(kept):
            continue
        some = candidates.taken(kept)
        prices, _ = price_to_fit(search.question, search.ways, some)
        fits = prices.peak_bytes <= search.question.memory_limit_bytes
        good = np.flatnonzero(fits & (prices.step_s <= limit_s))
        if not len(good):
            continue
        priced = Found(
            candidates=some.taken(good),
            step_s=prices.step_s[good],
            peak_bytes=prices.peak_bytes[good],
            layers_PC=prices.layers_PC[:, good],
        )
        one = _fastest_of_each(search, priced)
        found = one if found is None else found.beside(one)
    return found


def _fastest_of_each(search: Search, found: Found) -> Found:
    """The fastest of those that no criterion tells apart."""
    by_time = np.argsort(found.step_s, kind="stable")
    _, first = np.unique(criteria(search, found)[by_time], axis=0, return_index=True)
    return found.taken(by_time[np.sort(first)])


def _unfolded(search: Search, rows: Candidates) -> Iterator[Candidates]:
    """Rows with every way that no other beats by mere order, a kind of degrees at a time."""
    for facts, chosen in by_facts(rows.rows):
        table = way_table(search.ways, facts)
        for row in chosen:
            count = len(table.ways_TA)
            yield Candidates(
                rows={name: np.repeat(column[row], count) for name, column in rows.rows.items()},
                ways=table.columns(table.ways_TA),
            )


def _above_ratio(search: Search, found: Found) -> Floats:
    """Shares of the peaks' error bands above what a device may use, [C]."""
    return above_ratio(
        found.peak_bytes,
        software=search.question.software,
        pipeline_C=found.candidates.rows["pipeline"],
        limit_bytes=search.question.memory_limit_bytes,
    )


def _choices(ways: Ways, chosen: Mapping[str, Ints], axis: str) -> Ints:
    values: Ints = np.array(ways.choices[axis], dtype=np.int64)[chosen[axis]]
    return values


def _recomputed(ways: Ways) -> Ints:
    """How much each choice computes again: modules, or more than all of them, by layers."""
    again: list[Recomputed] = list(ways.choices["recompute"])  # type: ignore[arg-type] # this axis only
    return np.array([len(one.modules) + round(MODULES_TOGETHER * one.share) for one in again])


def _reasons(search: Search, fastest: Found, chosen: Found) -> Iterator[str]:
    """Name the first criteria in which the chosen decision is better."""
    own_K, chosen_K = criteria(search, fastest)[0], criteria(search, chosen)[0]
    for at in np.flatnonzero(chosen_K < own_K)[:MOST_REASONS]:
        name, words = CRITERIA[at]
        values = [str(chosen_K[at]), str(own_K[at])]
        if name == "memory":
            values = [
                format_ratio(float(_above_ratio(search, one)[0])) for one in (chosen, fastest)
            ]
        yield words if name == "recompute" else f"{words} ({values[0]} instead of {values[1]})"
