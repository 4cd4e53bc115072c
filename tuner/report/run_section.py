"""The whole run of a training plan: length with failures, checkpoints, spare nodes, failure log.

A sentence says what was decided, notes say what it was compared with.
"""

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from tuner.faults.failure_rates import LEVEL, observed_rates
from tuner.faults.forecast import SECONDS_PER_HOUR, RunForecast
from tuner.faults.interval import ROUNDING, CheckpointCycle
from tuner.faults.run_shares import CheckpointLevels, PolicyRatio
from tuner.faults.spare_choice import NodeRatio, SpareChoice
from tuner.faults.without_spare import FewerNodes, WithoutSpare
from tuner.report.content import Cell, Depth, Section, Table, between, named, number, seconds, word
from tuner.spec.failure_log import FailureLog
from tuner.units import (
    format_bytes,
    format_count,
    format_counted,
    format_money,
    format_number,
    format_ratio,
    format_s,
)

BUSY_RATIO: Final = 0.05
"""Share of the time that writing checkpoints keeps storage busy, from which on it is questioned:
other jobs and the loading of data share it."""
NEGLIGIBLE_COST: Final = 0.002
"""Share of the time that rarer checkpoints may cost, as little as a change of a launch is worth."""
LONGER: Final = (1, 2, 4, 8, 16, 32)
"""Multiples of the interval that are tried for rarer checkpoints."""
SHOWN_PAIRS: Final = 4
"""Other pairs of numbers of nodes."""


def run_section(run: RunForecast, *, currency: str | None) -> Section:
    """Say how long the run takes with failures, and what was decided about them."""
    checkpoints = levels_sentence(run) or "; ".join(_checkpoints(run))
    return Section(
        name="run",
        heading="The whole run",
        blocks=(
            named(
                ("run", ", ".join(_cost(run, currency))),
                ("checkpoints", checkpoints),
                ("spares", _spares_sentence(run.spares)),
                ("without spare", without_spare_sentence(run)),
            ),
        ),
    )


def run_notes(run: RunForecast) -> Iterator[str]:
    """Compare what was decided about a run with what else was priced."""
    if run.checkpoint_levels is not None and run.checkpoint_levels.compared:
        yield from _level_notes(run, run.checkpoint_levels)
    if run.spares is not None:
        yield from _spares_notes(run.spares)
    record = run.without_spare
    if (
        record is not None
        and record.fewer is not None
        and record.decision != "wait"
        and not record.is_fewer
    ):
        yield from _without_spare_notes(record, record.fewer)


def _cost(run: RunForecast, currency: str | None) -> Iterator[str]:
    if not run.finishes:
        yield f"never finishes: {run.reason}"
        return
    if run.device_hours is not None:
        yield f"{format_number(run.device_hours)} device hours"
    if run.cost is not None:
        yield f"cost {format_money(run.cost, currency)}"
    if run.expected_failures:
        yield f"{run.expected_failures:,.1f} failures expected"
    yield f"{format_ratio(run.effective_time_ratio)} of the time trains"


def _checkpoints(run: RunForecast) -> Iterator[str]:
    """Yield how often there is one on shared storage, and what speaks against it."""
    if run.checkpoint_interval_s is not None and run.checkpoint_write_s is not None:
        yield (
            f"every {format_s(run.checkpoint_interval_s)} ({format_s(run.checkpoint_write_s)} to"
            " write)"
        )
    if doubt := interval_doubt(run):
        yield doubt


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


def _level_notes(run: RunForecast, levels: CheckpointLevels) -> Iterator[str]:
    """Compare the chosen levels with others, and say what is not possible."""
    listed = ", ".join(
        f"{_policy_words(policy)} {_share(policy.effective_time_ratio)}"
        for policy in levels.compared
        if (policy.levels, policy.replicas) != (levels.levels, levels.replicas)
    )
    if listed:
        yield (
            f"checkpoints {_policy_words(levels)} let {_share(run.effective_time_ratio)} of"
            f" the time train; at their best intervals {listed} (each of"
            f" {levels.num_priced:,} policies is computed exactly)"
        )
    if levels.host_restore_ratio is not None:
        yield (
            f"{format_ratio(levels.host_restore_ratio)} of restarts continue from copies on hosts,"
            " the others from shared storage"
        )
    yield from (f"not possible: {reason}" for reason in levels.left_out)


def _policy_words(policy: PolicyRatio | CheckpointLevels) -> str:
    if len(policy.levels) < 2:
        return "on shared storage alone"
    copies = f"with {format_counted(policy.replicas, 'replica')}"
    return f"on hosts {copies if policy.replicas else 'without replicas'}"


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

    intervals_s = np.multiply(LONGER, every_s)
    cycles = CheckpointCycle(
        failures_per_s=1.0 / failure_s,
        work_s=intervals_s,
        stall_s=stall_s,
        background_s=0.0,
        restart_s=0.0,
        waiting_ratio=0.0,
    )
    trains = np.asarray(cycles.effective_ratio)
    lost_ratio = NEGLIGIBLE_COST / max(run.effective_time_ratio, 1e-9)
    longest_s = float(max(intervals_s[trains >= trains[0] * (1.0 - lost_ratio)]))
    instead = (
        f"; every {format_s(longest_s)} would cost no more than"
        f" {format_ratio(NEGLIGIBLE_COST)} of the time, if any"
    ) * (longest_s > every_s)
    return (
        f"{format_bytes(run.checkpoint_bytes)} every {format_s(every_s)} are"
        f" {format_bytes(int(daily))} a day and keep their storage busy {format_ratio(busy)} of the"
        f" time{least}{instead}"
    )


