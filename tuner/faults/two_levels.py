"""Two checkpoint levels: the share of the time that advances training, by renewal.

    tau   work of a segment             a    tau + c_h: a segment that ends with a host checkpoint
    k     segments of a period          c    seconds that a checkpoint stops training
    b     seconds after its stall until a copy is durable: b_h <= tau, b_s before the next shared
          checkpoint begins
    l     failures per second           L    chance that a failure leaves no copy on a host, r its
                                             mean restart (recovery.py)

The last of the k segments ends with a shared checkpoint, the others with host checkpoints. Of a run
that just became durable on shared storage nothing older matters, and a failure that leaves no copy
on a host sends it there: a cycle lasts from one such failure to the next. From the restart to the
failure all moments at which a newer copy becomes durable are known, so that a failure happens
between two of them with chances of exp(-l t).

    R_j   just restarted from the copy of segment j;  R_0 from the shared one
    Q_j   running, the copy of segment j has just become durable on hosts
    B     running, a shared checkpoint's stall has just ended, its write has begun

C(s), the chance of getting from s to the next B without losing the copies on hosts, follows
backwards from the last segment:

    C(R_j) = e C(Q_j+1) / (e + (1 - e) L)                e = exp(-l (a + b_h))
    C(Q_j) = e' C(Q_j+1) + (1 - e') (1 - L) C(R_j)       e' = exp(-l a)

so that Q loses a constant factor a segment. From B, the write of the shared copy may overlap with
several host checkpoints; a failure in between leaves their copies, but ends the write, so that the
next B is one period later and the copy on shared storage is a period older: unboundedly many may be
lost in turn. With q the chance that a shared copy becomes durable before hosts lose theirs, a cycle
advances by C(R_0) q / (1 - C(B)) periods, and takes 1 / l + r for each of its failures. Of these
1 / L are expected, as each ends the cycle with chance L; failures whose newest copy is the shared
one, which restart otherwise, are counted apart.

All are sums and quotients of positive terms, so that no digits are lost where failures are rare.
With k = 1 this is the formula of tuner/faults/interval.py. tests/tuner/faults/test_two_levels.py
holds it against simulated runs.

Source: after the Markov model of Moody et al. (SC10), whose checkpoints are durable at once; with
windows for background writes, and failures during restarts, it is our own.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.faults.levels import FailureClass, FailureRates, Level, RunSeconds, SavePolicy
from tuner.faults.recovery import LARGEST_EXPONENT, Recovery, recovery

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int_]


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShares:
    """Shares of the time, without that spent waiting for repairs."""

    training: float
    """That advances training."""
    checkpoints: float
    """Stalls of checkpoints that were kept."""
    restarting: float
    host_restores: float
    """Share of restarts that continue from copies on hosts."""
    restart_s: float
    """Mean time from a failure to the first step."""

    @property
    def lost(self) -> float:
        """Work and stalls that have to be repeated."""
        return max(0.0, 1.0 - self.training - self.checkpoints - self.restarting)


NEVER = LevelShares(
    training=0.0, checkpoints=0.0, restarting=1.0, host_restores=0.0, restart_s=math.inf
)
"""Failures are so frequent that nothing is finished between them."""


def level_shares(policy: SavePolicy, seconds: RunSeconds, rates: FailureRates) -> LevelShares:
    """Return the shares of an unbounded run.

    Raises:
        ValueError: a copy is not durable before the next of its level is made, or nothing can take
            the copies on hosts.
    """
    shared = _recovery(policy, seconds, rates, newest=Level.SHARED)
    with np.errstate(under="ignore"):
        if policy.segments == 1:
            return _one_level(policy, seconds, rates, shared)
        return _two_levels(policy, seconds, rates, shared)


def unfinished(policy: SavePolicy, seconds: RunSeconds) -> Level | None:
    """Return the level whose write outlasts its interval, if any."""
    work_s = policy.segment_steps * seconds.step_s
    host_s = seconds.background_s(Level.HOST, asynchronous=policy.asynchronous)
    if policy.segments > 1 and host_s > work_s:
        return Level.HOST
    between_s = work_s * policy.segments
    if policy.segments > 1:
        stopped_s = seconds.stopped_s(Level.HOST, asynchronous=policy.asynchronous)
        between_s += (policy.segments - 1) * stopped_s
    shared_s = seconds.background_s(Level.SHARED, asynchronous=policy.asynchronous)
    return Level.SHARED if shared_s > between_s * (1.0 + 1e-12) else None


def _recovery(
    policy: SavePolicy, seconds: RunSeconds, rates: FailureRates, *, newest: Level
) -> Recovery:
    """Restarts after failures whose newest durable copy is of a level."""
    survives = {kind: policy.survives(kind) for kind in FailureClass}
    levels = {kind: newest if survives[kind] else Level.SHARED for kind in FailureClass}
    restart_s = {kind: seconds.restart_s[levels[kind], kind] for kind in FailureClass}
    return recovery(rates, restart_s, survives=survives)


def _one_level(
    policy: SavePolicy, seconds: RunSeconds, rates: FailureRates, shared: Recovery
) -> LevelShares:
    rate, work_s = rates.per_s, policy.segment_steps * seconds.step_s
    stopped_s = seconds.stopped_s(Level.SHARED, asynchronous=policy.asynchronous)
    background_s = seconds.background_s(Level.SHARED, asynchronous=policy.asynchronous)
    inside = rate * (work_s + stopped_s)
    if inside + rate * background_s > LARGEST_EXPONENT:
        return NEVER
    failures = math.expm1(inside) * math.exp(rate * background_s)
    wall_s = failures * (1.0 / rate + shared.mean_s)
    return LevelShares(
        training=work_s / wall_s,
        checkpoints=stopped_s / wall_s,
        restarting=failures * shared.mean_s / wall_s,
        host_restores=0.0,
        restart_s=shared.mean_s,
    )


def _two_levels(
    policy: SavePolicy, seconds: RunSeconds, rates: FailureRates, shared: Recovery
) -> LevelShares:
    host = _recovery(policy, seconds, rates, newest=Level.HOST)
    if not host.lost_ratio > 0.0:
        raise ValueError("no failure takes the copies on hosts; state how often nodes are lost")
    late = unfinished(policy, seconds)
    if late is not None:
        raise ValueError(f"the write of level {late} outlasts its interval")
    times = _Times.of(policy, seconds)
    cycle = _cycle(times, rates.per_s, host=host, shared=shared)
    if cycle is None:
        return NEVER
    stopped_s = (times.segments - 1) * times.host_stall_s + times.shared_stall_s
    failures = cycle.host_failures + cycle.shared_failures
    restarting_s = cycle.host_failures * host.mean_s + cycle.shared_failures * shared.mean_s
    wall_s = failures / rates.per_s + restarting_s
    return LevelShares(
        training=cycle.periods * times.segments * times.work_s / wall_s,
        checkpoints=cycle.periods * stopped_s / wall_s,
        restarting=restarting_s / wall_s,
        host_restores=cycle.host_failures * (1.0 - host.lost_ratio) / failures,
        restart_s=restarting_s / failures,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Of one period, in seconds."""

    segments: int
    work_s: float
    """Of a segment."""
    host_stall_s: float
    shared_stall_s: float
    host_background_s: float
    shared_background_s: float

    @classmethod
    def of(cls, policy: SavePolicy, seconds: RunSeconds) -> "_Times":
        is_async = policy.asynchronous
        return cls(
            segments=policy.segments,
            work_s=policy.segment_steps * seconds.step_s,
            host_stall_s=seconds.stopped_s(Level.HOST, asynchronous=is_async),
            shared_stall_s=seconds.stopped_s(Level.SHARED, asynchronous=is_async),
            host_background_s=seconds.background_s(Level.HOST, asynchronous=is_async),
            shared_background_s=seconds.background_s(Level.SHARED, asynchronous=is_async),
        )

    @property
    def host_segment_s(self) -> float:
        """Of a segment that ends with a host checkpoint, a."""
        return self.work_s + self.host_stall_s

    @property
    def shared_segment_s(self) -> float:
        return self.work_s + self.shared_stall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    """From one failure that leaves no copy on a host to the next, on average."""

    periods: float
    """That it advances."""
    host_failures: float
    """Whose newest durable copy is on hosts."""
    shared_failures: float
    """Whose newest durable copy is the shared one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chances:
    """Of getting somewhere, and of not; numbers, or one per segment. They add up to one."""

    reach: Floats | float
    miss: Floats | float

    def scaled(self, other: "_Chances") -> "_Chances":
        """Both in turn."""
        return _Chances(reach=self.reach * other.reach, miss=self.miss + self.reach * other.miss)


def _without_failure(rate: float, time_s: float) -> _Chances:
    return _Chances(reach=math.exp(-rate * time_s), miss=-math.expm1(-rate * time_s))


def _repeated(once: _Chances, lost_ratio: float) -> _Chances:
    """Until it is reached, or the copies are lost: failures that leave them begin it again."""
    fresh = once.reach + once.miss * lost_ratio
    return _Chances(reach=once.reach / fresh, miss=once.miss * lost_ratio / fresh)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Segments:
    """Chances of getting to the next B: C, and 1 - C without the difference."""

    num: int
    restarted_ahead: _Chances
    """From R_j to Q_j+1."""
    restarted_last: _Chances
    """From R_k-1."""
    running_last: _Chances
    """From Q_k-1."""
    log_factor: float
    """Of what Q loses a segment."""

    @classmethod
    def of(cls, times: _Times, rate: float, lost_ratio: float) -> "_Segments":
        host_s, shared_s, b_h = (
            times.host_segment_s,
            times.shared_segment_s,
            times.host_background_s,
        )
        ahead = _repeated(_without_failure(rate, host_s + b_h), lost_ratio)
        restarted_last = _repeated(_without_failure(rate, shared_s), lost_ratio)
        running = _without_failure(rate, shared_s - b_h)
        return cls(
            num=times.segments,
            restarted_ahead=ahead,
            restarted_last=restarted_last,
            running_last=_Chances(
                reach=running.reach + running.miss * (1.0 - lost_ratio) * restarted_last.reach,
                miss=running.miss * _loss(lost_ratio, restarted_last),
            ),
            log_factor=math.log1p(-_without_failure(rate, host_s).miss * _loss(lost_ratio, ahead)),
        )

    def running(self, segment_J: Ints) -> _Chances:
        """From Q_j, 1 <= j < k."""
        exponent_J = (self.num - 1 - segment_J) * self.log_factor
        until_last = _Chances(reach=np.exp(exponent_J), miss=-np.expm1(exponent_J))
        return until_last.scaled(self.running_last)

    def restarted(self, segment_J: Ints) -> _Chances:
        """From R_j, 1 <= j < k."""
        last = self.restarted_last
        other = self.restarted_ahead.scaled(self.running(np.minimum(segment_J + 1, self.num - 1)))
        is_last_J = segment_J == self.num - 1
        return _Chances(
            reach=np.where(is_last_J, last.reach, other.reach),
            miss=np.where(is_last_J, last.miss, other.miss),
        )


def _loss(lost_ratio: float, onward: _Chances) -> Floats | float:
    """Chance that a failure leaves no copy on a host, or a later one before the next B."""
    return lost_ratio + (1.0 - lost_ratio) * onward.miss


def _cycle(times: _Times, rate: float, *, host: Recovery, shared: Recovery) -> _Cycle | None:
    """Solve a cycle; None where it advances by less than the smallest number."""
    lost_h, lost_s = host.lost_ratio, shared.lost_ratio
    segments = _Segments.of(times, rate, lost_h)
    first = _number(segments.running(np.array([1])))
    start = _without_failure(rate, times.host_segment_s + times.host_background_s)
    fresh = start.reach + start.miss * lost_s
    from_R0 = _repeated(start, lost_s).scaled(first)

    # From B on: host copies of the next period become durable, the shared one among them.
    b_s = times.shared_background_s
    durable_J = np.arange(1, times.segments) * times.host_segment_s + times.host_background_s
    overlapped = int(np.count_nonzero(durable_J <= b_s))
    before = _without_failure(rate, float(durable_J[0]) if overlapped else b_s)
    begin_J = durable_J[:overlapped]
    end_J = np.append(begin_J[1:], b_s)[:overlapped]
    fail_J = np.exp(-rate * begin_J) * -np.expm1(-rate * (end_J - begin_J))
    pending_J = segments.restarted(np.arange(1, overlapped + 1))
    miss_before = before.miss * _loss(lost_h, segments.restarted_last)
    missed = miss_before + float(np.sum(fail_J * _loss(lost_h, pending_J)))
    durable = math.exp(-rate * b_s)

    # From the moment that the shared copy is durable to the next host copy, or the next B.
    if overlapped < times.segments - 1:
        next_s = float(durable_J[overlapped])
        onward = _number(segments.running(np.array([overlapped + 1])))
    else:
        next_s = (times.segments - 1) * times.host_segment_s + times.shared_segment_s
        onward = _Chances(reach=1.0, miss=0.0)
    failed = durable * -math.expm1(-rate * (next_s - b_s))
    loss = np.ravel(_loss(lost_h, pending_J) if overlapped else _loss(lost_s, from_R0))[-1]
    missed_after = failed * float(loss)
    missed_B = missed + missed_after + math.exp(-rate * next_s) * onward.miss
    advance = before.reach + miss_before
    reached = from_R0.reach * durable / (durable + missed)
    if not (reached > 0.0 and missed_B > 0.0):
        return None
    at_R0 = start.miss / fresh
    at_B = 0.0 if overlapped else failed * (1.0 + (1.0 - lost_s) * at_R0) / missed_B
    shared_failures = float(at_R0 + from_R0.reach * at_B)
    return _Cycle(
        periods=float(reached * advance / missed_B),
        host_failures=(1.0 - lost_s * shared_failures) / lost_h,
        shared_failures=shared_failures,
    )


def _number(one: _Chances) -> _Chances:
    """Return the chances of a single segment."""
    return _Chances(reach=float(np.ravel(one.reach)[0]), miss=float(np.ravel(one.miss)[0]))
