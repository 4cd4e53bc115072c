"""Decisions that hardly run out of memory, searched for beyond the rows next to the fastest.

A search keeps the rows whose best way, as full as the memory limit allows, is near the fastest.
What has more room and takes longer is seldom among them, so it is searched for under the memory
limit at which the chance of running out is small: first near the decision that may run out, then
however slow it is, since a run goes on with it. In between lie decisions that are faster than that
fallback and run out less often than the fastest; they are looked for under the limits of
CHANCES. Where nothing hardly runs out, what takes least memory is searched for.

Runtimes whose peaks err otherwise without a pipeline (peak_errors.py) are searched so as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.planner.analytic.incumbents import Found, Search
from tuner.planner.analytic.memory_risk import LIKELY, SMALL, largest_peak_bytes
from tuner.planner.analytic.peak_errors import kind_of
from tuner.planner.analytic.preference import (
    MOST_ROWS,
    MOST_SLOWER_RATIO,
    TOLERANCE_RATIO,
    Preferred,
    chances_of,
    fastest_with,
    likeliest_ranks,
    with_near_ways,
)
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.relaxations import memory_that_would_do
from tuner.planner.analytic.search import Settings, search
from tuner.planner.progress import Told, unwatched

CHANCES: Final = (0.3, LIKELY)
"""Chances of running out whose limits are searched beside that of SMALL."""

FAR_CHANCE: Final = 0.1
"""The same, where what hardly runs out was not found near the decision that may run out: a run then
gains from what it goes on with before that."""

MOST_SEARCHES: Final = 3
"""Under ever lower limits, where what was found still runs out: its peak errs or grows more. What
lies between the limits is not searched."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rooms:
    """What was searched for with more room."""

    searches: tuple[Search, ...] = ()
    """That found something, with every way near the fastest in the place of their rows."""
    complete_s: float | None = None
    """Where none was found: seconds of a step up to which every decision that hardly runs out was
    searched for; infinite where nothing fits under the limit that none of them exceeds."""
    room_ratio: float | None = None
    """Share of a device's memory that a predicted peak may take and hardly run out."""


NO_ROOMS: Final = Rooms()


def has_room_enough(found: Search, chosen: Preferred, *, fastest_s: float) -> bool:
    """Whether a chosen decision hardly runs out, and no search for room could gain more than a tie.

    Every row that the search did not keep takes at least TOLERANCE_RATIO longer than the fastest.

    Args:
        found: the search that was made.
        chosen: of its rows, in place of the fastest.
        fastest_s: seconds of the fastest step.
    """
    if chosen.expected_s is None or chosen.fastest_expected_s is None:
        return False
    known_s = min(chosen.expected_s, chosen.fastest_expected_s)
    is_near = known_s <= fastest_s * (1.0 + TOLERANCE_RATIO) ** 2
    return is_near and float(chances_of(found, chosen.row).ever_C[0]) <= SMALL


def roomy_searches(found: Search, settings: Settings, *, full: Found, step_s: float) -> Rooms:
    """Search for decisions with room, the near ones first.

    Args:
        found: the search that was made.
        settings: of it; all searches together take half its time.
        full: a decision that may run out, one column.
        step_s: of that decision.
    """
    if float(chances_of(found, full).ever_C[0]) <= SMALL:
        return NO_ROOMS
    settings.watch(Told(stage="memory", text="searching for decisions with more room"))
    return _Looking(found, settings, full).result(step_s)


