"""Two checkpoint levels: the share of the time that advances training, by renewal.

    tau   work of a segment             a    tau + c_h: a segment that ends with a host checkpoint
    k     segments of a period          c    seconds that a checkpoint stops training
    b     seconds that a copy is written in the background after its stall, one after the other
          (levels.py): b_h <= tau, and b_s + (k - 1) b_h before the next shared checkpoint begins
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

so that Q loses a constant factor a segment. From B, the shared copy is durable after b_s, and those
of hosts that were made meanwhile after it, one by one, until the writer has caught up:

    D_j = max(b_s + j b_h, j a + b_h)                    from B until the copy of segment j is

Before b_s a failure goes back to the last segment before B, which is then made once more, and its
write begins again; from b_s to D_1 to the shared copy; from D_j to the copy of segment j. Once D_j
is j a + b_h, the rest is C(Q_j). A cycle comes to B with chance C(R_0), is there 1 / (1 - C(B))
times on average, and advances by a period each time that b_s passes without a failure. It takes
1 / l + r for each of its failures. Of these 1 / L are expected, as each ends the cycle with chance
L; failures whose newest copy is the shared one, which restart otherwise, are counted apart.

All are sums and quotients of positive terms, so that no digits are lost where failures are rare.
With k = 1 this is the formula of tuner/faults/interval.py. tests/tuner/faults/test_two_levels.py
holds it against simulated runs.

Source: after the Markov model of Moody et al. (SC10), whose checkpoints are durable at once; with
background writes of one writer, and failures during restarts, it is our own.

Not covered: a writer that training waits for before it copies anything: where b_s >
tau, up to b_s - tau of a period are stalls.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

from tuner.faults.levels import FailureClass, FailureRates, Level, RunSeconds, SavePolicy
from tuner.faults.recovery import LARGEST_EXPONENT, Recovery, recovery

LARGEST_BELOW_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShares:
    """Shares of the time, without that spent waiting for repairs."""

    training: float
    """Share that advances training."""
    checkpoints: float
    """Stalls of checkpoints that were kept."""
    restarting: float
    host_restores: float
    """Share of restarts that continue from copies on hosts."""
    restart_s: float
    """Mean time from a failure to the first step."""
    node_host_restores: float
    """Share of restarts after failures that take a node that continue from copies on hosts; the
    next field is the mean restart after them."""
    node_restart_s: float

    @property
    def lost(self) -> float:
        """Work and stalls that have to be repeated."""
        return max(0.0, 1.0 - self.training - self.checkpoints - self.restarting)


NEVER = LevelShares(
    training=0.0,
    checkpoints=0.0,
    restarting=1.0,
    host_restores=0.0,
    restart_s=math.inf,
    node_host_restores=0.0,
    node_restart_s=math.inf,
)
"""Failures are so frequent that nothing is finished between them."""


def level_shares(policy: SavePolicy, seconds: RunSeconds, rates: FailureRates) -> LevelShares:
    """Return the shares of an unbounded run.

    Raises:
        ValueError: a copy is not durable before the next of its level is made, or nothing can take
            the copies on hosts.
    """
    shared = _recovery(policy, seconds, rates, newest=Level.SHARED)
    if policy.segments == 1:
        return _one_level(policy, seconds, rates, shared)
    return _two_levels(policy, seconds, rates, shared)


def unfinished(policy: SavePolicy, seconds: RunSeconds) -> Level | None:
    """Return the level whose interval is too short for its writes, if any.

    From one shared checkpoint to the next those of both levels are written.
    """
    is_async, others = policy.asynchronous, policy.segments - 1
    work_s = policy.segment_steps * seconds.step_s
    host_s = seconds.background_s(Level.HOST, asynchronous=is_async)
    if others and host_s > work_s:
        return Level.HOST
    between_s = work_s * policy.segments
    written_s = seconds.background_s(Level.SHARED, asynchronous=is_async)
    if others:
        between_s += others * seconds.stopped_s(Level.HOST, asynchronous=is_async)
        written_s += others * host_s
    return Level.SHARED if written_s > between_s * (1.0 + 1e-12) else None


def queued_copies(policy: SavePolicy, seconds: RunSeconds) -> int:
    """Most copies on hosts that are made and not durable, one at least.

    They queue behind a write to shared storage. Their number right after copy j is made,
    j - (j a - b_s) / b_h rounded up, grows by one a segment until b_s and falls from then on. The
    next copy, while it is made, has the room of a file: none is written to hosts meanwhile.
    """
    times = _Times.of(policy, seconds)
    copies = 1
    before = math.ceil(times.shared_background_s / times.host_segment_s) - 1
    for made in (before, before + 1):
        made = min(made, times.segments - 1)
        since_s = made * times.host_segment_s - times.shared_background_s
        if since_s < 0.0:
            copies = max(copies, made)
        elif since_s < made * times.host_background_s:
            copies = max(copies, made - math.floor(since_s / times.host_background_s))
    return copies


def host_lost_s(policy: SavePolicy, seconds: RunSeconds) -> float:
    """Mean running seconds that a restart from copies on hosts repeats, where failures are rare.

    Args:
        policy: of two levels, whose writes end within their intervals.
        seconds: of its run.
    """
    times = _Times.of(policy, seconds)
    durable_s = [times.durable_s(segment) for segment in range(1, times.segments)]
    # The next shared one is durable.
    durable_s.append(times.period_s + times.shared_background_s)
    lost = sum(
        (end_s - begin_s) * ((begin_s + end_s) / 2.0 - segment * times.host_segment_s)
        for segment, (begin_s, end_s) in enumerate(pairwise(durable_s), start=1)
    )
    return lost / (durable_s[-1] - durable_s[0])


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
    if math.isinf(wall_s):
        return NEVER
    return LevelShares(
        training=work_s / wall_s,
        checkpoints=stopped_s / wall_s,
        restarting=failures * shared.mean_s / wall_s,
        host_restores=0.0,
        restart_s=shared.mean_s,
        node_host_restores=0.0,
        node_restart_s=shared.node_mean_s,
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
    if math.isinf(wall_s):
        return NEVER
    from_host = cycle.host_failures / failures
    from_shared = cycle.shared_failures / failures
    return LevelShares(
        training=cycle.periods * times.segments * times.work_s / wall_s,
        checkpoints=cycle.periods * stopped_s / wall_s,
        restarting=restarting_s / wall_s,
        host_restores=from_host * (1.0 - host.lost_ratio),
        restart_s=restarting_s / failures,
        node_host_restores=from_host * (1.0 - host.node_lost_ratio),
        node_restart_s=from_host * host.node_mean_s + from_shared * shared.node_mean_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Durations of one period, in seconds."""

    segments: int
    work_s: float
    """Seconds of training in one segment."""
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
        """Return the seconds of a segment that ends with a host checkpoint, a."""
        return self.work_s + self.host_stall_s

    @property
    def shared_segment_s(self) -> float:
        return self.work_s + self.shared_stall_s

    @property
    def period_s(self) -> float:
        """Return the seconds from the end of one shared checkpoint's stall to that of the next."""
        return (self.segments - 1) * self.host_segment_s + self.shared_segment_s

    def has_caught_up(self, segment: int) -> bool:
        """Return whether the copy of a segment is written without waiting for those before it."""
        waiting_s = self.shared_background_s + (segment - 1) * self.host_background_s
        return waiting_s <= segment * self.host_segment_s

    def durable_s(self, segment: int) -> float:
        """D_j of a segment; for the last one, which ends with the next shared one, the period."""
        if segment == self.segments:
            return self.period_s
        if self.has_caught_up(segment):
            return segment * self.host_segment_s + self.host_background_s
        return self.shared_background_s + segment * self.host_background_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cycle:
    """Average cycle: from one failure that leaves no copy on a host to the next."""

    periods: float
    """Mean periods by which one cycle advances training."""
    host_failures: float
    """Mean failures of a cycle whose newest durable copy is on hosts."""
    shared_failures: float
    """Mean failures of a cycle whose newest durable copy is the shared one."""


