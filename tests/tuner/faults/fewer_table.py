"""Runs that go on with fewer nodes, on which the formula and the simulation are compared.

An hour between shared checkpoints, a loss of a node a day and repairs of half a day, more or less.
"""

from dataclasses import dataclass

from tests.tuner.faults.level_table import Case, case, seconds
from tests.tuner.faults.simulation import FewerNodesLayout, Layout, Run
from tuner.faults.fewer_nodes import LayoutShares, Losses
from tuner.faults.levels import FailureClass, Level, RunSeconds
from tuner.faults.two_levels import host_lost_s, level_shares

HOUR = 3600.0
STEP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run."""

    full: Case
    fewer: Case
    repair_s: float
    spare_nodes: int = 0
    idle_nodes: int = 0
    is_repair_drawn: bool = False
    """Repairs are exponential, not all of the same length."""

    @property
    def losses(self) -> Losses:
        """Of nodes, in both layouts."""
        return Losses(
            per_s=_losses_per_s(self.full),
            fewer_per_s=_losses_per_s(self.fewer),
            repair_s=self.repair_s,
            spare_nodes=self.spare_nodes,
            idle_nodes=self.idle_nodes,
        )

    def run(self, steps: int, *, fewer: FewerNodesLayout | None) -> Run:
        """Simulated."""
        return Run(
            steps=steps,
            seconds=self.full.seconds,
            repair_s=self.repair_s,
            spare_nodes=self.spare_nodes,
            fewer=fewer,
        )

    def fewer_nodes(self, **more: object) -> FewerNodesLayout:
        """Its layout of fewer nodes."""
        return FewerNodesLayout(
            layout=Layout(policy=self.fewer.policy, seconds=self.fewer.seconds),
            idle_nodes=self.idle_nodes,
            return_s=self.full.seconds.restart_s[Level.SHARED, FailureClass.NODE],
            **more,  # type: ignore[arg-type] # Failures alone.
        )


def _losses_per_s(one: Case) -> float:
    return one.rates.node_per_s + one.rates.together_per_s


def shares_of(one: Case) -> LayoutShares:
    """Return what a layout makes of its running time."""
    policy, times = one.policy, one.seconds
    is_async = policy.asynchronous
    shares = level_shares(policy, times, one.rates)
    work_s = policy.segment_steps * times.step_s
    stall_s = {level: times.stopped_s(level, asynchronous=is_async) for level in Level}
    behind_s = {level: times.background_s(level, asynchronous=is_async) for level in Level}
    period_s = policy.segments * work_s + stall_s[Level.SHARED]
    period_s += (policy.segments - 1) * stall_s[Level.HOST]
    lost_s = host_lost_s(policy, times) if policy.segments > 1 else 0.0
    shared_lost_s = period_s / 2.0 + behind_s[Level.SHARED]
    from_host = shares.node_host_restores
    return LayoutShares(
        step_s=times.step_s,
        training=shares.training,
        checkpoints=shares.checkpoints,
        restarting=shares.restarting,
        node_restart_s=shares.node_restart_s,
        shared_restart_s=times.restart_s[Level.SHARED, FailureClass.NODE],
        node_lost_s=from_host * lost_s + (1.0 - from_host) * shared_lost_s,
        shared_lost_s=shared_lost_s,
        shared_interval_s=period_s,
        background_s=behind_s[Level.SHARED],
    )


def _times(
    step_s: float, *, write_s: float, restart_s: float, process_restart_s: float
) -> RunSeconds:
    return seconds(
        step_s=step_s,
        stall_s=(1.0, 5.0),
        durable_after_s=(2.0, write_s),
        host_restart_s=(process_restart_s, restart_s),
        shared_restart_s=(process_restart_s, restart_s, restart_s),
    )


def row(
    speed: float,
    *,
    loss_s: float = 24 * HOUR,
    repair_s: float = 12 * HOUR,
    fewer_nodes: float = 7 / 8,
    process_s: float = 0.0,
    host: int | None = None,
    replicas: int = 1,
    asynchronous: bool = False,
    spare_nodes: int = 0,
    idle_nodes: int = 0,
    is_repair_drawn: bool = False,
    write_s: float = 60.0,
    restart_s: float = 900.0,
    process_restart_s: float | None = None,
) -> Row:
    """Make a row; `speed` of fewer nodes and their number as shares of all, means in seconds."""
    shorter_s = restart_s if process_restart_s is None else process_restart_s

    def layout(step_s: float, often: float) -> Case:
        rates = (process_s / often, loss_s / often / 0.9, loss_s / often / 0.1)
        times = _times(step_s, write_s=write_s, restart_s=restart_s, process_restart_s=shorter_s)
        others = 0 if host is None else replicas
        return case(host, 360, times, rates, replicas=others, asynchronous=asynchronous)

    return Row(
        full=layout(STEP_S, 1.0),
        fewer=layout(STEP_S / speed, fewer_nodes),
        repair_s=repair_s,
        spare_nodes=spare_nodes,
        idle_nodes=idle_nodes,
        is_repair_drawn=is_repair_drawn,
    )


TABLE = {
    "no spare": row(0.85),
    "no spare, in the background": row(0.85, asynchronous=True),
    "one spare": row(0.85, spare_nodes=1, is_repair_drawn=True),
    "two spares, often": row(0.8, loss_s=8 * HOUR, spare_nodes=2),
    "half as fast on five of eight nodes": row(
        0.5, fewer_nodes=5 / 8, idle_nodes=2, is_repair_drawn=True
    ),
    "two idle nodes and a spare, often": row(
        0.6, loss_s=10 * HOUR, fewer_nodes=5 / 8, idle_nodes=2, spare_nodes=1
    ),
    "processes fail, too": row(0.85, process_s=16 * HOUR),
    "copies on hosts": row(0.85, process_s=16 * HOUR, host=30, asynchronous=True),
    "copies on hosts, a spare": row(
        0.8, loss_s=12 * HOUR, host=60, spare_nodes=1, is_repair_drawn=True
    ),
    "processes restart at once": row(
        0.85, process_s=8 * HOUR, repair_s=3 * HOUR, restart_s=3000.0, process_restart_s=60.0
    ),
    "copies on hosts that lost nodes take along": row(
        0.85, process_s=8 * HOUR, repair_s=3 * HOUR, host=30, replicas=0, asynchronous=True
    ),
    "copies on hosts wait for a long write": row(
        0.85, loss_s=16 * HOUR, repair_s=3 * HOUR, host=15, asynchronous=True, write_s=3000.0
    ),
    "long repairs": row(0.9, loss_s=60 * HOUR, repair_s=90 * HOUR),
    "long restarts": row(0.85, restart_s=3600.0),
    "repaired before the next checkpoint": row(0.85, loss_s=12 * HOUR, repair_s=0.7 * HOUR),
}
