"""Emits what an autoscaler needs beside the Kubernetes objects: its own, and how instances end.

    keda    ScaledObject (keda.sh/v1alpha1) a role; Prometheus is asked for the sum over all pods
    hpa     HorizontalPodAutoscaler (autoscaling/v2) a role, on a metric that prometheus-adapter
            makes of two, by the rule emitted with it: HPA takes the larger of two and not their sum
    aibrix  PodAutoscaler (autoscaling.aibrix.ai/v1alpha1) a role, strategy HPA, on the same metric:
            it reads gauges of pods, too, but adds none up and sees one rank of several

An instance that ends waits until the router has seen it go, then until it runs and queues nothing;
a machine of an instance over several asks the first one. A disruption budget lets one instance go
at a time. Sources: tuner/catalog/serve_rules/autoscalers.py; kubernetes.io, pod lifecycle and
PodDisruptionBudget; prometheus-operator, PodMonitor; prometheus-adapter, docs/config.md.

Not covered: KV caches that wait on a prefill instance for longer than `_SETTLE_S` to be fetched.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from tuner.catalog.serve_rules.autoscalers import LoadMetrics
from tuner.config.serve import Role
from tuner.engines.files import EmittedFile
from tuner.engines.launchers.pods import Object, yaml_text
from tuner.engines.serving.command import FIRST_PORT
from tuner.engines.serving.router import chosen_router
from tuner.engines.serving.shape import GroupShape, group_release, group_shapes, one_machine
from tuner.errors import UnknownTargetError
from tuner.plans.autoscaling import SCALE_DOWN_WINDOW_S, SCRAPE_S, Autoscaling, ScaledInstances
from tuner.plans.serve import VerifiedServing

PORT_NAME: Final = "http"
_SETTLE_S: Final = 15
"""Seconds until routers and Services have seen that a pod ends, and until KV caches are fetched."""
_LWS_NAME: Final = "leaderworkerset.sigs.k8s.io/name"
_DRAIN: Final = """\
sleep {settle}
while curl -sf "http://${{LWS_LEADER_ADDRESS:-localhost}}:{port}/metrics" \\
    | grep -E '^({gauges})[{{ ]' | grep -qvE ' 0([.]0)?$'; do
  sleep 1
