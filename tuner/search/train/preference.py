"""Choice among the decisions that the model cannot tell apart: the one that is easier to run.

The search proves how fast a step can be. Beside its fastest decision there are others that take a
percent longer and are easier to run. The risk of running out of memory (OOM) is priced first: its
expected cost is added to every step (memory_risk.py), above all that the run then continues with
the fallback, the fastest safe decision. A decision without headroom may therefore cost more than a
slower one. One that will probably run out is excluded if another is less likely to; if none is,
those of the least probability remain. Every option of every row whose step is then within
`TOLERANCE_RATIO` of the least is put in one total order; the first criterion that differs decides:

    memory        a smaller probability of running out, in the steps of MEMORY_STEPS
    kinds         of parallelism in use, of tensor, context, pipeline, virtual and expert tensor:
                  each brings a communicator, a launch flag and a way to fail
    context       one rank a sequence needs no balanced split and no other attention kernel
    expert tensor unsplit experts keep their GEMMs large
    stages        pipeline times virtual: fewer sends, and a layout that survives another depth
    pipeline      fewer ranks, less bubble when the batch shrinks
    copies        of the training state, then its ZeRO stage: late gathers fail late
    expert        fewer ranks in an all-to-all, so that uneven routing reaches fewer nodes
    tensor        larger GEMMs
    offload       of optimizer state and activations, which ties a step to the host
    chunks        of MemFine
    recompute     as little as possible: modules, then layers
    time          of a step

This is not applied beyond the tolerance, and not to the certificate: objective, bound and gap stay
those of the fastest step, and the chosen decision's own gap is stated beside them.

Letters: C candidates, K criteria.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.config.knobs import OFFLOADS
from tuner.search.train.candidate_prices import candidate_bound_s, price
from tuner.search.train.candidates import Candidates, to_strategies
from tuner.search.train.memory import bytes_of_devices, may_fit
from tuner.search.train.memory_risk import LIKELY, SMALL, Chances, LossPrices, chances
from tuner.search.train.options import OptionSpace, RecomputeChoice
from tuner.search.train.search_result import (
    Detail,
    SearchOutcome,
    SimulatedRow,
    Solutions,
    price_solution,
)
from tuner.search.train.space_size import OptionTables
from tuner.units import format_ratio

Bools = npt.NDArray[np.bool_]

TOLERANCE_RATIO: Final = 0.02
"""Steps this share apart count as equally fast. Over several nodes the best of the model's first
three was up to 4.5 % from the measured best (README, choice), so the model resolves no less."""

MOST_ROWS: Final = 48
"""Rows whose options are put in order, the fastest: more are seldom within the tolerance."""

MOST_SIMULATED: Final = 32
"""Decisions that are simulated to find one that stays within the tolerance."""

MOST_SLOWER_RATIO: Final = 0.1
"""Rows of a search that are slower than its fastest by more than this share are ignored."""

MEMORY_STEPS: Final = (0.01, SMALL, 0.15, 0.3, LIKELY, 0.7, 0.85)
"""OOM probabilities up to which risks count as equal; published peaks are too few for finer
steps."""

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
class Preferred(SimulatedRow):
    """A decision in place of the fastest one."""

    reasons: tuple[str, ...]
    """Advantages of the decision over the fastest, in words."""
    expected_s: float | None
    """Seconds of the decision's step with the expected cost of running out of memory; None where no
    decision is safe, so that the run may never end."""
    fastest_expected_s: float | None
    """Seconds of the fastest decision's step, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Nearby:
    """Decisions near the fastest, itself among them as the first."""

    solutions: Solutions
    expected_s: Floats
    """Seconds a step, with the expected cost of running out of memory."""
    is_fit_C: Bools
    """Whether its OOM probability is acceptable."""
    most_s: float
    """Largest `expected_s` within the tolerance."""
    has_fallback: bool
    """Whether some decision is safe."""

    @property
    def eligible_C(self) -> Bools:
        """Return which are within the tolerance and no likelier to run out than acceptable."""
        return self.is_fit_C & (self.expected_s <= self.most_s)


