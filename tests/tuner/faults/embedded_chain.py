"""The chain of restarts, solved as a linear system: an oracle of the model with two levels.

State j of k: training goes on from the copy of segment j of a period, 0 being the shared one. From
there all moments at which a copy becomes durable are listed, until a failure is certain to the last
digit. A failure leads to the newest copy of them, or, where it leaves none on a host, to the newest
shared one; that may be any number of periods old, so the mean age of a state's shared copy is a
second unknown.
"""

import math
from dataclasses import dataclass

import numpy as np

from tests.tuner.faults.level_table import Case
from tuner.faults.levels import FailureClass, Level
from tuner.faults.recovery import Recovery, recovery

CERTAIN = 1e-18


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A failure from here on, until the next moment."""

    at_s: float
    newest: int
    """Segments since the start of the period of the restart; of whichever level."""
    shared: int | None
    """Periods since then of the newest shared copy; None: it is older."""


def training_share(case: Case) -> float:
    """Return the share of the time that advances training."""
    policy, rates = case.policy, case.rates
    k, rate = policy.segments, rates.per_s
    chances, ages, advances, times = np.zeros((k, k)), np.zeros((k, k)), np.zeros(k), np.zeros(k)
    kept_ages = np.zeros((k, k))
    lost_with_age = np.zeros(k)
    for state in range(k):
        moments = timeline(case, state)
        ends = [*(one.at_s for one in moments[1:]), math.inf]
        for one, end_s in zip(moments, ends, strict=True):
            chance = math.exp(-rate * one.at_s) - math.exp(-rate * end_s)
            is_shared = one.newest == (0 if one.shared is None else one.shared * k)
            after = restart(case, Level.SHARED if is_shared else Level.HOST)
            times[state] += chance * after.mean_s
            kept, lost = chance * (1.0 - after.lost_ratio), chance * after.lost_ratio
            # The newest copy is left.
            period, to = divmod(one.newest, k)
            chances[state, to] += kept
            advances[state] += kept * (one.newest - state)
            if one.shared is None:
                kept_ages[state, to] += kept
                ages[state, to] += kept * period
            else:
                ages[state, to] += kept * (period - one.shared)
            # Or only the newest shared one.
            chances[state, 0] += lost
            if one.shared is None:
                advances[state] -= lost * state
                lost_with_age[state] += lost
            else:
                advances[state] += lost * (one.shared * k - state)
        times[state] += 1.0 / rate
    # The shared copy of state 0 is the one that it restarted from.
    kept_ages[:, 0] = ages[:, 0] = 0.0
    stationary = np.linalg.lstsq(
        np.vstack([chances.T - np.eye(k), np.ones(k)]), np.append(np.zeros(k), 1.0), rcond=None
    )[0]
    # The mean age in a state, times its probability.
    age = np.linalg.solve(np.eye(k) - kept_ages.T, stationary @ ages)
    advance = stationary @ advances - k * (age @ lost_with_age)
    return float(advance * policy.segment_steps * case.seconds.step_s / (stationary @ times))


def timeline(case: Case, state: int) -> list[Moment]:
    """List when copies become durable after a restart from a state, newer ones only."""
    policy, seconds = case.policy, case.seconds
    is_async, k = policy.asynchronous, policy.segments
    events: list[tuple[float, int, bool]] = []
    clock_s, written_s, segment = 0.0, 0.0, state
    while math.exp(-case.rates.per_s * clock_s) > CERTAIN:
        segment += 1
        level = Level.HOST if segment % k else Level.SHARED
        clock_s += policy.segment_steps * seconds.step_s
        clock_s += seconds.stopped_s(level, asynchronous=is_async)
        # One writer: after all that was made before.
        written_s = max(clock_s, written_s) + seconds.background_s(level, asynchronous=is_async)
        events.append((written_s, segment, level is Level.SHARED))
    moments = [Moment(at_s=0.0, newest=state, shared=None)]
    for at_s, segment, is_shared in sorted(events):
        before = moments[-1]
        shared = segment // k if is_shared else before.shared
        moments.append(Moment(at_s=at_s, newest=max(before.newest, segment), shared=shared))
    return moments


def restart(case: Case, newest: Level) -> Recovery:
    """Return what follows a failure whose newest copy is of a level."""
    survives = {kind: case.policy.survives(kind) for kind in FailureClass}
    return recovery(
        case.rates,
        {
            kind: case.seconds.restart_s[newest if survives[kind] else Level.SHARED, kind]
            for kind in FailureClass
        },
        survives=survives,
    )