done
"""
_BEHAVIOR: Final = {"scaleDown": {"stabilizationWindowSeconds": int(SCALE_DOWN_WINDOW_S)}}
_ADAPTER_NOTES: Final = (
    "The metric comes from Prometheus through prometheus-adapter: see adapter-rules.yaml.",
)
_NOTES: Final = {
    "keda": (
        "Needs KEDA 2.17 and Prometheus, whose address belongs into serverAddress; where another"
        " namespace has a deployment of this name, add namespace to the queries.",
    ),
    "hpa": _ADAPTER_NOTES,
    "aibrix": (
        *_ADAPTER_NOTES,
        "AIBrix rounds targets down, doubles at most and halves at most in a minute.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trigger:
    """A mean over the pods of a group above which instances are added."""

    name: str
    """Metric of a pod, as prometheus-adapter serves it."""
    query: str
    """PromQL by pod, with %(labels)s and %(by)s."""
    value: float


def check_scalable(verified: VerifiedServing) -> None:
    """Refuse a deployment whose new instances would get no requests.

    Raises:
        UnknownTargetError: the router reads addresses once, or one container has all instances.
    """
    if verified.autoscaling is None:
        return
    name, router = verified.autoscaling.autoscaler, chosen_router(verified)
    if router.script:
        raise UnknownTargetError(
            f"emit: {name}: {router.name} {router.release} reads addresses once, so that instances"
            " that are added get no requests; plan goal.modes: [aggregated]"
        )
    if one_machine(verified) is not None:
        raise UnknownTargetError(
            f"emit: {name}: all instances share a container, which cannot get more of one role;"
            f" plan again with {name} in 'emit'"
        )


def with_drain(verified: VerifiedServing, shape: GroupShape, pod: Object) -> Object:
    """Return the pod of a group; where an autoscaler ends it, with the time for its requests."""
    if verified.autoscaling is None:
        return pod
    role, waits = shape.group.role, 2 if shape.group.role is Role.PREFILL else 1
    gauges = "|".join(_load(verified, shape).requests(role.value))
    script = _DRAIN.format(settle=_SETTLE_S, port=FIRST_PORT, gauges=gauges)
    script += f"sleep {_SETTLE_S}\n" * (waits - 1)
    longest_s = _scaled(verified.autoscaling, shape).longest_request_s
    first, *others = pod["containers"]
    drain = {"lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", script]}}}}
    return pod | {
        "terminationGracePeriodSeconds": waits * _SETTLE_S + math.ceil(longest_s),
        "containers": [first | drain, *others],
    }


def disruption_budget(shape: GroupShape, *, app: str) -> Object:
    """Return the budget of a group: one pod at a time, of instances over several machines any."""
    name = f"{app}-{shape.name}"
    labels = {"app": app, "group": shape.name} if shape.nodes == 1 else {_LWS_NAME: name}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }


def autoscaler_files(verified: VerifiedServing, *, app: str) -> tuple[EmittedFile, ...]:
    """Return the autoscaler of a deployment and what feeds it; nothing without one."""
    scaling, shapes = verified.autoscaling, group_shapes(verified)
    if scaling is None:
        return ()
    triggers = {
        shape.name: tuple(_triggers(_load(verified, shape), scaling, shape)) for shape in shapes
    }
    notes = (
        *(f"{words[0].upper()}{words[1:]}." for words in scaling.words()),
        *_NOTES[scaling.autoscaler],
        f"The PodMonitor is for Prometheus' operator; others scrape /metrics of the servers at port"
        f" {FIRST_PORT} every {SCRAPE_S:.0f} s.",
        "Then: kubectl apply -f autoscaler.yaml, after deployment.yaml",
    )
    objects = [
        _pod_monitor(app),
        *(_autoscaler(scaling, shape, triggers[shape.name], app=app) for shape in shapes),
    ]
    files = {"autoscaler.yaml": yaml_text(verified, notes=notes, objects=objects)}
    if scaling.autoscaler != "keda":
        note = "Append these to the rules of prometheus-adapter (rules.custom of its chart)."
        series = _load(verified, shapes[0]).running
        rules = [_adapter_rule(trigger, series) for kept in triggers.values() for trigger in kept]
        files["adapter-rules.yaml"] = yaml_text(verified, notes=(note,), objects=[{"rules": rules}])
    return tuple(EmittedFile(path=PurePosixPath(name), text=text) for name, text in files.items())


def _load(verified: VerifiedServing, shape: GroupShape) -> LoadMetrics:
    load = group_release(verified, shape.group).load_metrics
    assert load is not None  # as specs of other releases are refused
    return load


def _scaled(scaling: Autoscaling, shape: GroupShape) -> ScaledInstances:
    return next(scaled for scaled in scaling.roles if scaled.role is shape.group.role)


def _triggers(load: LoadMetrics, scaling: Autoscaling, shape: GroupShape) -> Iterator[_Trigger]:
    role, scaled = shape.group.role.value, _scaled(scaling, shape)
    sums = (f"sum by (%(by)s) ({gauge}{{%(labels)s}})" for gauge in load.requests(role))
    yield _Trigger(
        name=f"{role}_requests_running_and_waiting", query=" + ".join(sums), value=scaled.target
    )
    if scaling.kv_usage is not None and scaling.kv_usage < scaled.kv_usage_ratio:
        mean = f"avg by (%(by)s) ({load.kv_usage}{{%(labels)s}})"  # Over attention-data ranks.
        yield _Trigger(name=f"{role}_kv_cache_usage", query=mean, value=scaling.kv_usage)


def _pod_monitor(app: str) -> Object:
    servers = {"key": "group", "operator": "Exists"}
    scrape = {"port": PORT_NAME, "path": "/metrics", "interval": f"{SCRAPE_S:.0f}s"}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": app},
        "spec": {
            "selector": {"matchLabels": {"app": app}, "matchExpressions": [servers]},
            "podMetricsEndpoints": [scrape],
        },
    }


def _autoscaler(
    scaling: Autoscaling, shape: GroupShape, triggers: tuple[_Trigger, ...], *, app: str
) -> Object:
    """Return the object that counts a group's instances."""
    version, kind, spec = _KINDS[scaling.autoscaler]
    name, is_wide = f"{app}-{shape.name}", shape.nodes > 1
    target = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1" if is_wide else "apps/v1",
        "kind": "LeaderWorkerSet" if is_wide else "Deployment",
        "name": name,
    }
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name},
        "spec": {"scaleTargetRef": target} | spec(name, shape, _scaled(scaling, shape), triggers),
    }


