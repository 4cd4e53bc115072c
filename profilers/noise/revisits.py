"""Which measured sizes deserve another session: those that other load may have made slow.

What disturbs a measurement on a machine with other guests lasts for milliseconds to seconds, longer
than a session, and makes it slow, never fast: Chen and Revels, Robust benchmarking in noisy
environments, 2016. So a size that took longer than the other sizes predict is measured again after
a while; profilers/noise/selection.py says which of its sessions count. Within a session the mean of
the repeats counts, including calls that are slow by nature.

How much time that deserves is learned from the gain of each further session: ln of the time that
counted before over the time that it took itself, or 0 if it took longer. The squared ratio of the
mean gain to the mean error says how much of that error is disturbance, which other sizes would not
reduce. On a quiet machine little is measured again. Where gains are large, a size measured in one
session only is doubted by the mean gain: sizes measured in the same bad minute predict each other
well.

What a sentinel saw (profilers/noise/sentinel.py) is taken out before; this is for the rest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from profilers.records import Case

MIN_DOUBT = 0.02
"""A size whose time is doubted by less is not measured again."""
GAIN_WEIGHT = 4.0
"""Time for further sessions, in typical sessions for each new size, by the square of the mean gain
over the error: of independent normal disturbances only, gain over error is about a half..."""
LEAST_SHARE, MOST_SHARE = 0.25, 4.0
"""...but no less and no more than this."""
FIRST_GAIN_RATIO = 0.25
"""Of the error: the gain that is expected before there was any further session."""
MAX_SESSIONS = 4
REPORTED_RATIO = 0.05
"""Smaller gains are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Doubt:
    """A case whose time may be too long."""

    case: Case
    by: float
    """ln of the time over what it may be."""
    cost_s: float
    """Of another session."""


@dataclass(slots=True, kw_only=True)
class Revisits:
    """The choice of cases, as listed, of one table to measure again."""

    gains: Mapping[str, float] = field(default_factory=dict)
    """Ids of cases that were measured again, with the gain of the last session
    (profilers/noise/selection.py); grows and changes."""
    _sessions: dict[str, int] = field(init=False, default_factory=dict)
    """Ids of the cases that were measured again, with the number of their sessions."""
    _chosen: set[str] = field(init=False, default_factory=set)
    """Ids of the cases chosen last, whose sessions may not be over."""
    _gains: list[float] = field(init=False, default_factory=list)
    """Of all sessions that were chosen."""

    def choose(
        self,
        excess: Sequence[tuple[Case, float]],
        *,
        always: Sequence[Case],
        cost_s: Callable[[Case], float],
        num_new: int,
        error_ratio: float,
    ) -> list[Case]:
        """Choose for the next batch.

        Args:
            excess: cases, and ln of their time over the one that the others predict.
            always: cases to measure again whatever they took.
            cost_s: seconds of a session of a case.
            num_new: sizes that the batch measures for the first time.
            error_ratio: mean error of the times that the others predict.
        """
        self._gains += [self.gains[name] for name in sorted(self._chosen & self.gains.keys())]
        gain = FIRST_GAIN_RATIO * error_ratio
        if self._gains:
            gain = max(0.0, float(np.mean(self._gains)))
        share = GAIN_WEIGHT * (gain / max(error_ratio, 1e-3)) ** 2
        costs_s = {case.id: cost_s(case) for case, _ in excess}
        doubts: list[_Doubt] = []
        for case, by in excess:
            sessions = self._sessions.get(case.id, 1)
            if sessions >= MAX_SESSIONS:
                continue
            doubt = max(by, 0.0) + (gain if sessions == 1 else 0.0)
            if doubt > MIN_DOUBT:
                doubts.append(_Doubt(case=case, by=doubt, cost_s=costs_s[case.id]))
        typical_s = float(np.median(list(costs_s.values()))) if costs_s else 0.0
        limit_s = min(MOST_SHARE, max(LEAST_SHARE, share)) * num_new * typical_s
        chosen = [*always, *_most_valuable(doubts, limit_s=limit_s)]
        for case in chosen:
            self._sessions[case.id] = self._sessions.get(case.id, 1) + 1
        self._chosen = {case.id for case in chosen}
        return chosen

    def summary(self) -> str:
        """What further sessions gained, if something disturbs the machine; otherwise empty.

        Those of the last batch, which may not be over, are left out.
        """
        count = len(self._gains)
        faster = 1.0 - math.exp(-float(np.mean(self._gains))) if count else 0.0
        if faster < REPORTED_RATIO:
            return ""
        return (
            f"the machine is disturbed: {count} sizes measured again were {100.0 * faster:.0f} %"
            " faster"
        )


def _most_valuable(doubts: Sequence[_Doubt], *, limit_s: float) -> list[Case]:
    """Cases with the largest doubt per second, until the time is spent."""
    chosen = []
    for doubt in sorted(doubts, key=lambda one: (-one.by / one.cost_s, one.case.id)):
        if limit_s <= 0.0:
            break
        limit_s -= doubt.cost_s
        chosen.append(doubt.case)
    return chosen