def choose_preferred(
    search: SearchOutcome,
    fastest: Solutions,
    *,
    objective_s: float,
    prices: LossPrices,
    simulate: Callable[[Detail], float],
    is_near: Callable[[Detail, float, float], bool],
    headroom: Sequence[SearchOutcome] = (),
) -> Preferred | None:
    """Return the decision that comes first in the order; None where the fastest does.

    Args:
        search: with the rows near the fastest.
        fastest: a single one.
        objective_s: seconds of its step, the larger of closed form and simulation.
        prices: what running out of memory costs.
        simulate: seconds of a step whose schedule is simulated.
        is_near: whether a priced decision, whose step takes some seconds with the expected cost of
            running out, takes at most so many times what the fastest does without.
        headroom: outcomes of the searches for headroom, with the options near them; may be empty.
    """
    near = _nearby(search, fastest, objective_s=objective_s, prices=prices, headroom=headroom)
    eligible_C = near.eligible_C
    keys_CK = criteria(search, near.solutions)
    fastest_keys = tuple(keys_CK[0])
    others = 1 + np.flatnonzero(eligible_C[1:])
    order = np.lexsort((near.solutions.step_s[others], *keys_CK[others].T[::-1]))
    for index in others[order][:MOST_SIMULATED]:
        if eligible_C[0] and tuple(keys_CK[index]) >= fastest_keys:
            return None
        simulated = _simulate(search, near, int(index), simulate=simulate)
        if is_near(simulated.detail, simulated.expected_s, near.most_s / objective_s):
            return _to_preferred(search, fastest, near, simulated)
    if eligible_C[0]:
        return None
    least = _first_as_simulated(search, near, keys_CK, simulate=simulate)
    return None if least is None else _to_preferred(search, fastest, near, least)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Simulated(SimulatedRow):
    """A nearby decision whose schedule was simulated."""

    expected_s: float
    """Expected seconds of a step, with the time by which the simulation exceeds the closed form."""


def _simulate(
    search: SearchOutcome, near: _Nearby, index: int, *, simulate: Callable[[Detail], float]
) -> _Simulated:
    row = near.solutions.taken(np.array([index]))
    detail = price_solution(replace(search, solutions=row), 0)
    simulated_s = simulate(detail)
    more_s = max(0.0, simulated_s - float(row.step_s[0]))
    expected_s = float(near.expected_s[index]) + more_s
    return _Simulated(row=row, detail=detail, simulated_s=simulated_s, expected_s=expected_s)


def _first_as_simulated(
    search: SearchOutcome, near: _Nearby, keys_CK: Ints, *, simulate: Callable[[Detail], float]
) -> _Simulated | None:
    """The first in the order within the tolerance of the least expected step, as simulated.

    For a fastest that may not be chosen, where everything near the least by closed form is slower
    when simulated: then the least simulated step counts. None where the fastest comes first.
    """
    min_expected_s = float(near.expected_s[0]) if near.is_fit_C[0] else np.inf
    fit = 1 + np.flatnonzero(near.is_fit_C[1:])
    simulated: dict[int, _Simulated] = {}
    for index in fit[np.argsort(near.expected_s[fit], kind="stable")][:MOST_SIMULATED]:
        if near.expected_s[index] > min_expected_s * (1.0 + TOLERANCE_RATIO):
            break
        simulated[index] = _simulate(search, near, int(index), simulate=simulate)
        min_expected_s = min(min_expected_s, simulated[index].expected_s)
    most_s = min_expected_s * (1.0 + TOLERANCE_RATIO)
    kept = [index for index, candidate in simulated.items() if candidate.expected_s <= most_s]
    if not kept:
        return None
    first = min(kept, key=lambda index: (*keys_CK[index], simulated[index].expected_s))
    may_stay = near.is_fit_C[0] and near.expected_s[0] <= most_s
    if may_stay and tuple(keys_CK[0]) <= tuple(keys_CK[first]):
        return None
    return simulated[first]