@dataclass(frozen=True, slots=True)
class _Chances:
    """Chances of reaching and of missing a state; they add up to one."""

    reach: float
    miss: float

    def then(self, following: "_Chances") -> "_Chances":
        """Return the chances of reaching both in turn."""
        return _Chances(self.reach * following.reach, self.miss + self.reach * following.miss)

    def loss(self, lost_ratio: float) -> float:
        """Chance that a failure leaves no copy on a host, or a later one before this is reached."""
        return lost_ratio + (1.0 - lost_ratio) * self.miss


def _without_failure(rate: float, time_s: float) -> _Chances:
    return _Chances(math.exp(-rate * time_s), -math.expm1(-rate * time_s))


def _repeated(once: _Chances, lost_ratio: float) -> _Chances:
    """Return the chances of reaching it by retries, which end once the copies on hosts are lost."""
    fresh = once.reach + once.miss * lost_ratio
    return _Chances(once.reach / fresh, once.miss * lost_ratio / fresh)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Segments:
    """Chances of getting to the next B: C, and 1 - C without the difference."""

    num: int
    restarted_ahead: _Chances
    """Chances from R_j to Q_j+1."""
    restarted_last: _Chances
    """Chances from R_k-1."""
    running_last: _Chances
    """Chances from Q_k-1."""
    log_factor: float
    """Logarithm of C(Q_j) / C(Q_j+1), which is equal for all segments before the last."""

    @classmethod
    def of(cls, times: _Times, rate: float, lost_ratio: float) -> "_Segments":
        host_s, shared_s = times.host_segment_s, times.shared_segment_s
        ahead = _repeated(_without_failure(rate, host_s + times.host_background_s), lost_ratio)
        last = _repeated(_without_failure(rate, shared_s), lost_ratio)
        running = _without_failure(rate, shared_s - times.host_background_s)
        lost_a_segment = _without_failure(rate, host_s).miss * ahead.loss(lost_ratio)
        return cls(
            num=times.segments,
            restarted_ahead=ahead,
            restarted_last=last,
            running_last=_Chances(
                running.reach + running.miss * (1.0 - lost_ratio) * last.reach,
                running.miss * last.loss(lost_ratio),
            ),
            log_factor=math.log1p(-min(lost_a_segment, LARGEST_BELOW_ONE)),
        )

    def running(self, segment: int) -> _Chances:
        """Return the chances from Q_j, 1 <= j < k; j = k is the next B itself."""
        if segment == self.num:
            return _Chances(1.0, 0.0)
        exponent = (self.num - 1 - segment) * self.log_factor
        return _Chances(math.exp(exponent), -math.expm1(exponent)).then(self.running_last)

    def restarted(self, segment: int) -> _Chances:
        """Return the chances from R_j, 1 <= j < k."""
        if segment == self.num - 1:
            return self.restarted_last
        return self.restarted_ahead.then(self.running(segment + 1))