def _spares_sentence(choice: SpareChoice | None) -> str:
    """Say what was chosen for what; empty where the spec states it."""
    if choice is None:
        return ""
    best, left = choice.chosen, choice.pool_nodes - choice.chosen.nodes - choice.chosen.spare_nodes
    unused = f", {left} are not needed" if left else ""
    return (
        f"{format_counted(best.spare_nodes, 'spare node')}, {best.nodes} of {choice.pool_nodes}"
        f" train{unused}: {_value(best, choice)}"
    )


def _spares_notes(choice: SpareChoice) -> Iterator[str]:
    """Compare the chosen numbers with others."""
    others = [pair for pair in choice.compared if pair != choice.chosen][:SHOWN_PAIRS]
    best = (
        "the fewest device hours"
        if choice.objective == "cost"
        else "most tokens per second of the run"
    )
    listed = "; ".join(
        f"{pair.nodes} + {pair.spare_nodes} {_value(pair, choice)}" for pair in others
    )
    against = f"; others, training + spare: {listed}" if listed else ""
    yield (
        f"{choice.chosen.nodes} training and {choice.chosen.spare_nodes} spare nodes are chosen for"
        f" {best}, the best of {format_counted(choice.num_priced, 'pair')} of numbers, each priced"
        f" at its fastest layout{against}"
    )
    if not choice.is_complete:
        yield (
            "--time-limit left no time to search fewer than"
            f" {choice.fewest_searched} training nodes"
        )


def _value(pair: NodeRatio, choice: SpareChoice) -> str:
    trains = f"{_share(pair.effective_time_ratio)} of the time trains"
    if choice.objective == "cost":
        hours = pair.device_s_per_token * 1e9 / SECONDS_PER_HOUR
        return f"{hours:,.1f} device hours per billion tokens, {trains}"
    return f"{format_count(pair.goodput_tokens_per_s)} tokens/s, {trains}"


def without_spare_sentence(run: RunForecast) -> str:
    """Say what the job does without a spare node; empty where the spec says that it waits."""
    record = run.without_spare
    if record is None:
        return ""
    if record.is_fewer:
        return f"this is the layout for when one of {record.nodes} nodes is missing"
    if record.fewer is None:
        return f"wait for a repair: {record.reason}"
    fewer = record.fewer
    continued = _share(fewer.effective_time_ratio)
    waited = _share(record.wait_effective_time_ratio)
    if record.decision == "continue":
        return (
            f"continue on {_layout(record, fewer)}: {continued} effective against {waited} waiting;"
            f" {format_bytes(fewer.read_bytes)} are read"
        )
    return f"wait for a repair: {waited} effective against {continued} on {_layout(record, fewer)}"


def _without_spare_notes(record: WithoutSpare, fewer: FewerNodes) -> Iterator[str]:
    """Say how often the layout changes, and what that takes."""
    often = ""
    if fewer.switch_interval_s is not None:
        often = f", about every {format_s(fewer.switch_interval_s)},"
    yield (
        f"without a spare node{often} the job restarts with fewer in {format_s(fewer.restart_s)};"
        " fewer-nodes/ is that plan. Starting the plan of all nodes again (a Slurm job: scontrol"
        f" requeue) takes {format_s(fewer.return_s)}, and the share counts on it at the first"
        " checkpoint after a repair."
        f" Either way {format_bytes(fewer.read_bytes)} are read from shared storage,"
        f" {format_bytes(fewer.fewer_node_read_bytes)} by each of {fewer.nodes} nodes or"
        f" {format_bytes(fewer.node_read_bytes)} by each of {record.nodes}"
    )
    if fewer.fewest_searched > math.ceil(record.nodes / 2):
        yield (
            "--time-limit left no time to search layouts of fewer than"
            f" {fewer.fewest_searched} nodes for when one is missing"
        )
    idle = format_counted(fewer.idle_nodes, "idle node")
    further = f"after {idle} " if fewer.idle_nodes else ""
    yield (
        f"not covered: layouts of yet another node fewer; {further}the job waits for a repair then,"
        f" {_share(fewer.waiting_ratio)} of the time"
    )


def _layout(record: WithoutSpare, fewer: FewerNodes) -> str:
    return (
        f"{fewer.nodes} of {record.nodes} nodes in {fewer.layout}"
        f" ({format_ratio(fewer.throughput_ratio)} of the throughput)"
    )


def _share(ratio: float) -> str:
    return format_ratio(ratio, digits=2)


def failures_section(log: FailureLog) -> Section:
    """Show the failure log of a plan."""
    rates = Table(
        caption="Failures by component, with the mean time between those of one device, or one"
        " machine for the others, and the interval that covers the true one with a chance of"
        f" {format_ratio(LEVEL, digits=0)}",
        header=("component", "failures", "mean time between them", "interval"),
        rows=tuple(
            (
                word(rate.component),
                number(rate.count, key=f"failures.counts.{rate.component}"),
                _every(rate.mtbf_s),
                between(rate.mtbf_s_band)
                if math.isfinite(rate.mtbf_s_band[1])
                else word(f"more than {format_s(rate.mtbf_s_band[0])}"),
            )
            for rate in observed_rates(log)
        ),
    )
    facts = named(
        ("observed", seconds(log.period_s, key="failures.period_s")),
        ("one device fails every", _every(log.device_mtbf_s)),
        ("one machine is lost every", _every(log.node_mtbf_s)),
        ("processes of a machine fail every", _every(log.mtbf_s("software"))),
    )
    return Section(
        name="failures", heading="Failures in the log", blocks=(rates, facts), depth=Depth.PAGE
    )


def _every(mtbf_s: float | None) -> Cell:
    is_seen = mtbf_s is not None and math.isfinite(mtbf_s)
    return seconds(mtbf_s or 0.0) if is_seen else word("none was seen")
