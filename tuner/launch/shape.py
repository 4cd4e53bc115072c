"""How a job of N devices is spread over nodes.

Every node runs the same number of processes, one per device, so the devices that a launcher asks
for are nodes * devices_per_node = the decision's devices, whatever the pools look like.

Not covered: several pools with different processes per node; all use the smallest that fits.
"""

from dataclasses import dataclass
from typing import Literal

from tuner.plan import Plan, TrainDecision


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchShape:
    """Nodes of a job and processes on each."""

    nodes: int
    devices_per_node: int
    device_kind: Literal["cpu", "cuda"]

    @property
    def num_devices(self) -> int:
        """Devices asked for."""
        return self.nodes * self.devices_per_node


def launch_shape(plan: Plan, decision: TrainDecision) -> LaunchShape:
    """Spread the decision over as few nodes as its pools allow."""
    pools = plan.cluster.pools
    largest = min(decision.num_devices, *(pool.devices_per_node for pool in pools))
    per_node = next(count for count in range(largest, 0, -1) if decision.num_devices % count == 0)
    kinds = {plan.provenance.device_kind.get(pool.name, "cuda") for pool in pools}
    return LaunchShape(
        nodes=decision.num_devices // per_node,
        devices_per_node=per_node,
        device_kind="cpu" if kinds == {"cpu"} else "cuda",
    )
