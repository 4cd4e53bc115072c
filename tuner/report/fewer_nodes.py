"""Report section on a plan's job without a spare node, in words."""

import math
from collections.abc import Iterator
from typing import Final

from tuner.faults.forecast import RunForecast
from tuner.faults.without_spare import FewerNodes, WithoutSpare
from tuner.units import format_bytes, format_counted, format_ratio, format_s

CLOSE: Final = 2
"""Digits behind the point of shares that are compared."""


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


def without_spare_notes(run: RunForecast) -> Iterator[str]:
    """Say how often the layout changes, and what that takes."""
    record = run.without_spare
    if record is None or record.fewer is None or record.decision == "wait" or record.is_fewer:
        return
    fewer = record.fewer
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
    return format_ratio(ratio, digits=CLOSE)