class _Looking:
    """Searches for room that share a time limit; lives as long as the call that made it."""

    def __init__(self, found: Search, settings: Settings, full: Found) -> None:
        self._found = found
        self._full = full
        self._clock = settings.clock
        self._end_s = settings.clock() + settings.time_limit_s / 2.0
        self._settings = replace(settings, top=1, band_ratio=TOLERANCE_RATIO, watch=unwatched)
        self._kept: list[Search] = []

    def result(self, step_s: float) -> Rooms:
        """Search."""
        grows = _uneven_ratio(self._found, self._full)
        complete_s: float | None = None
        self._under(SMALL, below_s=step_s * (1.0 + MOST_SLOWER_RATIO), uneven_ratio=grows)
        if not self._kept:
            complete_s = self._under(SMALL, below_s=np.inf, uneven_ratio=grows)
        if not self._kept and grows > 0.0:
            # What grows less may take more memory; what does not grow at all takes the most.
            complete_s = self._under(SMALL, below_s=np.inf, uneven_ratio=0.0)
        complete_s = None if self._kept else complete_s
        fallback_s = self._least_s(SMALL)
        is_far = np.isfinite(fallback_s) and fallback_s > step_s * (1.0 + MOST_SLOWER_RATIO)
        for chance in (FAR_CHANCE, *CHANCES) if is_far else CHANCES:
            least_s = self._least_s(chance)
            # Only what is between the two can be better than both.
            if least_s > step_s * (1.0 + TOLERANCE_RATIO):
                self._under(chance, below_s=least_s, uneven_ratio=0.0)
        if not np.isfinite(fallback_s):
            self._leanest()
        is_piped = int(self._full.candidates.rows["pipeline"][0]) > 1
        limit_bytes = _limit_bytes(
            self._found.question,
            chance=SMALL,
            has_pipeline=is_piped,
            uneven_ratio=grows,
        )
        return Rooms(
            searches=tuple(self._kept),
            complete_s=complete_s,
            room_ratio=limit_bytes / self._found.question.capacity_bytes,
        )

    def _least_s(self, chance: float) -> float:
        """Seconds of the fastest step found that runs out no likelier."""
        fastest = (fastest_with(one, most_chance=chance) for one in self._kept)
        return min((float(one.step_s[0]) for one in fastest if one is not None), default=np.inf)

    def _under(self, chance: float, *, below_s: float, uneven_ratio: float) -> float:
        """Search under the limits at which running out has a chance, were peaks to grow so.

        Returns:
            Seconds of a step up to which everything under these limits was looked at.
        """
        return min(
            self._of_kind(
                question,
                chance,
                has_pipeline=has_pipeline,
                below_s=below_s,
                uneven_ratio=uneven_ratio,
            )
            for question, has_pipeline in self._kinds()
        )

    def _kinds(self) -> Iterator[tuple[Question, bool]]:
        """What is searched, and whether its peaks err like those of pipelines."""
        question, software = self._found.question, self._found.question.software
        limited = question.limits.pipeline_model_parallel_size
        yield question, True
        alike = len({kind_of(software, has_pipeline=piped) for piped in (False, True)}) == 1
        if not alike and (limited is None or 1 in limited):
            plain = question.limits.model_copy(update={"pipeline_model_parallel_size": (1,)})
            yield replace(question, limits=plain), False

    def _of_kind(
        self,
        question: Question,
        chance: float,
        *,
        has_pipeline: bool,
        below_s: float,
        uneven_ratio: float,
    ) -> float:
        limit_bytes, complete_s = question.memory_limit_bytes, np.inf
        for _ in range(MOST_SEARCHES):
            lower_bytes = _limit_bytes(
                question, chance=chance, has_pipeline=has_pipeline, uneven_ratio=uneven_ratio
            )
            limit_bytes = min(lower_bytes, limit_bytes)
            if not limit_bytes:
                break
            again = self._search(question, limit_bytes=limit_bytes, below_s=below_s)
            complete_s = min(complete_s, _looked_through_s(again))
            if again.found is None:
                break
            unfolded = with_near_ways(again)
            if fastest_with(unfolded, most_chance=chance) is not None:
                self._kept.append(unfolded)
                break
            uneven_ratio = _uneven_ratio(again, again.found.taken(np.array([0])))
        return complete_s

    def _leanest(self) -> None:
        """Search for what takes least memory, where nothing hardly runs out."""
        question = self._found.question
        limit_bytes = memory_that_would_do(question)
        if limit_bytes >= question.memory_limit_bytes:
            return
        found = self._search(question, limit_bytes=limit_bytes, below_s=np.inf)
        if found.found is not None:
            self._kept.append(with_near_ways(found))

    def _search(self, question: Question, *, limit_bytes: float, below_s: float) -> Search:
        asked = replace(
            question,
            memory_limit_bytes=limit_bytes,
            usable_memory_ratio=limit_bytes / question.capacity_bytes,
        )
        left_s = max(0.0, self._end_s - self._clock())
        return search(asked, replace(self._settings, below_s=below_s, time_limit_s=left_s))


def _limit_bytes(
    question: Question, *, chance: float, has_pipeline: bool, uneven_ratio: float
) -> float:
    """The largest peak with a chance, were it to err and grow so."""
    return largest_peak_bytes(
        question.capacity_bytes,
        chance=chance,
        software=question.software,
        has_pipeline=has_pipeline,
        uneven_ratio=uneven_ratio,
    )


def _uneven_ratio(found: Search, one: Found) -> float:
    """Share of its peak by which the device at risk grows when the busiest rank's load doubles."""
    return float(likeliest_ranks(found, one)[1].max())


def _looked_through_s(found: Search) -> float:
    """Seconds of a step up to which all that fits was found, and every way of it looked at."""
    if found.found is None or len(found.found) <= MOST_ROWS:
        return found.complete_s
    return min(found.complete_s, float(found.found.step_s[MOST_ROWS]))
