"""Autoscalers of Kubernetes, and the load that engines export for them.

Sources: HorizontalPodAutoscaler of autoscaling/v2; KEDA 2.18 (apis/keda/v1alpha1,
pkg/scalers/prometheus_scaler.go); AIBrix e3e10f9e (api/autoscaling/v1alpha1,
pkg/controller/podautoscaler), which takes the largest proposal of several metrics and adds none up.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

AUTOSCALERS: Final = ("keda", "hpa", "aibrix")
"""Names in `emit` that hand the number of instances over to a controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMetrics:
    """Gauges of a server at `/metrics`, one series an attention-data rank."""

    running: str
    """Requests whose prompts or outputs are computed."""
    waiting: str
    """Requests in the server's queue."""
    queues: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further queues of a disaggregated role, whose KV caches are sent or received."""
    kv_usage: str
    """Share of the KV cache in use, from 0 to 1."""
    option: str = ""
    """Option without which the server exports none; empty: it always does."""

    def requests(self, role: str) -> tuple[str, ...]:
        """Return the gauges whose sum is the number of requests on a server of a role."""
        return (self.running, self.waiting, *self.queues.get(role, ()))


def named_autoscaler(targets: Iterable[str]) -> str | None:
    """Return the autoscaler among launch targets; None without one."""
    return next((name for name in targets if name in AUTOSCALERS), None)