def _scaled_object(
    name: str, shape: GroupShape, scaled: ScaledInstances, triggers: tuple[_Trigger, ...]
) -> Object:
    by_pod = {"labels": f'pod=~"{name}-.*"', "by": "pod"}
    return {
        "pollingInterval": int(SCRAPE_S),
        "minReplicaCount": scaled.at_least,
        "maxReplicaCount": scaled.at_most,
        # Without a metric nothing is known of the load: no instance is taken away.
        "fallback": {
            "failureThreshold": 3,
            "replicas": shape.group.count,
            "behavior": "currentReplicasIfHigher",
        },
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _BEHAVIOR}},
        "triggers": [
            {
                "type": "prometheus",
                "metricType": "AverageValue",
                "metadata": {
                    "serverAddress": "http://prometheus-operated.monitoring.svc:9090",
                    "query": f"sum({trigger.query % by_pod})",
                    "threshold": f"{trigger.value:.4g}",
                    "ignoreNullValues": "false",
                },
            }
            for trigger in triggers
        ],
    }


def _horizontal(
    _name: str, _shape: GroupShape, scaled: ScaledInstances, triggers: tuple[_Trigger, ...]
) -> Object:
    return {
        "minReplicas": scaled.at_least,
        "maxReplicas": scaled.at_most,
        "metrics": [
            {
                "type": "Pods",
                "pods": {
                    "metric": {"name": trigger.name},
                    "target": {
                        "type": "AverageValue",
                        "averageValue": f"{round(1000.0 * trigger.value)}m",
                    },
                },
            }
            for trigger in triggers
        ],
        "behavior": _BEHAVIOR,
    }


def _pod_autoscaler(
    _name: str, _shape: GroupShape, scaled: ScaledInstances, triggers: tuple[_Trigger, ...]
) -> Object:
    lowest = min(trigger.value for trigger in triggers)
    if lowest < 1.0:
        raise UnknownTargetError(
            f"emit: aibrix rounds targets down to whole numbers, and {lowest:.3g} would be 0; emit"
            " keda or hpa"
        )
    return {
        "scalingStrategy": "HPA",
        "minReplicas": scaled.at_least,
        "maxReplicas": scaled.at_most,
        "metricsSources": [
            {
                "metricSourceType": "custom",
                "targetMetric": trigger.name,
                "targetValue": f"{int(trigger.value)}",
            }
            for trigger in triggers
        ],
    }


_Spec = Callable[[str, GroupShape, ScaledInstances, tuple[_Trigger, ...]], Object]
_KINDS: Final[dict[str, tuple[str, str, _Spec]]] = {
    "keda": ("keda.sh/v1alpha1", "ScaledObject", _scaled_object),
    "hpa": ("autoscaling/v2", "HorizontalPodAutoscaler", _horizontal),
    "aibrix": ("autoscaling.aibrix.ai/v1alpha1", "PodAutoscaler", _pod_autoscaler),
}


def _adapter_rule(trigger: _Trigger, series: str) -> Object:
    """Return the rule that makes a metric of each pod that has the series."""
    grouped = {"labels": "<<.LabelMatchers>>", "by": "<<.GroupBy>>"}
    resources = {name: {"resource": name} for name in ("namespace", "pod")}
    return {
        "seriesQuery": f'{series}{{namespace!="",pod!=""}}',
        "resources": {"overrides": resources},
        "name": {"as": trigger.name},
        "metricsQuery": trigger.query % grouped,
    }