def _cycle(times: _Times, rate: float, *, host: Recovery, shared: Recovery) -> _Cycle | None:
    """Solve a cycle; None where it advances by less than the smallest number."""
    lost_h, lost_s = host.lost_ratio, shared.lost_ratio
    segments = _Segments.of(times, rate, lost_h)
    start = _without_failure(rate, times.host_segment_s + times.host_background_s)
    from_R0 = _repeated(start, lost_s).then(segments.running(1))
    at_R0 = start.miss / (start.reach + start.miss * lost_s)

    # From B on: first the shared copy becomes durable, then those of hosts made meanwhile.
    durable = _without_failure(rate, times.shared_background_s)
    missed_from_B = durable.miss * segments.restarted_last.loss(lost_h)
    from_shared = 0.0
    begin_s, newest = times.shared_background_s, 0
    while newest < times.segments and not (newest and times.has_caught_up(newest)):
        end_s = times.durable_s(newest + 1)
        fails = math.exp(-rate * begin_s) * -math.expm1(-rate * (end_s - begin_s))
        if newest:
            missed_from_B += fails * segments.restarted(newest).loss(lost_h)
        else:
            from_shared = fails * (1.0 + (1.0 - lost_s) * at_R0)
            missed_from_B += fails * from_R0.loss(lost_s)
        begin_s, newest = end_s, newest + 1
    missed_from_B += math.exp(-rate * begin_s) * segments.running(newest).miss
    advance = from_R0.reach * durable.reach
    if not (advance > 0.0 and missed_from_B > 0.0):
        return None
    shared_failures = at_R0 + from_R0.reach * from_shared / missed_from_B
    return _Cycle(
        periods=advance / missed_from_B,
        host_failures=(1.0 - lost_s * shared_failures) / lost_h,
        shared_failures=shared_failures,
    )
