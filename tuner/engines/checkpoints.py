"""The checkpoints of a plan, as training engines are told of them.

A plan with `goal.reliability` decides how often a run saves; without it nothing is written, and the
engine's own default holds. Where checkpoints go is the user's: `CHECKPOINTS` of an emitted script
names a folder that all nodes share, to save to and to resume from.
"""

import math
from dataclasses import dataclass
from typing import Final

from tuner.catalog.programs import background_checkpoint_obstacle
from tuner.engines.targets import programs
from tuner.faults.forecast import RunForecast, writes_in_background
from tuner.plans.folder import FEWER_NODES
from tuner.plans.train import Plan, VerifiedPlan
from tuner.units import format_bytes, format_s

ENDING_LEEWAY: Final = 2.0
"""Times the forecast seconds of a last step and checkpoint."""
KEPT: Final = 2
"""Finished checkpoints that are kept by engines that remove old ones: one more than needed, should
the newest be damaged. In the background, the one that is written is among them."""
LONGEST_RETENTION: Final = 1000
"""Checkpoints of a run of unknown length of which one stays, by engines that keep every n-th."""

FOLDER_NOTE: Final = (
    "  CHECKPOINTS              a folder that all nodes share: saved to, and resumed from",
)
"""Line about CHECKPOINTS for the list of variables of an emitted script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSchedule:
    """Times at which a run saves checkpoints."""

    steps: int
    """Optimizer steps from one checkpoint to the next."""
    interval_s: float
    size_bytes: int
    """Bytes of one checkpoint, all ranks together."""
    is_asynchronous: bool
    """Training stops for the copy to host memory only."""
    blocking: str = ""
    """Reason why training waits although the spec asks for saving in the background; empty: it
    saves as planned."""
    removes_old: bool = False
    """The engine keeps `KEPT` finished checkpoints, not all."""
    retain_steps: int | None = None
    """The engine keeps the newest finished checkpoint and those of multiples of these steps; None:
    it has no such rule."""
    host_steps: int | None = None
    """Steps between checkpoints on hosts, of which some are those on shared storage; None: there
    are none."""
    host_bytes: int = 0
    """Bytes that checkpoints on hosts take of a node's memory."""
    replicas: int = 0
    """Number of other nodes that hold a copy of a node's checkpoint."""
    ending_s: int = 0
    """Seconds from any time in a step until a last checkpoint is written, with leeway: that step, a
    write in the background and its own. Evaluation is not in it."""
    other_layout: str = ""
    """The layout that restores these checkpoints, too, in words; empty: none has to."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The schedule, a line for each level."""
        also = (self.other_layout,) if self.other_layout else ()
        if self.host_steps is None:
            return (self.words, *also)
        others = {0: "", 1: " and of another one"}.get(
            self.replicas, f" and of {self.replicas} others"
        )
        return (
            self.words,
            f"In between, every {self.host_steps:,} steps, to the memory of every node{others}"
            f" (LOCAL_CHECKPOINTS): {format_bytes(self.host_bytes)} a node.",
            *also,
        )

    @property
    def words(self) -> str:
        """The schedule in a line."""
        how = "written in the background" if self.is_asynchronous else "training waits for it"
        if self.blocking:
            how += f": {self.blocking}"
        kept = "all of them are kept: remove old ones"
        if self.removes_old:
            total = format_bytes((KEPT + 1) * self.size_bytes)
            kept = f"{total} for {KEPT} and the one that is written"
        elif self.retain_steps is not None:
            kept = (
                f"{format_bytes(3 * self.size_bytes)} for the newest, the one that is written and"
                f" that of every {self.retain_steps:,} steps, which stays"
            )
        return (
            f"Checkpoint every {self.steps:,} steps ({format_s(self.interval_s)}), {how};"
            f" {format_bytes(self.size_bytes)} each, {kept}."
        )


def checkpoint_schedule(
    verified: VerifiedPlan, *, removes_old: bool = False, retains: bool = False
) -> CheckpointSchedule | None:
    """Return when a plan saves; None where no failures were stated.

    Args:
        verified: the plan.
        removes_old: the engine is told to keep `KEPT` checkpoints.
        retains: it is told to keep the newest, and those of multiples of some number of steps.
    """
    run, stated = verified.predicted.run, verified.plan.goal.reliability
    if run is None or stated is None or run.checkpoint_interval_steps is None:
        return None
    levels, other_layout = run.checkpoint_levels, _other_layout(verified.plan)
    blocking = background_checkpoint_obstacle(
        programs(verified.plan.emit).capabilities(), zero_stage=verified.decision.zero_stage
    )
    return CheckpointSchedule(
        steps=run.checkpoint_interval_steps,
        interval_s=run.checkpoint_interval_steps * verified.predicted.step_time_s,
        size_bytes=run.checkpoint_bytes,
        is_asynchronous=writes_in_background(run, stated) and not blocking,
        blocking=blocking if stated.checkpoint.asynchronous else "",
        removes_old=removes_old,
        retain_steps=retain_steps(run.checkpoint_interval_steps, run.steps) if retains else None,
        host_steps=None if levels is None else levels.host_interval_steps,
        host_bytes=0 if levels is None else levels.host_bytes or 0,
        replicas=0 if levels is None else levels.replicas,
        ending_s=_ending_s(verified.predicted.step_time_s, run),
        other_layout=other_layout if other_layout and keeps_checkpoints(verified) else "",
    )


def retain_steps(interval: int, steps: int | None) -> int:
    """Return the fewest intervals, in steps, that a run of `steps` holds once, not twice."""
    count = LONGEST_RETENTION if steps is None else steps // interval // 2 + 1
    return count * interval


def _ending_s(step_s: float, run: RunForecast) -> int:
    write_s = max(run.checkpoint_stall_s or 0.0, run.checkpoint_write_s or 0.0)
    return math.ceil(ENDING_LEEWAY * (step_s + 2.0 * write_s))


def keeps_checkpoints(verified: VerifiedPlan) -> bool:
    """Return whether the layout to launch and the plan's own restore each other's checkpoints."""
    planned, launched = verified.plan.decision, verified.decision
    if planned is None:
        return False
    target = programs(verified.plan.emit).capabilities()
    return (
        launched.zero_stage == planned.zero_stage
        and (launched.expert_model_parallel_size > 1) == (planned.expert_model_parallel_size > 1)
        and (
            target.reshards_data_parallel
            or launched.data_parallel_size == planned.data_parallel_size
        )
    )


def _other_layout(plan: Plan) -> str:
    """Name the layout that takes over when the number of nodes changes; empty where none does."""
    run = None if plan.predicted is None else plan.predicted.run
    record = None if run is None else run.without_spare
    if record is None or record.fewer is None or record.decision == "wait":
        return ""
    fewer = record.fewer
    if record.is_fewer:
        return (
            f"For {fewer.nodes} of {record.nodes} nodes, while one is missing: once it is back,"
            " start the launch files of all nodes from the same CHECKPOINTS."
        )
    return (
        f"When one of {record.nodes} nodes is missing and no spare is left, start the launch files"
        f" of {FEWER_NODES}/ on {fewer.nodes} nodes, from the same CHECKPOINTS."
    )
