"""Search for decisions with memory headroom, beyond the rows next to the fastest.

A decision is safe if its probability of running out of memory (OOM) is at most SMALL. A search
keeps the rows whose best option, as full as the memory limit allows, is near the fastest. Safe
decisions, which are slower, are seldom among them. They are searched for under the lower memory
limit at which OOM becomes improbable: first near the decision at risk, then however slow they are,
since a run that fails goes on with the fastest safe one, its fallback. Between the two lie
decisions that are faster than the fallback and safer than the fastest; they are searched for under
the limits of CHANCES. If nothing is safe, the search looks for the least memory.

Runtimes whose peak errors differ without a pipeline (peak_errors.py) are also searched without one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.search.progress import PlanningEvent, ignore_progress
from tuner.search.settings import SearchSettings
from tuner.search.train.memory_risk import LIKELY, SMALL, largest_peak_bytes
from tuner.search.train.peak_errors import error_kind
from tuner.search.train.preference import (
    MOST_ROWS,
    MOST_SLOWER_RATIO,
    TOLERANCE_RATIO,
    Preferred,
    fastest_within_chance,
    likeliest_ranks,
    oom_chances,
    with_nearby_options,
)
from tuner.search.train.problem import TrainProblem
from tuner.search.train.relaxations import least_sufficient_memory
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, Solutions

CHANCES: Final = (0.3, LIKELY)
"""OOM probabilities whose limits are searched besides that of SMALL."""

FAR_CHANCE: Final = 0.1
"""OOM probability whose limit is searched, too, where no safe decision is near the one at risk: a
run then gains from a faster decision to fall back on first."""

MOST_SEARCHES: Final = 3
"""Searches under ever lower limits while the result is at risk, because its peak errs or grows
more. What lies between the limits is not searched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Headroom:
    """Result of the searches for more headroom."""

    searches: tuple[SearchOutcome, ...] = ()
    """Searches with a result, their rows replaced by every option near the fastest."""
    complete_s: float | None = None
    """Seconds of a step up to which all safe decisions were searched for, if no search has a
    result; infinite if nothing fits under the limit that all of them keep."""
    safe_peak_ratio: float | None = None
    """Share of a device's memory up to which a predicted peak is safe."""


NO_HEADROOM: Final = Headroom()


def has_enough_headroom(outcome: SearchOutcome, chosen: Preferred, *, fastest_s: float) -> bool:
    """Return whether a decision is safe and a search for headroom could gain no more than a tie.

    Every row that the search did not keep takes at least TOLERANCE_RATIO longer than the fastest.

    Args:
        outcome: of the search.
        chosen: one of its rows, in place of the fastest.
        fastest_s: seconds of the fastest step.
    """
    if chosen.expected_s is None or chosen.fastest_expected_s is None:
        return False
    known_s = min(chosen.expected_s, chosen.fastest_expected_s)
    is_near = known_s <= fastest_s * (1.0 + TOLERANCE_RATIO) ** 2
    return is_near and float(oom_chances(outcome, chosen.row).ever_C[0]) <= SMALL


def search_headroom(
    outcome: SearchOutcome, settings: SearchSettings, *, full: Solutions, step_s: float
) -> Headroom:
    """Search for decisions with headroom, the near ones first.

    Args:
        outcome: of the search.
        settings: of it; all searches together take half its time.
        full: a decision that may run out, a single one.
        step_s: of that decision.
    """
    if float(oom_chances(outcome, full).ever_C[0]) <= SMALL:
        return NO_HEADROOM
    settings.watch(PlanningEvent(stage="memory", text="searching for decisions with more headroom"))
    return _HeadroomSearch(outcome, settings, full).result(step_s)


