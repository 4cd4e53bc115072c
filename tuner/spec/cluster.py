"""The machines of a spec: pools of identical devices and the links between pools."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Final, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic.config import JsonDict

from profilers.records import Profile, Record
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.errors import SpecError, TunerError
from tuner.spec.fields import Bytes, BytesPerSecond, Count, FilePath, Name, Number, Seconds
from tuner.units import format_bytes

_NAME_OR_DATASHEET: Final[JsonDict] = {
    "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]
}


class Host(Record):
    """Memory of one machine beside that of its devices."""

    memory: Bytes
    """Bytes of one machine, all of them."""
    reserve: Bytes | None = None
    """Bytes of one machine that no job may take: operating system, processes, data loaders, cached
    files; absent: none."""
    bandwidth: BytesPerSecond | None = None
    """Rated bandwidth of that memory, all channels and sockets; for experts in host memory."""
    read_rate: BytesPerSecond | None = None
    """Measured rate at which the engine's threads read weights, which counts instead of a share of
    `bandwidth`."""
    cores: Count | None = None
    """Physical cores of one machine."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what only experts in host memory need, where it is not stated."""
        values: dict[str, Any] = serialize(self)
        for name in ("bandwidth", "read_rate", "cores"):
            if getattr(self, name) is None:
                values.pop(name, None)
        return values

    @model_validator(mode="after")
    def _leaves_some(self) -> Self:
        if (self.reserve or 0) >= self.memory:
            raise ValueError(
                f"reserve {format_bytes(self.reserve or 0)} leaves nothing of memory"
                f" {format_bytes(self.memory)}; reserve less"
            )
        return self


class Pool(Record):
    """Identical machines."""

    name: Name
    """Name in links and reports."""
    profile: FilePath | None = None
    """Folder of a stored profile that was measured on a machine of this kind."""
    device: Annotated[Name | None, Field(json_schema_extra=_NAME_OR_DATASHEET)] = None
    """Name of a datasheet that ships with moetune, instead of a profile; or the datasheet itself,
    a mapping of the fields of `datasheet`, for a device that none ships for."""
    datasheet: Datasheet | None = None
    """Datasheet that the spec states itself, as `device: {name: ..., generation: ..., ...}`."""
    nodes: Annotated[Count, Field(le=100_000)] = 1
    """Machines in the pool."""
    devices_per_node: Annotated[Count, Field(le=1024)]
    """Accelerators of one machine, or processes if it has none."""
    scale_up_domain: Count | None = None
    """Devices that reach each other over NVLink-class links; absent: as the datasheet says, the
    servers of a rack (NVL72), the cards of a bridge, else `devices_per_node`."""
    nics_per_node: Count | None = None
    """NICs of one machine; `devices_per_node` when absent."""
    nic: BytesPerSecond | None = None
    """Bandwidth of one NIC; absent: as measured by the profile, else the datasheet's default."""
    oversubscription: Annotated[Number, Field(ge=1.0)] = 1.0
    """Oversubscription factor of the network between machines."""
    link_matrix: FilePath | None = None
    """Measured bandwidth between every two machines of the pool: a CSV whose first cell is
    `bytes_per_s`, whose first row and column name the hosts, and whose cells hold bytes per second
    from the row's host to the column's, all NICs together; or a folder of nccl-tests outputs, one
    of `alltoall_perf` or `sendrecv_perf` per pair (profilers/imports/link_matrix.py). A plan then
    says which host runs which ranks and what the slow links cost. It gives relative speeds; the
    bandwidth of a normal link still comes from `nic`, so state no `oversubscription` with it."""
    price_per_device_hour: Annotated[Number, Field(ge=0.0)] | None = None
    """Price of one device for one hour, in the cluster's currency."""
    memory_per_device: Bytes | None = None
    """Bytes of one device; overrides the profile."""
    usable_memory_ratio: Annotated[Number, Field(le=1.0)] = 0.95
    """Share of a device's memory that a plan may use."""
    host: Host | None = None
    """Host memory of one machine, which offloading, copies of checkpoints and caches on hosts take;
    absent: what the profile measured, else not known, and a plan says what it needs."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plans did not have before hosts were stated, where it is not."""
        values: dict[str, Any] = serialize(self)
        if self.host is None:
            values.pop("host", None)
        return values

    @model_validator(mode="before")
    @classmethod
    def _described(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and isinstance(value.get("device"), Mapping):
            if value.get("datasheet") is not None:
                raise ValueError("'device' states a datasheet already; leave 'datasheet' out")
            name = value["device"].get("name")
            return {**value, "device": name, "datasheet": value["device"]}
        return value

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
        per_node = self.devices_per_node
        parts = [n for n in range(1, per_node + 1) if per_node % n == 0]
        near = self.domain // per_node * per_node
        whole = [n for n in (near, near + per_node) if 0 < n <= self.num_devices]
        return min((*parts, *whole), key=lambda n: (abs(n - self.domain), n))

    @property
    def sheet(self) -> Datasheet:
        """Datasheet of its devices.

        Raises:
            SpecError: the pool names no device, or one that no datasheet describes.
        """
        if self.datasheet is not None:
            return self.datasheet
        if self.device is None:
            raise SpecError(f"cluster.pools: {self.name!r} names no 'device'")
        return find_device(self.device)

    def host_limit_bytes(self, profile: Profile | None) -> float | None:
        """Bytes of one machine that a job may take; None where neither spec nor profile knows."""
        if self.host is not None:
            return float(self.host.memory - (self.host.reserve or 0))
        measured = 0 if profile is None else profile.header.machine.host_memory_bytes
        return float(measured) or None

    @property
    def num_devices(self) -> int:
        """Devices of the whole pool."""
        return self.nodes * self.devices_per_node

    @property
    def domain(self) -> int:
        """Devices of one scale-up domain, default included.

        A pool with a profile alone has the domain of a machine. A datasheet's domain of a whole
        server is the pool's server, whatever its cards.
        """
        per_node, sheet = self.devices_per_node, self._sheet_or_none
        if self.scale_up_domain is not None or sheet is None:
            return self.scale_up_domain or per_node
        if sheet.scale_up_domain > sheet.devices_per_node:
            return max(min(sheet.scale_up_domain, self.num_devices) // per_node, 1) * per_node
        if sheet.scale_up_domain == sheet.devices_per_node:
            return per_node
        return next(
            n for n in range(min(sheet.scale_up_domain, per_node), 0, -1) if per_node % n == 0
        )

    @property
    def _sheet_or_none(self) -> Datasheet | None:
        with suppress(TunerError):
            return self.sheet
        return None

    @property
    def nics(self) -> int:
        """NICs of one machine, default included."""
        return self.nics_per_node or self.devices_per_node


class Link(Record):
    """The network between two pools."""

    between: tuple[Name, Name]
    """Names of the two pools."""
    bandwidth: BytesPerSecond
    """Bytes per second in each direction."""
    latency: Seconds
    """Latency in one direction, seconds."""


class Cluster(Record):
    """All machines that a plan may use."""

    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    """One entry per kind of machine."""
    links: tuple[Link, ...] = ()
    """Links between pools; inside a pool the profile and the pool's fields apply."""
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
        repeated = sorted({pair for pair in joined if joined.count(pair) > 1})
        if repeated:
            raise ValueError(
                f"links: {repeated[0][0]!r} and {repeated[0][1]!r} are joined twice; keep one"
            )
        return self

    @property
    def num_devices(self) -> int:
        """Devices of all pools."""
        return sum(pool.num_devices for pool in self.pools)
