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
    """Step time of the best decision on it, memory risk included; absent where the model does not
    fit."""
    out_of_memory_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Out-of-memory probability of that decision; absent where the model does not fit."""


class NodeOrder(Record):
    """The best order found of nodes with measured links."""

    pool: str
    nodes: tuple[str, ...]
    """Hosts in the order of ranks, without spare nodes."""
    spare: tuple[str, ...] = ()
    step_time_before_s: Seconds
    """Step time with the nodes as the matrix lists them: the plan's price plus the cost of slow
    links (tuner/search/nodes/node_order.py)."""
    step_time_after_s: Seconds
    bound_s: Seconds
    """Lower bound over all orders of these nodes."""


class StagePlacement(Record):
    """Stages on pools, in execution order."""

    stages: Annotated[tuple[StageDevices, ...], Field(min_length=1)]
    hosts: tuple[str, ...]
    """Nodes in the order of ranks, `pool-0` where nothing names them: the lines of a hostfile."""
    unused_devices: dict[str, Size] = Field(default_factory=dict)
    """Unused devices by pool; pools without any are left out."""
    spare_nodes: dict[str, Size] = Field(default_factory=dict)
    """Spare nodes that each pool keeps to replace its own, by name; pools without any are left out,
    and so is all of it in plans from before jobs over several pools had spares."""
    alone: tuple[SinglePoolBaseline, ...] = ()
    node_orders: tuple[NodeOrder, ...] = ()
    notes: tuple[str, ...] = ()
    """Requirements of a launch over these pools."""
