"""The machines of a spec: pools of alike devices and the links between pools."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from profilers.records import Record
from tuner.spec.fields import Bytes, BytesPerSecond, Count, FilePath, Name, Number, Seconds


class Pool(Record):
    """One kind of machine, several times over."""

    name: Name
    """What links and reports call it."""
    profile: FilePath | None = None
    """Folder of a stored profile that was measured on such a machine."""
    device: Name | None = None
    """Name of a device description that ships with the product, to plan from the datasheet."""
    nodes: Annotated[Count, Field(le=100_000)] = 1
    """Machines in the pool."""
    devices_per_node: Annotated[Count, Field(le=1024)]
    """Accelerators of one machine; processes that it runs where there is none."""
    scale_up_domain: Count | None = None
    """Devices that reach each other over NVLink-class links; `devices_per_node` when absent."""
    nics_per_node: Count | None = None
    """NICs of one machine; `devices_per_node` when absent."""
    nic: BytesPerSecond | None = None
    """Bandwidth of one NIC; absent: what the profile measured, else the datasheet's usual one."""
    oversubscription: Annotated[Number, Field(ge=1.0)] = 1.0
    """How many times less the network carries between machines than the NICs could send."""
    link_matrix: FilePath | None = None
    """Measured bandwidth between every two machines of the pool: a CSV whose first cell is
    `bytes_per_s`, whose first row and column name the hosts, and whose cells hold bytes per second
    from the row's host to the column's, all NICs together; or a folder of nccl-tests outputs, one
    of `alltoall_perf` or `sendrecv_perf` per pair (profilers/imports/link_matrix.py). A plan then
    says which host runs which ranks and what the slow links cost. It tells links apart; how fast
    the usual one is still comes from `nic`, so state no `oversubscription` beside it."""
    price_per_device_hour: Annotated[Number, Field(ge=0.0)] | None = None
    """Price of a device and hour, in the cluster's currency."""
    memory_per_device: Bytes | None = None
    """Bytes of one device; overrides what the profile says, as a budget of one's own."""
    usable_memory_ratio: Annotated[Number, Field(le=1.0)] = 0.95
    """Share of a device's memory that a plan may use."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.profile is None and self.device is None:
            raise ValueError("a pool needs 'profile' (measured) or 'device' (datasheet)")
        if self.domain > self.num_devices:
            raise ValueError(
                f"scale_up_domain {self.domain} exceeds the pool's {self.num_devices} devices"
            )
        if self.devices_per_node % self.domain and self.domain % self.devices_per_node:
            raise ValueError(
                f"scale_up_domain {self.domain} neither divides devices_per_node"
                f" {self.devices_per_node} nor is a multiple of it; the nearest legal value is"
                f" {self._nearest_domain()}"
            )
        return self

    def _nearest_domain(self) -> int:
        each = self.devices_per_node
        parts = [n for n in range(1, each + 1) if each % n == 0]
        near = self.domain // each * each
        whole = [n for n in (near, near + each) if 0 < n <= self.num_devices]
        return min((*parts, *whole), key=lambda n: (abs(n - self.domain), n))

    @property
    def num_devices(self) -> int:
        """Devices of the whole pool."""
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """Devices of one scale-up domain, the default filled in."""
        return self.scale_up_domain or self.devices_per_node

    @property
    def nics(self) -> int:
        """Network cards of one machine, the default filled in."""
        return self.nics_per_node or self.devices_per_node


class Link(Record):
    """What joins two pools."""

    between: tuple[Name, Name]
    """Names of the two pools."""
    bandwidth: BytesPerSecond
    """Bytes per second, each direction."""
    latency: Seconds
    """Seconds, one way."""


class Cluster(Record):
    """Everything that a plan may use."""

    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    """One entry per kind of machine."""
    links: tuple[Link, ...] = ()
    """Links between pools; inside a pool the profile and the pool's own fields say it."""
    currency: Annotated[str, Field(min_length=1, max_length=12)] | None = None
    """Currency of every price, such as USD; absent: amounts are written without one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [pool.name for pool in self.pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two pools are named {twice[0]!r}; give each its own name")
        for link in self.links:
            unknown = [name for name in link.between if name not in names]
            if unknown:
                raise ValueError(f"links: no pool is named {unknown[0]!r}; pools: {names}")
            if link.between[0] == link.between[1]:
                raise ValueError(f"links: {link.between[0]!r} is linked to itself")
        joined = [tuple(sorted(link.between)) for link in self.links]
        again = sorted({pair for pair in joined if joined.count(pair) > 1})
        if again:
            raise ValueError(
                f"links: {again[0][0]!r} and {again[0][1]!r} are joined twice; keep one"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)
