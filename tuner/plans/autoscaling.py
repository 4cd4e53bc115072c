"""Settings of an autoscaler for a deployment: when instances are added, how many, after how long.

Running and waiting requests of an instance fire: at the most that the planned instances serve
within the targets, Little's law says how many there are, and instances are added at `FILL_RATIO` of
them. The autoscaler's loop is the HorizontalPodAutoscaler's, which KEDA and AIBrix let run too.
"""

from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count
from tuner.config.serve import Role
from tuner.units import format_number, format_ratio, format_s

FILL_RATIO: Final = 0.85
"""Share of what instances hold within the targets at which others are added."""
SCRAPE_S: Final = 15.0
"""Seconds between two readings of the servers' metrics, as emitted files set them."""
SYNC_S: Final = 15.0
"""Seconds between two decisions of the controller (--horizontal-pod-autoscaler-sync-period)."""
SCALE_DOWN_WINDOW_S: Final = 300.0
"""Seconds of which the highest count holds before instances are removed (autoscaling/v2)."""

Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class ScaledInstances(Record):
    """Instances of one role, which one object of the autoscaler counts."""

    role: Role
    at_least: Count
    """Fewest instances."""
    at_most: Count
    """Most instances: the role's share of its pool, in the plan's proportion."""
    requests: Positive
    """Running and waiting requests of an instance, mean, at the most that the plan serves."""
    kv_usage_ratio: Annotated[float, Field(ge=0.0)]
    """Share of the KV cache in use at that load."""
    longest_request_s: Seconds
    """Seconds of the longest request of the workload at that load."""

    @property
    def target(self) -> float:
        """Running and waiting requests of an instance above which others are added."""
        return FILL_RATIO * self.requests


class Autoscaling(Record):
    """An autoscaler of the planned instances."""

    autoscaler: str
    """Its name in `emit`."""
    capacity_per_s: Positive
    """Requests per second that the planned instances serve within the targets, simulated."""
    roles: Annotated[tuple[ScaledInstances, ...], Field(min_length=1)]
    kv_usage: float | None = None
    """Share of the KV cache in use above which instances are added, too; None: not a trigger."""
    start_up_s: Seconds | None = None
    """Seconds from the start of an instance until it takes requests; None: not known."""
    node_provisioning_s: Seconds = 0.0
    """Seconds until a machine is there."""

    def words(self) -> Iterator[str]:
        """Yield what fires and where, what the KV cache would have done, and how long it takes."""
        for scaled in self.roles:
            where = f"{scaled.role.value}: " * (len(self.roles) > 1)
            yield (
                f"{where}{self.autoscaler} adds instances above {format_number(scaled.target)}"
                f" running and waiting requests each ({format_ratio(FILL_RATIO, digits=0)} of"
                f" {format_number(scaled.requests)} at {format_number(self.capacity_per_s)}"
                f" requests/s in all), {scaled.at_least} to {scaled.at_most} instances"
            )
            yield (
                f"{where}not by the KV cache: {format_ratio(scaled.kv_usage_ratio, digits=0)} of it"
                " is in use there, so that a trigger above that never fires"
                if self.kv_usage is None
                else f"{where}and above {format_ratio(self.kv_usage, digits=0)} of the KV cache,"
                f" of which {format_ratio(scaled.kv_usage_ratio, digits=0)} is in use there"
            )
        if len(self.roles) > 1:
            yield (
                "each role follows its own requests: at the planned lengths both fire at the same"
                " rate, at others their proportion changes, within the shares of the pools"
            )
        yield self._delay_words()

    def _delay_words(self) -> str:
        fires_s = SCRAPE_S + SYNC_S
        machine = f", {format_s(self.node_provisioning_s)} for a machine" * bool(
            self.node_provisioning_s
        )
        if self.start_up_s is None:
            return (
                f"a scale-up takes {format_s(fires_s)} until it fires{machine}, and the start-up,"
                " which is not known: state goal.autoscaler.start_up"
            )
        whole_s = fires_s + self.node_provisioning_s + self.start_up_s
        return (
            f"a scale-up takes up to {format_s(whole_s)}: {format_s(fires_s)} until it"
            f" fires{machine}, {format_s(self.start_up_s)} of start-up"
        )