class _HeadroomSearch:
    """Searches for headroom that share a time limit; lives for one call."""

    def __init__(self, outcome: SearchOutcome, settings: SearchSettings, full: Solutions) -> None:
        self._outcome = outcome
        self._full = full
        self._deadline = settings.begin(0.5)
        self._settings = replace(settings, top=1, band_ratio=TOLERANCE_RATIO, watch=ignore_progress)
        self._kept: list[SearchOutcome] = []

    def result(self, step_s: float) -> Headroom:
        """Run the searches."""
        grows = _uneven_ratio(self._outcome, self._full)
        complete_s: float | None = None
        self._under(SMALL, below_s=step_s * (1.0 + MOST_SLOWER_RATIO), uneven_ratio=grows)
        if not self._kept:
            complete_s = self._under(SMALL, below_s=np.inf, uneven_ratio=grows)
        if not self._kept and grows > 0.0:
            # A peak that grows less may be higher; one that does not grow may be the highest.
            complete_s = self._under(SMALL, below_s=np.inf, uneven_ratio=0.0)
        complete_s = None if self._kept else complete_s
        fallback_s = self._fastest_s(SMALL)
        is_far = np.isfinite(fallback_s) and fallback_s > step_s * (1.0 + MOST_SLOWER_RATIO)
        for chance in (FAR_CHANCE, *CHANCES) if is_far else CHANCES:
            fastest_s = self._fastest_s(chance)
            # Only a decision between the two can be better than both.
            if fastest_s > step_s * (1.0 + TOLERANCE_RATIO):
                self._under(chance, below_s=fastest_s, uneven_ratio=0.0)
        if not np.isfinite(fallback_s):
            self._search_min_memory()
        is_piped = int(self._full.candidates.rows["pipeline"][0]) > 1
        limit_bytes = _limit_bytes(
            self._outcome.problem,
            chance=SMALL,
            has_pipeline=is_piped,
            uneven_ratio=grows,
        )
        return Headroom(
            searches=tuple(self._kept),
            complete_s=complete_s,
            safe_peak_ratio=limit_bytes / self._outcome.problem.capacity_bytes,
        )

    def _fastest_s(self, chance: float) -> float:
        """Seconds of the fastest step so far with at most this OOM probability."""
        fastest = (fastest_within_chance(outcome, most_chance=chance) for outcome in self._kept)
        return min((float(row.step_s[0]) for row in fastest if row is not None), default=np.inf)

    def _under(self, chance: float, *, below_s: float, uneven_ratio: float) -> float:
        """Search under the memory limits of an OOM probability, given how peaks grow.

        Returns:
            Seconds of a step up to which everything under these limits was searched.
        """
        return min(
            self._of_kind(
                problem,
                chance,
                has_pipeline=has_pipeline,
                below_s=below_s,
                uneven_ratio=uneven_ratio,
            )
            for problem, has_pipeline in self._problems()
        )

    def _problems(self) -> Iterator[tuple[TrainProblem, bool]]:
        """Problems to search, and whether their peaks err like those of pipelines."""
        problem, software = self._outcome.problem, self._outcome.problem.software
        limited = problem.limits.pipeline_model_parallel_size
        yield problem, True
        errs_uniformly = (
            len({error_kind(software, has_pipeline=piped) for piped in (False, True)}) == 1
        )
        if not errs_uniformly and (limited is None or 1 in limited):
            plain = problem.limits.model_copy(update={"pipeline_model_parallel_size": (1,)})
            yield replace(problem, limits=plain), False

    def _of_kind(
        self,
        problem: TrainProblem,
        chance: float,
        *,
        has_pipeline: bool,
        below_s: float,
        uneven_ratio: float,
    ) -> float:
        limit_bytes, complete_s = problem.memory_limit_bytes, np.inf
        for _ in range(MOST_SEARCHES):
            lower_bytes = _limit_bytes(
                problem, chance=chance, has_pipeline=has_pipeline, uneven_ratio=uneven_ratio
            )
            limit_bytes = min(lower_bytes, limit_bytes)
            if not limit_bytes:
                break
            outcome = self._search(problem, limit_bytes=limit_bytes, below_s=below_s)
            complete_s = min(complete_s, _looked_through_s(outcome))
            if outcome.solutions is None:
                break
            expanded = with_nearby_options(outcome)
            if fastest_within_chance(expanded, most_chance=chance) is not None:
                self._kept.append(expanded)
                break
            uneven_ratio = _uneven_ratio(outcome, outcome.solutions.taken(np.array([0])))
        return complete_s

    def _search_min_memory(self) -> None:
        """Search for the least memory, where nothing is safe."""
        problem = self._outcome.problem
        limit_bytes = least_sufficient_memory(problem)
        if limit_bytes >= problem.memory_limit_bytes:
            return
        outcome = self._search(problem, limit_bytes=limit_bytes, below_s=np.inf)
        if outcome.solutions is not None:
            self._kept.append(with_nearby_options(outcome))

    def _search(
        self, problem: TrainProblem, *, limit_bytes: float, below_s: float
    ) -> SearchOutcome:
        limited = replace(
            problem,
            memory_limit_bytes=limit_bytes,
            usable_memory_ratio=limit_bytes / problem.capacity_bytes,
        )
        return search(limited, replace(self._settings.until(self._deadline), below_s=below_s))


def _limit_bytes(
    problem: TrainProblem, *, chance: float, has_pipeline: bool, uneven_ratio: float
) -> float:
    """The largest peak of an OOM probability, given its errors and growth."""
    return largest_peak_bytes(
        problem.capacity_bytes,
        chance=chance,
        software=problem.software,
        has_pipeline=has_pipeline,
        uneven_ratio=uneven_ratio,
    )


def _uneven_ratio(outcome: SearchOutcome, row: Solutions) -> float:
    """Growth of the peak at risk, as a share, when the most-loaded rank's load doubles."""
    return float(likeliest_ranks(outcome, row)[1].max())


def _looked_through_s(outcome: SearchOutcome) -> float:
    """Seconds of a step up to which all that fits was found and all its options searched."""
    if outcome.solutions is None or len(outcome.solutions) <= MOST_ROWS:
        return outcome.proof.complete_s
    return min(outcome.proof.complete_s, float(outcome.solutions.step_s[MOST_ROWS]))
