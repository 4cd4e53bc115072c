"""The decision of a job whose node fails when no spare is left: `predicted.run.without_spare`."""

from typing import Annotated, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.faults.fewer_nodes import ContinuedRun
from tuner.faults.run_shares import Ratio, Whole


class FewerNodes(Record):
    """The layout without a spare node, and what switching to it and back takes."""

    nodes: Whole
    """Nodes that the layout uses."""
    idle_nodes: Whole = 0
    """Surviving nodes that the layout does not use; they are its spares."""
    fewest_searched: Whole
    """Fewest nodes for which layouts were searched."""
    devices: Whole
    layout: str
    """Parallel degrees of the layout, e.g. `pp7 dp8 ep4`, and micro-batches of unequal replicas."""
    step_time_s: Seconds
    throughput_ratio: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    """Throughput relative to that with all nodes, at the same global batch."""
    effective_time_ratio: Ratio
    """Share of the wall clock that advances training, with all nodes and these together; this and
    the next three are those of a run that continues."""
    fewer_ratio: Ratio
    """Share of the wall clock with fewer nodes."""
    waiting_ratio: Ratio
    """Share of the wall clock that waits, because yet another node was lost."""
    switch_interval_s: Seconds | None = None
    """Mean time from one switch to fewer nodes to the next; absent: never."""
    restart_s: Seconds
    """Seconds from the loss of a node to the first step with fewer, reading the checkpoint
    included."""
    return_s: Seconds
    """Seconds from a checkpoint to the first step with all nodes again, reading it included."""
    read_bytes: Whole
    """Bytes that all nodes read from shared storage at either switch, every byte once."""
    fewer_node_read_bytes: Whole
    """Bytes that each of the fewer nodes reads at a switch."""
    node_read_bytes: Whole
    """Bytes that each node reads when all are back."""


class WithoutSpare(Record):
    """The decision, and what it was compared with."""

    decision: Literal["wait", "continue"]
    reason: str = ""
    """Reason why no layout of fewer nodes can be used; empty where one can."""
    nodes: Whole
    """Nodes of the full layout."""
    wait_effective_time_ratio: Ratio
    """Share of the wall clock that advances training if the job waits for a repair."""
    fewer: FewerNodes | None = None
    """Layout of fewer nodes; absent where none can be used."""
    is_fewer: bool = False
    """This run is that with fewer nodes; the decision is that of the run with all nodes."""


def ratios(run: ContinuedRun) -> dict[str, float | None]:
    """Return the fields of `FewerNodes` that say what a continued run makes of its time."""
    return {
        "effective_time_ratio": min(1.0, run.training),
        "fewer_ratio": run.fewer,
        "waiting_ratio": run.waiting,
        "switch_interval_s": 1.0 / run.switches_per_s if run.switches_per_s > 0.0 else None,
    }
