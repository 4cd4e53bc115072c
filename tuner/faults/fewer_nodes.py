"""Share of the time that trains if a job without a spare node goes on with one node less.

    S    spare nodes                        l    losses of a node per second in the full layout
    I    nodes that the layout of fewer     l'   the same in the layout of fewer nodes; idle nodes
         nodes leaves idle                       do not fail
    m    1 / repair                         k    nodes in repair

k is a birth-death chain: l up to k = S, where the layout is full; l' from S + 1 to S + 1 + I, where
it has fewer nodes and idle ones replace what is lost; from S + 2 + I the job waits, and nothing
fails. Every node in repair is repaired by itself, k m, so that the shares of time

    p_k = p_0 * l_0 ... l_(k-1) / (k! m^k)

depend on the mean of the repair time and not on its distribution (Sevastyanov 1957, whose loss
systems may have any arrival rates). With I = -1 it is the system of tuner/faults/reliability.py.

    F, D, W   shares of time with the full layout, fewer nodes, and waiting
    f, f'     shares of its running time that a layout trains
    x         step / step': speed with fewer nodes at the same global batch, as a share of full
    r         restart after a lost node in the full layout, R from shared storage, R' the same with
              fewer
    q         running seconds that a lost node costs, q_s where shared storage is restored
    u         share of running seconds without failures that trains
    T', b'    from one shared checkpoint to the next with fewer nodes, and until one is durable

    into it   a failure at k = S loses q_s and restarts in R' from shared storage, whatever copies
              hosts have: those belong to the ranks of the other layout
    back      once a node is repaired, at the next shared checkpoint after R', which is d seconds
              later on average over repairs; then b' and R in the full layout

The time of the chain begins with the failure, so that R' is part of D; f counts a restart r and a
loss q for every node that the full layout loses, so also for those whose restart is R' instead and
whose loss is q_s. Failures of processes, which may restart and lose otherwise, never end the full
layout. With s times per second from the full layout to fewer nodes,

    share = f (F - s d + s r - s (b' + R)) + f' x (D + s d - s R') - s u (q_s - q)

    s = l p_S / (1 + l d),  d = R' + T' (1 + exp(-n R') / (exp(n T') - 1)) - 1 / n,  n = (S + 1) m

Exact are the shares of time; the rest is right to first order in failures per d, R and b'.
tests/tuner/faults/test_fewer_nodes.py holds it against simulated runs.

Not covered: layouts of even fewer nodes, for which the job waits instead.
"""

import math
from dataclasses import dataclass

import numpy as np

from tuner.faults.recovery import LARGEST_EXPONENT
from tuner.faults.reliability import FailureModel, Jobs, loss_rate_per_s, read_s
from tuner.faults.run_shares import RunShares


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """Rates of node losses, and the time until a node is repaired."""

    per_s: float
    """Node losses per second under the full layout, l."""
    fewer_per_s: float
    """Node losses per second with fewer nodes, l'."""
    repair_s: float
    spare_nodes: int = 0
    idle_nodes: int = 0
    """Surviving nodes that the layout of fewer nodes does not use."""

    def __post_init__(self) -> None:
        if min(self.per_s, self.fewer_per_s, self.repair_s) < 0.0:
            raise ValueError(
                f"losses {self.per_s} and {self.fewer_per_s} a second, repair {self.repair_s} s:"
                " nothing is below zero"
            )
        if self.spare_nodes < 0 or self.idle_nodes < 0:
            raise ValueError(f"{self.spare_nodes} spare, {self.idle_nodes} idle nodes: below zero")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutShares:
    """A run in one layout, as if no node were ever missed; seconds, and shares of its time."""

    step_s: float
    training: float
    checkpoints: float
    """Stalls of checkpoints that were kept."""
    restarting: float
    node_restart_s: float
    """Seconds of a restart after the loss of a node, mean over the levels that are restored, r."""
    shared_restart_s: float
    """Seconds of a restart from shared storage, R."""
    node_lost_s: float
    """Running seconds that the loss of a node loses, mean over the levels, q."""
    shared_lost_s: float
    """Running seconds lost where shared storage is restored, q_s."""
    shared_interval_s: float
    """Seconds from one shared checkpoint to the next, T."""
    background_s: float
    """Seconds from the end of a shared checkpoint's stall until it is durable, b."""

    @property
    def useful(self) -> float:
        """Share of running seconds without failures that trains, u."""
        running = self.training + self.checkpoints
        return self.training / running if running > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the time by layout; they add up to one."""

    full: float
    last_spare: float
    """Part of the above with no spare node left."""
    fewer: float
    waiting: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedRun:
    """A run that goes on with fewer nodes; shares of the wall clock."""

    training: float
    """Share that advances training, in time of the full layout's speed."""
    slower: float
    """Share lost to the longer steps of fewer nodes; none where these are shorter."""
    checkpoints: float
    restarting: float
    """Planned restarts included."""
    waiting: float
    fewer: float
    """Share with fewer nodes, restarts into that layout included; overlaps the other parts."""
    switches_per_s: float
    """Switches per second from the full layout to fewer nodes; equal to those back."""


