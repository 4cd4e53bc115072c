"""The checkpoint levels of a plan in words: what was chosen, and what it was compared with."""

from collections.abc import Iterator
from typing import Final

from tuner.faults.forecast import RunForecast
from tuner.faults.run_shares import CheckpointLevels, PolicyRatio
from tuner.units import format_bytes, format_counted, format_ratio, format_s

CLOSE: Final = 2
"""Digits behind the point of shares that are compared."""


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


def _is_chosen(one: PolicyRatio, levels: CheckpointLevels) -> bool:
    return (one.levels, one.replicas) == (levels.levels, levels.replicas)


def _policy_words(levels: tuple[str, ...], replicas: int) -> str:
    if len(levels) < 2:
        return "on shared storage alone"
    if not replicas:
        return "on hosts without replicas"
    return f"on hosts with {format_counted(replicas, 'replica')}"
