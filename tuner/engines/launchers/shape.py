"""Spread of a job of N devices over nodes.

Every node runs the same number of processes, one per device, so a launcher requests nodes *
devices_per_node = the decision's devices, whatever the pools look like. Where the order of nodes
matters (links that were measured one by one, several pools) the shape has it.

Not covered: several pools with different processes per node; all use the smallest that fits.
"""

from dataclasses import dataclass
from typing import Literal

from tuner.config.train import TrainDecision
from tuner.plans.train import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """Nodes of a job and processes on each."""

    nodes: int
    devices_per_node: int
    device_kind: Literal["cpu", "cuda"]
    hosts: tuple[str, ...] = ()
    """Nodes in the order of ranks; empty where any order will do."""
    unnamed: frozenset[str] = frozenset()
    """Entries of `hosts` that stand for nodes whose names the plan does not know."""

    @property
    def num_devices(self) -> int:
        """Devices requested."""
        return self.nodes * self.devices_per_node


def launch_shape(plan: Plan, decision: TrainDecision) -> LaunchShape:
    """Spread the decision over as few nodes as its pools allow."""
    pools = plan.cluster.pools
    largest = min(decision.num_devices, *(pool.devices_per_node for pool in pools))
    per_node = next(count for count in range(largest, 0, -1) if decision.num_devices % count == 0)
    nodes = decision.num_devices // per_node
    hosts = _hosts_in_order(plan) if decision == plan.decision and nodes > 1 else ()
    hosts = hosts if len(hosts) == nodes else ()
    return LaunchShape(
        nodes=nodes,
        devices_per_node=per_node,
        device_kind=plan.provenance.kind_of_devices,
        hosts=hosts,
        unnamed=frozenset(hosts) - _named(plan),
    )


def _hosts_in_order(plan: Plan) -> tuple[str, ...]:
    """The nodes that a plan places, where their order matters."""
    placement = plan.placement
    if placement is None:
        return ()
    has_pools = len({stage.pool for stage in placement.stages}) > 1
    return placement.hosts if placement.node_orders or has_pools else ()


def _named(plan: Plan) -> frozenset[str]:
    orders = plan.placement.node_orders if plan.placement is not None else ()
    return frozenset(node for order in orders for node in order.nodes)