def layout_shares(
    shares: RunShares, jobs: Jobs, reliability: FailureModel, *, step_s: float
) -> LayoutShares:
    """Return what a layout makes of its running time.

    Args:
        shares: of its run; time that it waits for repairs is left out.
        jobs: of the layout.
        reliability: of the nodes.
        step_s: of the layout.
    """
    running = 1.0 - shares.waiting
    # Shared storage is the last level.
    lost_s = [loss.between_s / 2.0 + loss.background_s for loss in shares.losses]
    return LayoutShares(
        step_s=step_s,
        training=shares.training / running if running > 0.0 else 0.0,
        checkpoints=shares.checkpoints / running if running > 0.0 else 0.0,
        restarting=shares.restarting / running if running > 0.0 else 1.0,
        node_restart_s=shares.node_restart_s,
        shared_restart_s=reliability.restart_s + float(read_s(jobs, reliability.storage)),
        node_lost_s=sum(
            loss.node_share * one_s for loss, one_s in zip(shares.losses, lost_s, strict=True)
        ),
        shared_lost_s=lost_s[-1],
        shared_interval_s=shares.losses[-1].between_s,
        background_s=shares.background_s,
    )


def node_losses(
    full: Jobs, fewer: Jobs, reliability: FailureModel, *, idle_nodes: int = 0
) -> Losses:
    """Return the losses of two layouts; numbers, on nodes of one kind."""
    return Losses(
        per_s=float(loss_rate_per_s(full, reliability)),
        fewer_per_s=float(loss_rate_per_s(fewer, reliability)),
        repair_s=reliability.repair_s,
        spare_nodes=math.floor(float(full.spare_nodes)),
        idle_nodes=idle_nodes,
    )


def time_shares(losses: Losses) -> TimeShares:
    """Solve the chain of nodes in repair."""
    spare, last = losses.spare_nodes, losses.spare_nodes + 2 + losses.idle_nodes
    births = np.array([losses.per_s] * (spare + 1) + [losses.fewer_per_s] * (losses.idle_nodes + 1))
    with np.errstate(divide="ignore"):
        ratios = np.log(births * losses.repair_s) - np.log(np.arange(1, last + 1))
    logs = np.concatenate([[0.0], np.cumsum(ratios)])
    shares = np.exp(logs - logs.max())
    shares /= shares.sum()
    return TimeShares(
        full=float(shares[: spare + 1].sum()),
        last_spare=float(shares[spare]),
        fewer=float(shares[spare + 1 : last].sum()),
        waiting=float(shares[last]),
    )


def continued_run(losses: Losses, full: LayoutShares, fewer: LayoutShares) -> ContinuedRun:
    """Return the shares of a run that goes on with fewer nodes when no spare is left."""
    times = time_shares(losses)
    restart_s = fewer.shared_restart_s
    speed = full.step_s / fewer.step_s
    back_s = fewer.background_s + full.shared_restart_s
    late_s = _late_s(losses, fewer)
    switches = losses.per_s * times.last_spare / (1.0 + losses.per_s * late_s)
    whole_layout = times.full + switches * (full.node_restart_s - late_s - back_s)
    fewer_layout = times.fewer + switches * (late_s - restart_s)
    running, running_fewer = max(0.0, whole_layout), max(0.0, fewer_layout)
    lost = switches * full.useful * (full.shared_lost_s - full.node_lost_s)
    slow = fewer.training * running_fewer
    restarting = full.restarting * running + fewer.restarting * running_fewer
    restarting += switches * (restart_s + back_s - full.node_restart_s)
    return ContinuedRun(
        training=max(0.0, full.training * running + slow * speed - lost),
        slower=max(0.0, slow * (1.0 - speed)),
        checkpoints=full.checkpoints * running + fewer.checkpoints * running_fewer,
        restarting=max(0.0, restarting),
        waiting=times.waiting,
        fewer=min(1.0, times.fewer + switches * late_s),
        switches_per_s=switches,
    )


def _late_s(losses: Losses, fewer: LayoutShares) -> float:
    """Mean seconds from a repair to the next shared checkpoint, d; they follow the restart."""
    restart_s, interval_s = fewer.shared_restart_s, fewer.shared_interval_s
    if not losses.repair_s > 0.0:
        return restart_s + interval_s
    rate = (losses.spare_nodes + 1) / losses.repair_s
    exponent = min(rate * interval_s, LARGEST_EXPONENT)
    # x / (exp(x) - 1), which is 1 where checkpoints follow at once.
    ratio = exponent / math.expm1(exponent) if exponent else 1.0
    missed_s = ratio * math.exp(-rate * restart_s) / rate
    return restart_s + interval_s + missed_s - 1.0 / rate
