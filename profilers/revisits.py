"""Which measured sizes are worth another visit: those that their neighbours may have made slow.

What disturbs a measurement on a machine with other guests lasts for milliseconds to seconds, longer
than a visit to a size, and makes it slow, never fast: Chen and Revels, Robust benchmarking in noisy
environments, 2016. So a size that took longer than the others foretell is visited again after a
while; what counts of its visits then: profilers/visits.py. Within a visit the mean of the repeats
counts as ever, with what makes single calls slow by nature.

How much time that deserves is learned: another visit brings its gain, ln of what counted before
over what it took itself, and nothing where it took longer. The mean gain squared over that of the
mean error says how much of that error is disturbance, which other sizes would not bring down. On a
quiet machine little is visited again. Where gains are large, what was visited once is doubted by
the mean gain, for sizes that were all measured in the same bad minute foretell each other well.

What a sentinel saw (profilers/sentinel.py) is taken out before; this is for the rest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from profilers.records import Case

DOUBT_RATIO = 0.02
"""What is doubted by less is not visited again."""
GAIN_WEIGHT = 4.0
"""Time for visits again, in usual visits for each new size, by the square of the mean gain over the
error: of independent normal disturbances alone, gain over error is about a half..."""
LEAST_AGAIN, MOST_AGAIN = 0.25, 4.0
"""...but no fewer and no more than this."""
FIRST_GAIN_RATIO = 0.25
"""Of the error: what is expected of visits before there was any."""
MAX_VISITS = 4
TOLD_RATIO = 0.05
"""Gains of less are no news."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """A case whose time may be too long."""

    case: Case
    by: float
    """ln of the time over what it may be."""
    cost_s: float
    """Of another visit."""


@dataclass(slots=True, kw_only=True)
class Revisits:
    """Choices of cases, as listed, to visit again in one table."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """Ids of cases that were visited again to what the last visit brought (profilers/visits.py);
    grows and changes."""
    _visits: dict[str, int] = field(init=False, default_factory=dict)
    """Ids of the cases that were visited again, to how often they were visited."""
    _chosen: set[str] = field(init=False, default_factory=set)
    """Ids of the cases chosen last, whose visits are not over yet."""
    _gains: list[float] = field(init=False, default_factory=list)
    """Of all visits that were chosen."""

    def chosen(
        self,
        late: Sequence[tuple[Case, float]],
        *,
        always: Sequence[Case],
        cost_s: Callable[[Case], float],
        num_new: int,
        error_ratio: float,
    ) -> list[Case]:
        """Choose for the next batch.

        Args:
            late: cases, and ln of what they took over what the others foretell.
            always: cases to visit again whatever they took.
            cost_s: seconds of a visit to a case.
            num_new: sizes that the batch visits for the first time.
            error_ratio: mean error of what the others foretell.
        """
        self._gains += [self.gains[name] for name in sorted(self._chosen & self.gains.keys())]
        gain = FIRST_GAIN_RATIO * error_ratio
        if self._gains:
            gain = max(0.0, float(np.mean(self._gains)))
        share = GAIN_WEIGHT * (gain / max(error_ratio, 1e-3)) ** 2
        costs_s = {case.id: cost_s(case) for case, _ in late}
        doubts: list[_Doubt] = []
        for case, by in late:
            visits = self._visits.get(case.id, 1)
            if visits >= MAX_VISITS:
                continue
            doubt = max(by, 0.0) + (gain if visits == 1 else 0.0)
            if doubt > DOUBT_RATIO:
                doubts.append(_Doubt(case=case, by=doubt, cost_s=costs_s[case.id]))
        usual_s = float(np.median(list(costs_s.values()))) if costs_s else 0.0
        most_s = min(MOST_AGAIN, max(LEAST_AGAIN, share)) * num_new * usual_s
        again = [*always, *_worth(doubts, most_s=most_s)]
        for case in again:
            self._visits[case.id] = self._visits.get(case.id, 1) + 1
        self._chosen = {case.id for case in again}
        return again

    def told(self) -> str:
        """Say what the visits brought and left, where something disturbs the machine.

        Those of the last batch, which may not be over, are left out.
        """
        count = len(self._gains)
        faster = 1.0 - math.exp(-float(np.mean(self._gains))) if count else 0.0
        if faster < TOLD_RATIO:
            return ""
        return f"the machine is disturbed: {count} sizes visited again were {faster:.0%} faster"


def _worth(doubts: Sequence[_Doubt], *, most_s: float) -> list[Case]:
    """Those that bring most for their time, until it is spent."""
    chosen = []
    for doubt in sorted(doubts, key=lambda one: (-one.by / one.cost_s, one.case.id)):
        if most_s <= 0.0:
            break
        most_s -= doubt.cost_s
        chosen.append(doubt.case)
    return chosen
