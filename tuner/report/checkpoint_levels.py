"""The checkpoint levels of a plan in words: what was chosen, and what it was compared with."""

from collections.abc import Iterator
from typing import Final

from tuner.config.columns import Numbers
from tuner.faults.forecast import RunForecast
from tuner.faults.interval import ROUNDING, CheckpointCycle
from tuner.faults.run_shares import CheckpointLevels, PolicyRatio
from tuner.units import format_bytes, format_counted, format_ratio, format_s

CLOSE: Final = 2
"""Digits behind the point of shares that are compared."""
BUSY_RATIO: Final = 0.05
"""Share of the time that writing checkpoints keeps storage busy, from which on it is questioned:
other jobs and the loading of data share it."""
NEGLIGIBLE_COST: Final = 0.002
"""Share of the time that rarer checkpoints may cost, as little as a change of a launch is worth."""
LONGER: Final = (2, 4, 8, 16, 32)
"""Multiples of the interval that are tried for rarer checkpoints."""


def levels_sentence(run: RunForecast) -> str:
    """Say how often a run saves on which level; empty where it has shared storage alone."""
    levels = run.checkpoint_levels
    if levels is None or levels.host_interval_steps is None or levels.host_interval_s is None:
        return ""
    copies = "in the memory of every machine"
    if levels.replicas:
        others = "another machine" if levels.replicas == 1 else f"{levels.replicas} others"
        copies = f"in the memory of every machine and of {others}"
    return (
        f"every {format_counted(levels.host_interval_steps, 'step')}"
        f" ({format_s(levels.host_interval_s)}) {copies},"
        f" {format_bytes(levels.host_bytes or 0)} a machine;"
        f" every {format_counted(run.checkpoint_interval_steps or 0, 'step')}"
        f" ({format_s(run.checkpoint_interval_s or 0.0)}) on shared storage"
    )


def level_notes(run: RunForecast) -> Iterator[str]:
    """Compare the chosen levels with others, and say what is not possible."""
    levels = run.checkpoint_levels
    if levels is None or not levels.compared:
        return
    chosen = _policy_words(levels.levels, levels.replicas)
    others = [one for one in levels.compared if not _is_chosen(one, levels)]
    if others:
        listed = ", ".join(
            f"{_policy_words(one.levels, one.replicas)}"
            f" {format_ratio(one.effective_time_ratio, digits=CLOSE)}"
            for one in others
        )
        yield (
            f"checkpoints {chosen} let {format_ratio(run.effective_time_ratio, digits=CLOSE)} of"
            f" the time train; at their best intervals {listed} (each of"
            f" {levels.num_priced:,} policies is computed exactly)"
        )
    if levels.host_restore_ratio is not None:
        yield (
            f"{format_ratio(levels.host_restore_ratio)} of restarts continue from copies on hosts,"
            " the others from shared storage"
        )
    yield from (f"not possible: {reason}" for reason in levels.left_out)


def interval_doubt(run: RunForecast, *, launched_s: float | None = None) -> str:
    """Question checkpoints that follow each other closely; empty where storage is seldom busy.

    The share of the time that trains is that of tuner/faults/interval.py, and flat near its best.

    Args:
        run: with one level of checkpoints.
        launched_s: seconds between checkpoints as a launch states them; None: as the run has them.
    """
    every_s, write_s, failure_s = (
        run.checkpoint_interval_s,
        run.checkpoint_write_s,
        run.failure_interval_s,
    )
    if every_s is None or write_s is None or failure_s is None or run.checkpoint_levels is not None:
        return ""
    least = ""
    if run.checkpoint_in_background:
        if launched_s is not None and launched_s < write_s * (1.0 - ROUNDING):
            return (
                f"a write takes {format_s(write_s)} and must end before the next save begins: they"
                f" are priced {format_s(every_s)} apart, not {format_s(launched_s)}; until then"
                " copies wait in host memory, or training does"
            )
        least = f", no less than {format_s(write_s)} apart, as one must end before the next begins"
    stall_s = run.checkpoint_stall_s or 0.0
    busy = write_s / (every_s + stall_s)
    if busy < BUSY_RATIO:
        return ""
    daily = run.checkpoint_bytes * 86_400 / (every_s + stall_s)

    def trains(interval_s: float) -> Numbers:
        return CheckpointCycle(
            failures_per_s=1.0 / failure_s,
            work_s=interval_s,
            stall_s=stall_s,
            background_s=0.0,
            restart_s=0.0,
            waiting_ratio=0.0,
        ).effective_ratio

    least_share = trains(every_s) * (1.0 - NEGLIGIBLE_COST / max(run.effective_time_ratio, 1e-9))
    rare = [times for times in LONGER if trains(times * every_s) >= least_share]
    instead = ""
    if rare:
        instead = (
            f"; every {format_s(rare[-1] * every_s)} would cost no more than"
            f" {format_ratio(NEGLIGIBLE_COST)} of the time, if any"
        )
    return (
        f"{format_bytes(run.checkpoint_bytes)} every {format_s(every_s)} are"
        f" {format_bytes(int(daily))} a day and keep their storage busy {format_ratio(busy)} of the"
        f" time{least}{instead}"
    )


def _is_chosen(one: PolicyRatio, levels: CheckpointLevels) -> bool:
    return (one.levels, one.replicas) == (levels.levels, levels.replicas)


def _policy_words(levels: tuple[str, ...], replicas: int) -> str:
    if len(levels) < 2:
        return "on shared storage alone"
    if not replicas:
        return "on hosts without replicas"
    return f"on hosts with {format_counted(replicas, 'replica')}"
