"""Which machines run which stage of a plan: pools of unlike devices, nodes in order of ranks."""

from typing import Annotated

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size


class StagePlacement(Record):
    """Where one pipeline stage runs."""

    pool: str
    layers: Size
    devices: Count


class Alone(Record):
    """What one pool does without the others."""

    pool: str
    devices: Count
    step_time_s: Seconds | None
    """Of the best decision found on it, running out of memory included; absent where the model
    does not fit."""
    out_of_memory_probability: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Of that decision; absent where the model does not fit."""


class NodeOrder(Record):
    """Nodes with measured links, put where they suit a plan best."""

    pool: str
    nodes: tuple[str, ...]
    """In the order of ranks; spare ones are left out."""
    spare: tuple[str, ...] = ()
    step_time_before_s: Seconds
    """With the nodes as the matrix lists them: the plan's price plus what slow links cost
    (tuner/planner/nodes/node_order.py)."""
    step_time_after_s: Seconds
    bound_s: Seconds
    """No order of these nodes is faster."""


class Placement(Record):
    """Stages on pools, in execution order."""

    stages: Annotated[tuple[StagePlacement, ...], Field(min_length=1)]
    hosts: tuple[str, ...]
    """Nodes in the order of ranks, `pool-0` where nothing names them: the lines of a hostfile."""
    unused_devices: dict[str, Size] = Field(default_factory=dict)
    """By pool, where there are any."""
    alone: tuple[Alone, ...] = ()
    node_orders: tuple[NodeOrder, ...] = ()
    notes: tuple[str, ...] = ()
    """What a launch over these pools needs."""
