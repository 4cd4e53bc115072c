"""Counts of instances of each kind on heterogeneous pools that serve every request.

A *column* is one configuration of an instance: a role, the devices that it takes of each pool (an
AFD unit is one column over one or two pools), its rate and its cost. The caller leaves out columns
that miss an SLO target or do not fit in memory. Columns of one role with the same KV transfer (same
pool, same layout of their KV cache) form a *group*.

    n_j     instances of column j, whole numbers
    y_e     requests/s that route e carries from a prefill group to a decode group
    a       requests/s that aggregated instances serve from end to end
    r       requests/s that are provided for, the spare included

    sum_{e from g} y_e <= sum_{j in g} rate[j] n_j        each prefill group g
    sum_{e to h} y_e <= sum_{j in h} rate[j] n_j          each decode group h
    a <= sum_{j aggregated} rate[j] n_j
    share[c] r = sum_{e from groups of class c} y_e + share[c] a      each class c of requests
    sum_{e over k} bytes[e] y_e <= capacity[k]            each link k, one direction
    sum_j devices[j, p] n_j <= devices[p]                 each pool p
    columns in use <= max_kinds                           each role of each island, where limited
    r >= demand (1 + spare)

Classes are kinds of requests that different instances prefill, such as prompts below and above a
length (Prefill-as-a-Service, arXiv:2604.15039, whose equations 3-8 are this program with two
classes); a decode or aggregated column's rate is that of the whole mix. Rates are means in steady
state: queueing is covered by `spare_ratio` and by a simulation afterwards, not by this program.

Objectives, all to be minimised:

    COST, DEVICES   sum_j weight[j] n_j, weight the price or the devices
    RATE            (1 + spare) / r, seconds per request: the most requests from the pools

Source: the form follows "P-D disaggregated inference on multi-vendor GPUs" (arXiv:2509.17542),
whose own program is not public, and DistServe (arXiv:2401.09670) and P/D-Serve (arXiv:2408.08147),
whose ratios it returns for one pool and one column a role; groups, routes, classes and the
aggregated share are ours.

Letters: J columns, G groups, P pools, E routes, K links, C classes. Not covered: which node an
instance lies on (pass whole nodes as devices where instances do not divide them), requests that
differ in decode, and a limit of the NICs of an instance (lower its rate instead).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

Value = TypeVar("Value")

SHORTFALL_RATIO = 1e-6
"""Share by which a row may be missed and is still met: floating point, not serving."""


class InstanceRole(StrEnum):
    """Work of an instance for its requests."""

    PREFILL = "prefill"
    """Prefill of prompts, whose KV cache is transferred to a decode instance."""
    DECODE = "decode"
    """Decode, everything after the prompt."""
    AGGREGATED = "aggregated"
    """Prefill and decode of the same request."""


class InstanceObjective(StrEnum):
    """Quantity to minimise; the formulas are in the module's docstring."""

    COST = "cost"
    """Price per hour of all instances, at the demanded rate."""
    DEVICES = "devices"
    """Number of devices, at the demanded rate."""
    RATE = "rate"
    """Seconds per request, with all pools."""

    @property
    def rate_is_fixed(self) -> bool:
        """The plan serves the demand and no more."""
        return self is not InstanceObjective.RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePool:
    """Devices of one kind."""

    name: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnGroup:
    """Columns of one role with the same KV routes."""

    name: str
    role: InstanceRole
    request_class: int = 0
    """Class of the requests that a prefill group takes; of no meaning in other roles."""
    island: int = 0
    """Groups of one island share a router; routes join groups of one island."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One configuration of an instance."""

    name: str
    group: int
    devices_P: tuple[int, ...]
    """Devices of each pool that one instance takes."""
    rate_per_s: float
    """Requests per second that one instance serves in its role."""
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLink:
    """A link for KV transfers; each direction is a link of its own."""

    name: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A legal KV route from a prefill group to a decode group."""

    sender: int
    receiver: int
    request_bytes: float = 0.0
    links: tuple[int, ...] = ()
    """Links that it occupies together; empty: none limits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePlan:
    """A solution."""

    count_J: tuple[int, ...]
    """Instances of each column."""
    flow_per_s_E: tuple[float, ...]
    """Requests per second on each route."""
    aggregated_per_s: float
    """Requests per second that aggregated instances serve."""
    rate_per_s: float
    """Requests per second provided for in all, the spare included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesProblem:
    """One instance of the problem."""

    pools: tuple[DevicePool, ...]
    groups: tuple[ColumnGroup, ...]
    columns: tuple[Column, ...]
    routes: tuple[Route, ...] = ()
    links: tuple[TransferLink, ...] = ()
    share_C: tuple[float, ...] = (1.0,)
    """Share of each class among the requests."""
    objective: InstanceObjective
    demand_per_s: float = 0.0
    """Requests per second that must be served; 0 where the objective may choose."""
    spare_ratio: float = 0.0
    """Share of additional requests provided for, beyond those that must be served."""
    max_kinds: int | None = None
    """Most columns of one role in use, in each island."""

    def __post_init__(self) -> None:
        for what, values in (("pools", self.pools), ("groups", self.groups)):
            names = [value.name for value in values]
            if not names or len(set(names)) != len(names):
                raise ValueError(f"{what} {names} must be distinct names, at least one")
        _require(self.pools, lambda pool: pool.devices >= 0, "devices must be at least 0")
        _require(self.links, lambda link: link.bytes_per_s > 0.0, "bytes_per_s must be positive")
        self._check_classes()
        self._check_columns()
        self._check_routes()
        if not (0.0 <= self.demand_per_s < math.inf and 0.0 <= self.spare_ratio < math.inf):
            raise ValueError(
                f"demand_per_s {self.demand_per_s} and spare_ratio {self.spare_ratio} must be "
                "finite, at least 0"
            )
        if self.objective.rate_is_fixed and self.demand_per_s == 0.0:
            raise ValueError(f"objective {self.objective} needs a demand_per_s above 0")
        if self.max_kinds is not None and self.max_kinds < 1:
            raise ValueError(f"max_kinds {self.max_kinds} must be at least 1")

    @property
    def required_per_s(self) -> float:
        """Requests per second that must be provided for, the spare included."""
        return self.demand_per_s * (1.0 + self.spare_ratio)

    @property
    def least_per_s(self) -> float:
        """The required rate less half of what may fall short; the other half is for rounding."""
        return self.required_per_s * (1.0 - 0.5 * SHORTFALL_RATIO)

    @property
    def weight_J(self) -> tuple[float, ...]:
        """Weight of one instance of each column: its price for COST, else its devices."""
        if self.objective is InstanceObjective.COST:
            return tuple(column.price_per_hour for column in self.columns)
        return tuple(float(sum(column.devices_P)) for column in self.columns)

    def role_of(self, column: int) -> InstanceRole:
        """The role of a column."""
        return self.groups[self.columns[column].group].role

    def kinds(self) -> tuple[tuple[InstanceRole, tuple[int, ...]], ...]:
        """The columns of each role of each island, of which `max_kinds` may be in use."""
        by_role: dict[tuple[InstanceRole, int], list[int]] = {}
        for number, column in enumerate(self.columns):
            group = self.groups[column.group]
            by_role.setdefault((group.role, group.island), []).append(number)
        return tuple((role, tuple(numbers)) for (role, _), numbers in by_role.items())

    def most_instances(self, column: int) -> int:
        """Return the instances of a column that the pools hold when there is nothing else."""
        devices_P = self.columns[column].devices_P
        fitting = (
            pool.devices // devices
            for pool, devices in zip(self.pools, devices_P, strict=True)
            if devices
        )
        return min(fitting)

    def _check_classes(self) -> None:
        shares = self.share_C
        if not all(0.0 < share <= 1.0 for share in shares) or abs(sum(shares) - 1.0) > 1e-9:
            raise ValueError(f"share_C {shares} must be shares above 0 that sum to 1")
        _require(
            self.groups,
            lambda group: 0 <= group.request_class < len(shares),
            f"request_class must be one of {len(shares)} classes",
        )

    def _check_columns(self) -> None:
        pools, groups = len(self.pools), len(self.groups)
        _require(
            self.columns,
            lambda column: 0 <= column.group < groups,
            f"group must be one of {groups}",
        )
        _require(
            self.columns,
            lambda column: len(column.devices_P) == pools and min(column.devices_P) >= 0,
            f"devices_P must be a count for each of {pools} pools",
        )
        _require(self.columns, lambda column: sum(column.devices_P) > 0, "must take a device")
        _require(
            self.columns,
            lambda column: (
                0.0 < column.rate_per_s < math.inf and 0.0 <= column.price_per_hour < math.inf
            ),
            "rate_per_s must be positive and price_per_hour at least 0, both finite",
        )
        if self.objective is InstanceObjective.COST:
            _require(
                self.columns,
                lambda column: column.price_per_hour > 0.0,
                f"objective {self.objective} needs a price_per_hour above 0",
            )

    def _check_routes(self) -> None:
        for route in self.routes:
            joined = (route.sender, route.receiver)
            if not all(0 <= end < len(self.groups) for end in joined):
                raise ValueError(f"{route} joins groups that do not exist")
            if [self.groups[end].role for end in joined] != [
                InstanceRole.PREFILL,
                InstanceRole.DECODE,
            ]:
                raise ValueError(f"{route} must join a prefill group to a decode group")
            if len({self.groups[end].island for end in joined}) > 1:
                raise ValueError(f"{route} joins two islands")
            if not all(0 <= link < len(self.links) for link in route.links):
                raise ValueError(f"{route} takes links that do not exist")
            if not 0.0 <= route.request_bytes < math.inf:
                raise ValueError(f"{route}: request_bytes must be finite, at least 0")
        if len({(route.sender, route.receiver) for route in self.routes}) != len(self.routes):
            raise ValueError("two groups are joined by more than one route")


def _require(values: Iterable[Value], holds: Callable[[Value], bool], rule: str) -> None:
    for value in values:
        if not holds(value):
            raise ValueError(f"{value}: {rule}")