def _to_preferred(
    search: SearchOutcome, fastest: Solutions, near: _Nearby, simulated: _Simulated
) -> Preferred:
    return Preferred(
        row=simulated.row,
        detail=simulated.detail,
        simulated_s=simulated.simulated_s,
        reasons=tuple(_reasons(search, fastest, simulated.row)),
        expected_s=simulated.expected_s if near.has_fallback else None,
        fastest_expected_s=float(near.expected_s[0]) if near.has_fallback else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastExpected:
    """The decision of the shortest expected step, running out of memory included."""

    row: Solutions
    """Row of the decision, a single one."""
    expected_s: float
    chance: float
    """Probability of running out of memory."""


def find_least_expected(
    search: SearchOutcome, *, prices: LossPrices, headroom: Sequence[SearchOutcome] = ()
) -> LeastExpected:
    """Find it by closed forms alone, without the order of criteria.

    Args:
        search: with a solution.
        prices: what running out of memory costs.
        headroom: outcomes of the searches for headroom, with the options near them; may be empty.
    """
    if search.solutions is None:
        raise ValueError("the search found nothing that fits")
    fastest = search.solutions.taken(np.array([0]))
    step_s = float(fastest.step_s[0])
    near = _nearby(search, fastest, objective_s=step_s, prices=prices, headroom=headroom)
    least = int(np.argmin(np.where(near.is_fit_C, near.expected_s, np.inf)))
    row = near.solutions.taken(np.array([least]))
    return LeastExpected(
        row=row,
        expected_s=float(near.expected_s[least]),
        chance=float(oom_chances(search, row).ever_C[0]),
    )


def fastest_with_headroom(
    search: SearchOutcome,
    *,
    step_s: float,
    headroom: Sequence[SearchOutcome] = (),
) -> Solutions | None:
    """The fastest safe solution, a single one; None where there is none.

    Args:
        search: with the rows near the fastest.
        step_s: of the decision that may run out.
        headroom: outcomes of the searches for headroom, with the options near them; may be empty.
    """
    limit_s, best = step_s * (1.0 + MOST_SLOWER_RATIO), None
    for room in headroom:
        safe = fastest_within_chance(room, most_chance=SMALL)
        if safe is not None and (best is None or safe.step_s[0] < best.step_s[0]):
            best, limit_s = safe, min(limit_s, float(safe.step_s[0]))
    near = _nearby_options(search, limit_s=limit_s)
    if near is None:
        return best
    return fastest_within_chance(replace(search, solutions=_concat(near, best)), most_chance=SMALL)


def fastest_within_chance(room: SearchOutcome, *, most_chance: float) -> Solutions | None:
    """The fastest solution with at most this OOM probability, a single one."""
    if room.solutions is None:
        return None
    with_room = np.flatnonzero(oom_chances(room, room.solutions).ever_C <= most_chance)
    if not len(with_room):
        return None
    return room.solutions.taken(with_room[np.argmin(room.solutions.step_s[with_room])][None])


def with_nearby_options(room: SearchOutcome) -> SearchOutcome:
    """Replace the rows of a search for headroom by every option near its fastest."""
    if room.solutions is None:
        return room
    fastest_s = float(room.solutions.step_s[0])
    return replace(
        room, solutions=_nearby_options(room, limit_s=fastest_s * (1.0 + MOST_SLOWER_RATIO))
    )


def oom_chances(search: SearchOutcome, solutions: Solutions) -> Chances:
    """OOM probabilities of decisions, each by its device that is most likely to run out."""
    return likeliest_ranks(search, solutions)[0]


def likeliest_ranks(search: SearchOutcome, solutions: Solutions) -> tuple[Chances, Floats]:
    """OOM probabilities of decisions, and by what share the peak at risk grows.

    That is when the load of the most-loaded expert rank doubles; 0 where the routing is recorded.
    """
    problem = search.problem
    peak_PC, uneven_PC = _bytes_of_ranks(search, solutions)
    every = chances(
        peak_PC,
        capacity_bytes=problem.capacity_bytes,
        software=problem.software,
        pipeline_C=solutions.candidates.rows["pipeline"],
        uneven_bytes_C=uneven_PC,
    )
    worst, rank_C = every.of_likeliest_rank()
    grown_PC = uneven_PC / np.maximum(peak_PC, 1.0)
    return worst, np.take_along_axis(grown_PC, rank_C[None], axis=0)[0]


def _nearby(
    search: SearchOutcome,
    fastest: Solutions,
    *,
    objective_s: float,
    prices: LossPrices,
    headroom: Sequence[SearchOutcome],
) -> _Nearby:
    """Price the risks of the fastest and of those that may be within the tolerance."""
    fastest = replace(fastest, step_s=np.array([objective_s]))
    with_room: Solutions | None = None
    for room in headroom:
        with_room = _concat(with_room, room.solutions)
    limit_s = _nearby_limit_s(search, fastest, prices=prices, with_room=with_room)
    others = _concat(_nearby_options(search, limit_s=limit_s), with_room)
    solutions = fastest if others is None else fastest.concat(others)
    risks = oom_chances(search, solutions)
    is_fit_C = fit_C(risks.ever_C)
    expected_s = prices.expected_s(solutions.step_s, risks)
    # Closed forms of others may be below the simulated fastest, which is the least known time.
    min_expected_s = max(objective_s, float(expected_s[is_fit_C].min()))
    return _Nearby(
        solutions=solutions,
        expected_s=expected_s,
        is_fit_C=is_fit_C,
        most_s=min_expected_s * (1.0 + TOLERANCE_RATIO),
        has_fallback=bool((risks.ever_C <= SMALL).any()),
    )


def memory_step(chance: float) -> int:
    """Return which of MEMORY_STEPS an OOM probability is in; risks of one step count as equal."""
    return int(np.searchsorted(MEMORY_STEPS, chance))


def fit_C(ever_C: Floats) -> Bools:
    """Return which decisions have an acceptable OOM probability.

    Args:
        ever_C: probabilities of running out of memory.
    """
    is_fit_C: Bools = ever_C <= LIKELY
    if is_fit_C.any():
        return is_fit_C
    step_C = np.searchsorted(MEMORY_STEPS, ever_C)
    is_safest_C: Bools = step_C == step_C.min()
    return is_safest_C


def is_excluded(chance: float, *, beside: float) -> bool:
    """Return whether a decision is excluded for its OOM probability, beside that of another."""
    return not fit_C(np.array([chance, beside]))[0]


def less_chance_words(chance: float, *, instead_of: float) -> str:
    """Say that a decision runs out less often than another."""
    return f"{LESS_CHANCE} ({format_ratio(chance)} instead of {format_ratio(instead_of)})"


def _nearby_limit_s(
    search: SearchOutcome, fastest: Solutions, *, prices: LossPrices, with_room: Solutions | None
) -> float:
    """Seconds above which no step of the first search can be within the tolerance."""
    step_s = float(fastest.step_s[0])
    if with_room is None:
        fastest_risks = oom_chances(search, fastest)
        expected_s = float(prices.expected_s(fastest.step_s, fastest_risks)[0])
        # A fallback would be searched for up to the tolerance.
        most_s = expected_s * (1.0 + TOLERANCE_RATIO * (1.0 + float(fastest_risks.ever_C[0])))
        return min(most_s, step_s * (1.0 + MOST_SLOWER_RATIO))
    every = fastest.concat(with_room)
    risks = oom_chances(search, every)
    fitting_s = prices.expected_s(every.step_s, risks)[risks.ever_C <= LIKELY]
    most_s = float(fitting_s.min(initial=np.inf)) * (1.0 + TOLERANCE_RATIO)
    return min(most_s, step_s * (1.0 + MOST_SLOWER_RATIO))


def criteria(search: SearchOutcome, solutions: Solutions) -> Ints:
    """Every criterion of every candidate but time, [C, K]; smaller is better."""
    rows, options = solutions.candidates.rows, solutions.candidates.options
    is_copied = np.array([choice == "domain" for choice in search.options.choices["sharding"]])
    columns = {
        "memory": np.searchsorted(MEMORY_STEPS, oom_chances(search, solutions).ever_C),
        "kinds": sum((rows[name] > 1).astype(np.int64) for name in KINDS),
        "stages": rows["pipeline"] * rows["virtual_pipeline"],
        "copies": np.where(is_copied[options["sharding"]], rows["copies"], 1),
        "zero_stage": _choices(search.options, options, "zero_stage"),
        "offload": sum(_choices(search.options, options, name) for name in OFFLOADS),
        "chunks": _choices(search.options, options, "chunks"),
        "recompute": _recomputed(search.options)[options["recompute"]],
    }
    return np.stack([columns[n] if n in columns else rows[n] for n, _ in CRITERIA], axis=1)


def _concat(first: Solutions | None, second: Solutions | None) -> Solutions | None:
    """Both, where there are both."""
    if first is None or second is None:
        return second if first is None else first
    return first.concat(second)


def _nearby_options(search: SearchOutcome, *, limit_s: float) -> Solutions | None:
    """Price the legal options of the rows near the fastest; keep those that fit and are near."""
    if search.solutions is None:
        return None
    near = np.flatnonzero(search.solutions.step_s <= limit_s)[:MOST_ROWS]
    solutions: Solutions | None = None
    for candidates in _expand_options(search, search.solutions.candidates.taken(near)):
        bound_s = candidate_bound_s(search.problem, search.options, candidates)
        kept = np.flatnonzero(bound_s <= limit_s)
        kept = kept[may_fit(search.problem, search.options, candidates.taken(kept))]
        if not len(kept):
            continue
        some = candidates.taken(kept)
        prices = price(search.problem, search.options, some, is_moved_to_fit=True)
        fits = prices.peak_bytes <= search.problem.memory_limit_bytes
        good = np.flatnonzero(fits & (prices.step_s <= limit_s))
        if not len(good):
            continue
        priced = Solutions(
            candidates=some.taken(good),
            step_s=prices.step_s[good],
            peak_bytes=prices.peak_bytes[good],
            layers_PC=prices.layers_PC[:, good],
        )
        fastest = _fastest_of_each(search, priced)
        solutions = fastest if solutions is None else solutions.concat(fastest)
    return solutions


def _fastest_of_each(search: SearchOutcome, solutions: Solutions) -> Solutions:
    """The fastest of each combination of criteria; of equals the one of least memory."""
    by_time = np.lexsort((solutions.peak_bytes, solutions.step_s))
    _, first = np.unique(criteria(search, solutions)[by_time], axis=0, return_index=True)
    return solutions.taken(by_time[np.sort(first)])


def _expand_options(search: SearchOutcome, rows: Candidates) -> Iterator[Candidates]:
    """Yield rows with every option that is not dominated, one kind of degrees at a time."""
    for table, chosen in OptionTables(options=search.options).by_kind(rows.rows):
        for row in chosen:
            count = len(table.options_TA)
            yield Candidates(
                rows={name: np.repeat(column[row], count) for name, column in rows.rows.items()},
                options=table.columns(table.options_TA),
            )


def _bytes_of_ranks(search: SearchOutcome, solutions: Solutions) -> tuple[Floats, Floats]:
    """Peaks of every device, and their growth when the most-loaded expert rank's load doubles.

    Where that load is recorded, or there are no experts, all grow alike and the highest peak
    represents all.
    """
    problem, candidates = search.problem, solutions.candidates
    if problem.expert_imbalance is not None or problem.model.moe is None:
        return solutions.peak_bytes[None], np.zeros((1, len(solutions)))
    strategies = to_strategies(problem, search.options, candidates)
    layers_PC = solutions.layers_PC[: int(candidates.rows["pipeline"].max(initial=1))]
    once_PC, twice_PC = (
        bytes_of_devices(
            problem, replace(strategies, expert_imbalance_p99=ratio), candidates, layers_PC
        )
        for ratio in (1.0, 2.0)
    )
    # The search's own peaks count; formulas give the other devices relative to the highest.
    share_PC = once_PC / once_PC.max(axis=0)
    return share_PC * solutions.peak_bytes, np.maximum(twice_PC - once_PC, 0.0)


def _choices(options: OptionSpace, chosen: Mapping[str, Ints], axis: str) -> Ints:
    values: Ints = np.array(options.choices[axis], dtype=np.int64)[chosen[axis]]
    return values


def _recomputed(options: OptionSpace) -> Ints:
    """Return how much each choice recomputes: modules, or by layers, more than all of them."""
    recompute: list[RecomputeChoice] = list(options.choices["recompute"])  # type: ignore[arg-type] # this axis only
    return np.array(
        [len(choice.modules) + round(MODULES_TOGETHER * choice.share) for choice in recompute]
    )


def _reasons(search: SearchOutcome, fastest: Solutions, chosen: Solutions) -> Iterator[str]:
    """Name the first criteria in which the chosen decision is better."""
    own_K, chosen_K = criteria(search, fastest)[0], criteria(search, chosen)[0]
    better = np.flatnonzero(chosen_K < own_K)[:MOST_REASONS]
    if not len(better):
        yield LESS_EXPECTED
    for at in better:
        name, words = CRITERIA[at]
        if name == "memory":
            chosen_chance, fastest_chance = (
                float(oom_chances(search, solution).ever_C[0]) for solution in (chosen, fastest)
            )
            yield less_chance_words(chosen_chance, instead_of=fastest_chance)
        elif name == "recompute":
            yield words
        else:
            yield f"{words} ({chosen_K[at]} instead of {own_K[at]})"
