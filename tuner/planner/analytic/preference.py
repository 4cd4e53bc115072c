"""Which of the decisions that the model cannot tell apart an engineer would rather launch.

The search proves how fast a step can be; beside its fastest decision stand others that take a
percent longer and are easier to run. Running out of memory is priced first: what it is expected to
cost is added to every step (memory_risk.py), above all that the run then goes on with the fallback,
the fastest decision found that hardly runs out. So a decision without room may be dearer than one
that takes longer. One that more likely than not runs out is left out where another is less likely
to; where none is, those with the least chance are left. Every way of every row whose step is then
within `TOLERANCE_RATIO` of the least is put in one total order, the first criterion that differs
decides:

    memory        a smaller probability of running out, in the steps of MEMORY_STEPS
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
those of the fastest step, and the chosen decision's own gap is told beside them.

Letters: C candidates, K criteria.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.axes import Recomputed
from tuner.planner.analytic.candidate_prices import least_s
from tuner.planner.analytic.candidates import Candidates, strategies_of
from tuner.planner.analytic.incumbents import Found, Search
from tuner.planner.analytic.memory import bytes_of_devices
from tuner.planner.analytic.memory_feasibility import fits_somehow
from tuner.planner.analytic.memory_risk import LIKELY, SMALL, Chances, LossPrices, chances
from tuner.planner.analytic.min_memory_layout import price_to_fit
from tuner.planner.analytic.option_table import way_table
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.rules import Ints
from tuner.planner.analytic.search_result import Detail, detail_of
from tuner.planner.analytic.space_size import by_facts
from tuner.units import format_ratio

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

TOLERANCE_RATIO: Final = 0.02
"""Steps this share apart count as equally fast. Of several nodes the best of the model's first
three was up to 4.5 % from the measured best (README, choice), so the model does not see less."""

MOST_ROWS: Final = 48
"""Rows whose ways are put in order, the fastest ones: more seldom lie within the tolerance."""

MOST_PLAYED: Final = 32
"""Decisions whose schedule is played in search of one that stays within the tolerance."""

MOST_SLOWER_RATIO: Final = 0.1
"""Of the rows that a search kept, those slower than its fastest by more than this are not looked
at."""

MEMORY_STEPS: Final = (0.01, SMALL, 0.15, 0.3, LIKELY, 0.7, 0.85)
"""Probabilities of running out of memory up to which risks count as alike; published peaks are too
few to tell finer."""

KINDS: Final = ("tensor", "context", "pipeline", "virtual_pipeline", "expert_tensor")

LESS_CHANCE: Final = "less chance of running out of memory"

LESS_EXPECTED: Final = "a shorter step on average with running out of memory"
"""The reason where no criterion alone is better."""

CRITERIA: Final[tuple[tuple[str, str], ...]] = (
    ("memory", LESS_CHANCE),
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
    expected_s: float | None
    """Seconds of its step with what running out of memory is expected to cost; None where nothing
    found hardly runs out, so that the run may never end."""
    fastest_expected_s: float | None
    """The same of the fastest."""

    @property
    def step_s(self) -> float:
        """Seconds of its step, the larger of closed form and play."""
        return max(float(self.row.step_s[0]), self.played_s)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Near:
    """Decisions near the fastest, itself among them as the first."""

    found: Found
    expected_s: Floats
    """Seconds a step, with what running out of memory is expected to cost."""
    is_fit_C: Bools
    """Whether it is as likely to fit as may be asked."""
    most_s: float
    """Of `expected_s` within the tolerance."""
    has_fallback: bool
    """Some decision found hardly runs out."""

    @property
    def eligible_C(self) -> Bools:
        """Within the tolerance, and as likely to fit as may be asked."""
        return self.is_fit_C & (self.expected_s <= self.most_s)


def preferred(
    search: Search,
    fastest: Found,
    *,
    objective_s: float,
    prices: LossPrices,
    play: Callable[[Detail], float],
    is_near: Callable[[Detail, float, float], bool],
    rooms: Sequence[Search] = (),
) -> Preferred | None:
    """Return the decision that comes first in the order; None where the fastest does.

    Args:
        search: with the rows near the fastest found.
        fastest: one column.
        objective_s: seconds of its step, the larger of closed form and play.
        prices: what running out of memory costs.
        play: seconds of a step whose schedule is played.
        is_near: whether a priced decision, whose step takes some seconds with what running out is
            expected to cost, takes at most so many times what the fastest does without.
        rooms: searches for decisions with more room and the ways near them, where any were made.
    """
    near = _near(search, fastest, objective_s=objective_s, prices=prices, rooms=rooms)
    eligible_C = near.eligible_C
    keys_CK = criteria(search, near.found)
    own = tuple(keys_CK[0])
    others = 1 + np.flatnonzero(eligible_C[1:])
    order = np.lexsort((near.found.step_s[others], *keys_CK[others].T[::-1]))
    for index in others[order][:MOST_PLAYED]:
        if eligible_C[0] and tuple(keys_CK[index]) >= own:
            return None
        one = _played(search, near, int(index), play=play)
        if is_near(one.detail, one.expected_s, near.most_s / objective_s):
            return _preferred(search, fastest, near, one)
    if eligible_C[0]:
        return None
    least = _first_as_played(search, near, keys_CK, play=play)
    return None if least is None else _preferred(search, fastest, near, least)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Played:
    """One of those near, whose schedule was played."""

    row: Found
    detail: Detail
    played_s: float
    expected_s: float
    """With what its play takes longer than its closed form."""


def _played(search: Search, near: _Near, index: int, *, play: Callable[[Detail], float]) -> _Played:
    row = near.found.taken(np.array([index]))
    detail = detail_of(replace(search, found=row), 0)
    played_s = play(detail)
    more_s = max(0.0, played_s - float(row.step_s[0]))
    expected_s = float(near.expected_s[index]) + more_s
    return _Played(row=row, detail=detail, played_s=played_s, expected_s=expected_s)


def _first_as_played(
    search: Search, near: _Near, keys_CK: Ints, *, play: Callable[[Detail], float]
) -> _Played | None:
    """The first in the order within the tolerance of the least expected as played.

    For a fastest that may not be chosen, where all that closed forms put near the least play more
    slowly than that: it is the least as played that counts. None where the fastest comes first.
    """
    least_s = float(near.expected_s[0]) if near.is_fit_C[0] else np.inf
    fit = 1 + np.flatnonzero(near.is_fit_C[1:])
    played: dict[int, _Played] = {}
    for index in fit[np.argsort(near.expected_s[fit], kind="stable")][:MOST_PLAYED]:
        if near.expected_s[index] > least_s * (1.0 + TOLERANCE_RATIO):
            break
        played[index] = _played(search, near, int(index), play=play)
        least_s = min(least_s, played[index].expected_s)
    most_s = least_s * (1.0 + TOLERANCE_RATIO)
    kept = [index for index, one in played.items() if one.expected_s <= most_s]
    if not kept:
        return None
    first = min(kept, key=lambda index: (*keys_CK[index], played[index].expected_s))
    may_stay = near.is_fit_C[0] and near.expected_s[0] <= most_s
    if may_stay and tuple(keys_CK[0]) <= tuple(keys_CK[first]):
        return None
    return played[first]


def _preferred(search: Search, fastest: Found, near: _Near, one: _Played) -> Preferred:
    return Preferred(
        row=one.row,
        detail=one.detail,
        played_s=one.played_s,
        reasons=tuple(_reasons(search, fastest, one.row)),
        expected_s=one.expected_s if near.has_fallback else None,
        fastest_expected_s=float(near.expected_s[0]) if near.has_fallback else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastExpected:
    """A decision whose step is expected to be the shortest, running out of memory included."""

    row: Found
    """One column."""
    expected_s: float
    chance: float
    """Of running out."""


def least_expected(
    search: Search, *, prices: LossPrices, rooms: Sequence[Search] = ()
) -> LeastExpected:
    """Find it by closed forms alone, the order of criteria left aside.

    Args:
        search: that found something.
        prices: what running out of memory costs.
        rooms: searches for decisions with more room and the ways near them, where any were made.
    """
    if search.found is None:
        raise ValueError("the search found nothing that fits")
    fastest = search.found.taken(np.array([0]))
    step_s = float(fastest.step_s[0])
    near = _near(search, fastest, objective_s=step_s, prices=prices, rooms=rooms)
    least = int(np.argmin(np.where(near.is_fit_C, near.expected_s, np.inf)))
    row = near.found.taken(np.array([least]))
    return LeastExpected(
        row=row,
        expected_s=float(near.expected_s[least]),
        chance=float(chances_of(search, row).ever_C[0]),
    )


def roomier(
    search: Search, *, step_s: float, rooms: Sequence[Search] = (), most_chance: float = SMALL
) -> Found | None:
    """The fastest found that hardly runs out of memory, one column; None where none was found.

    Args:
        search: with the rows near the fastest found.
        step_s: of the decision that may run out.
        rooms: searches for decisions with more room and the ways near them, where any were made.
        most_chance: of running out.
    """
    limit_s, found = step_s * (1.0 + MOST_SLOWER_RATIO), None
    for room in rooms:
        one = fastest_with(room, most_chance=most_chance)
        if one is not None and (found is None or one.step_s[0] < found.step_s[0]):
            found, limit_s = one, min(limit_s, float(one.step_s[0]))
    near = _near_ways(search, limit_s=limit_s)
    if near is None:
        return found
    return fastest_with(replace(search, found=_beside(near, found)), most_chance=most_chance)


def fastest_with(room: Search, *, most_chance: float) -> Found | None:
    """The fastest of what was found whose chance of running out is no larger, one column."""
    if room.found is None:
        return None
    with_room = np.flatnonzero(chances_of(room, room.found).ever_C <= most_chance)
    if not len(with_room):
        return None
    return room.found.taken(with_room[np.argmin(room.found.step_s[with_room])][None])


def with_near_ways(room: Search) -> Search:
    """Put in the place of the rows that a search for more room found every way near its fastest."""
    if room.found is None:
        return room
    least_s = float(room.found.step_s[0])
    return replace(room, found=_near_ways(room, limit_s=least_s * (1.0 + MOST_SLOWER_RATIO)))


def chances_of(search: Search, found: Found) -> Chances:
    """How likely decisions run out of memory, each by its device that is likeliest to."""
    return likeliest_ranks(search, found)[0]


def likeliest_ranks(search: Search, found: Found) -> tuple[Chances, Floats]:
    """How likely decisions run out, and by what share of its peak the device at risk grows.

    That is when the busiest expert rank's load doubles; 0 where a recording says how uneven it is.
    """
    question = search.question
    peak_PC, uneven_PC = _bytes_of_ranks(search, found)
    every = chances(
        peak_PC,
        capacity_bytes=question.capacity_bytes,
        software=question.software,
        pipeline_C=found.candidates.rows["pipeline"],
        uneven_bytes_C=uneven_PC,
    )
    worst, rank_C = every.of_likeliest_rank()
    grown_PC = uneven_PC / np.maximum(peak_PC, 1.0)
    return worst, np.take_along_axis(grown_PC, rank_C[None], axis=0)[0]


def _near(
    search: Search,
    fastest: Found,
    *,
    objective_s: float,
    prices: LossPrices,
    rooms: Sequence[Search],
) -> _Near:
    """Price the risks of the fastest and of those that may be within the tolerance with them."""
    fastest = replace(fastest, step_s=np.array([objective_s]))
    with_room: Found | None = None
    for room in rooms:
        with_room = _beside(with_room, room.found)
    limit_s = _near_limit_s(search, fastest, prices=prices, with_room=with_room)
    others = _beside(_near_ways(search, limit_s=limit_s), with_room)
    found = fastest if others is None else fastest.beside(others)
    risks = chances_of(search, found)
    is_fit_C = fit_C(risks.ever_C)
    expected_s = prices.expected_s(found.step_s, risks)
    # Closed forms of others may be below the fastest as it plays; it is the least that is known.
    least_s = max(objective_s, float(expected_s[is_fit_C].min()))
    return _Near(
        found=found,
        expected_s=expected_s,
        is_fit_C=is_fit_C,
        most_s=least_s * (1.0 + TOLERANCE_RATIO),
        has_fallback=bool((risks.ever_C <= SMALL).any()),
    )


def memory_step(chance: float) -> int:
    """Which of MEMORY_STEPS a chance of running out is up to; risks of one step count as alike."""
    return int(np.searchsorted(MEMORY_STEPS, chance))


def fit_C(ever_C: Floats) -> Bools:
    """Which decisions are as likely to fit as may be asked.

    Args:
        ever_C: chances of running out of memory.
    """
    is_fit_C: Bools = ever_C <= LIKELY
    if is_fit_C.any():
        return is_fit_C
    step_C = np.searchsorted(MEMORY_STEPS, ever_C)
    found: Bools = step_C == step_C.min()
    return found


def is_excluded(chance: float, *, beside: float) -> bool:
    """Whether a decision is left out for its chance of running out, beside that of another."""
    return not fit_C(np.array([chance, beside]))[0]


def less_chance_words(chance: float, *, other: float) -> str:
    """Say that a decision runs out less often than another."""
    return f"{LESS_CHANCE} ({format_ratio(chance)} instead of {format_ratio(other)})"


def _near_limit_s(
    search: Search, fastest: Found, *, prices: LossPrices, with_room: Found | None
) -> float:
    """Seconds beyond which no step of the first search can be within the tolerance."""
    step_s = float(fastest.step_s[0])
    if with_room is None:
        own = chances_of(search, fastest)
        expected_s = float(prices.expected_s(fastest.step_s, own)[0])
        # Were it to go on with another, that would be looked for up to the tolerance.
        most_s = expected_s * (1.0 + TOLERANCE_RATIO * (1.0 + float(own.ever_C[0])))
        return min(most_s, step_s * (1.0 + MOST_SLOWER_RATIO))
    every = fastest.beside(with_room)
    risks = chances_of(search, every)
    fitting_s = prices.expected_s(every.step_s, risks)[risks.ever_C <= LIKELY]
    most_s = float(fitting_s.min(initial=np.inf)) * (1.0 + TOLERANCE_RATIO)
    return min(most_s, step_s * (1.0 + MOST_SLOWER_RATIO))


def criteria(search: Search, found: Found) -> Ints:
    """Every criterion of every candidate but time, [C, K]; smaller is better."""
    rows, ways = found.candidates.rows, found.candidates.ways
    is_copied = np.array([one == "domain" for one in search.ways.choices["sharding"]])
    columns = {
        "memory": np.searchsorted(MEMORY_STEPS, chances_of(search, found).ever_C),
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


def _beside(one: Found | None, other: Found | None) -> Found | None:
    """Both, where there are both."""
    if one is None or other is None:
        return other if one is None else one
    return one.beside(other)


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
    """The fastest of those that no criterion tells apart, of equal ones that of least memory."""
    by_time = np.lexsort((found.peak_bytes, found.step_s))
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


def _bytes_of_ranks(search: Search, found: Found) -> tuple[Floats, Floats]:
    """Peaks of every device, and what they grow by when the busiest expert rank's load doubles.

    Where that load is recorded, or there are no experts, all grow alike and the fullest one stands
    for all.
    """
    question, candidates = search.question, found.candidates
    if question.busiest is not None or question.model.moe is None:
        return found.peak_bytes[None], np.zeros((1, len(found)))
    strategies = strategies_of(question, search.ways, candidates)
    layers_PC = found.layers_PC[: int(candidates.rows["pipeline"].max(initial=1))]
    once_PC, twice_PC = (
        bytes_of_devices(
            question, replace(strategies, busiest_ratio_p99=ratio), candidates, layers_PC
        )
        for ratio in (1.0, 2.0)
    )
    # The search's own peaks count; formulas say how the other devices compare with the fullest.
    share_PC = once_PC / once_PC.max(axis=0)
    return share_PC * found.peak_bytes, np.maximum(twice_PC - once_PC, 0.0)


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
    better = np.flatnonzero(chosen_K < own_K)[:MOST_REASONS]
    if not len(better):
        yield LESS_EXPECTED
    for at in better:
        name, words = CRITERIA[at]
        if name == "memory":
            chance, other = (float(chances_of(search, one).ever_C[0]) for one in (chosen, fastest))
            yield less_chance_words(chance, other=other)
        elif name == "recompute":
            yield words
        else:
            yield f"{words} ({chosen_K[at]} instead of {own_K[at]})"
