"""Stage placement: which pool and nodes run which pipeline stage."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size


class StageDevices(Record):
    """Devices of one pipeline stage."""

    pool: str
    layers: Size
    devices: Count


class SinglePoolBaseline(Record):
    """The best plan on one pool by itself."""

    pool: str
    devices: Count
    step_time_s: Seconds | None
    """Of the best decision on it, memory risk included; absent where the model does not fit."""
    out_of_memory_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Of that decision; absent where the model does not fit."""


class NodeOrder(Record):
    """The best order found of nodes with measured links."""

    pool: str
    nodes: tuple[str, ...]
    """In the order of ranks, without spare nodes."""
    spare: tuple[str, ...] = ()
    step_time_before_s: Seconds
    """With the nodes as the matrix lists them: the plan's price plus the cost of slow links
    (tuner/search/nodes/node_order.py)."""
    step_time_after_s: Seconds
    bound_s: Seconds
    """Lower bound over all orders of these nodes."""


class StagePlacement(Record):
    """Stages on pools, in execution order."""

    stages: Annotated[tuple[StageDevices, ...], Field(min_length=1)]
    hosts: tuple[str, ...]
    """Nodes in the order of ranks, `pool-0` where nothing names them: the lines of a hostfile."""
    unused_devices: dict[str, Size] = Field(default_factory=dict)
    """By pool, where there are any."""
    spare_nodes: dict[str, Size] = Field(default_factory=dict)
    """By pool, those kept back to replace its own; absent from plans of before several pools had
    spares in their job."""
    alone: tuple[SinglePoolBaseline, ...] = ()
    node_orders: tuple[NodeOrder, ...] = ()
    notes: tuple[str, ...] = ()
    """Requirements of a launch over these pools."""
