"""Autoscalers own the number of instances, by a load that can fire, and instances end empty.

The objects pass JSON Schemas that were written from their documentation
(autoscaler_schemas.yaml), checked here by the few keywords that these use.
"""

import re
import subprocess
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.patience import patient_s
from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    sample_serving,
    stages_beside,
)
from tests.tuner.models import example_model
from tuner.catalog.serve_rules.autoscalers import AUTOSCALERS
from tuner.config.serve import Role, ServeDecision
from tuner.engines.serve_writers import emit_all_serving
from tuner.errors import UnknownTargetError
from tuner.plans.autoscaling import Autoscaling, ScaledInstances
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

SCHEMAS = yaml.safe_load(Path(__file__).with_name("autoscaler_schemas.yaml").read_text("utf-8"))
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
DEEPSEEK = "moetune-deepseek-v3"


def _problems(value: Any, schema: dict[str, Any], where: str) -> list[str]:
    """Return where a value is not what a schema says."""
    if "$ref" in schema:
        return _problems(value, SCHEMAS["$defs"][schema["$ref"]], where)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return [f"{where}: {value!r} is no {schema['type']}"]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        surplus = [] if schema.get("additionalProperties", True) else [*value.keys() - known]
        missing = [key for key in schema.get("required", ()) if key not in value]
        return [f"{where}: {key}" for key in (*surplus, *missing)] + [
            problem
            for key in value.keys() & known
            for problem in _problems(value[key], known[key], f"{where}.{key}")
        ]
    if isinstance(value, list):
        short = len(value) < schema.get("minItems", 0)
        return [f"{where}: too few"] * short + [
            problem
            for index, item in enumerate(value)
            for problem in _problems(item, schema.get("items", {}), f"{where}[{index}]")
        ]
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return [f"{where}: {value!r} is not like {schema['pattern']}"]
    if isinstance(value, int) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        return [f"{where}: {value} is out of range"]
    return []


def _object_problems(each: dict[str, Any]) -> list[str]:
    """Return where an object is not what its document takes; of other kinds nothing is known."""
    known = SCHEMAS.get(each["kind"])
    if known is None:
        return []
    surplus = each.keys() ^ {"apiVersion", "kind", "metadata", "spec"}
    version = each["apiVersion"] != known["apiVersion"]
    named = _problems(each["metadata"]["name"], {"$ref": "name"}, "name")
    return [*surplus, *(["version"] * version), *named, *_problems(each["spec"], known["spec"], "")]


def _scaled(role: Role, **changes: Any) -> ScaledInstances:
    fields: dict[str, Any] = {
        "role": role,
        "at_least": 2,
        "at_most": 9,
        "requests": 27.0,
        "kv_usage_ratio": 0.23,
        "longest_request_s": 61.4,
    }
    return ScaledInstances.model_validate(fields | changes)


def scaled_serving(
    model: ModelSpec,
    decision: ServeDecision,
    autoscaler: str,
    *,
    engine: str = "vllm",
    kv_usage: float | None = None,
    devices: Mapping[str, str] = MappingProxyType({}),
    **changes: Any,
) -> VerifiedServing:
    """Return a plan of round numbers whose instances an autoscaler counts."""
    verified = sample_serving(
        model, decision, engine=engine, emit=(engine, "kubernetes", autoscaler), devices=devices
    )
    scaling = Autoscaling(
        autoscaler=autoscaler,
        capacity_per_s=8.0,
        roles=tuple(_scaled(group.role, **changes) for group in decision.instances),
        kv_usage=kv_usage,
        start_up_s=60.0,
    )
    return verified.model_copy(
        update={"plan": verified.plan.model_copy(update={"autoscaling": scaling})}
    )


def _files(verified: VerifiedServing) -> dict[str, str]:
    files = emit_all_serving(verified)["kubernetes"]
    return {str(file.path): file.text for file in files}


def _objects(verified: VerifiedServing, *names: str) -> list[dict[str, Any]]:
    files = _files(verified)
    chosen = names or ("deployment.yaml", "autoscaler.yaml")
    return [each for name in chosen for each in yaml.safe_load_all(files[name])]


def _by_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each.get("kind") == kind]


KINDS = {"keda": "ScaledObject", "hpa": "HorizontalPodAutoscaler", "aibrix": "PodAutoscaler"}
DECISIONS = (
    aggregated(),
    aggregated(devices=16, attention_dp=16, ep=16),
    disaggregated(),
)


def test_objects_are_what_their_documents_take(deepseek: ModelSpec) -> None:
    for autoscaler in AUTOSCALERS:
        for decision in DECISIONS:
            for engine in ("vllm", "sglang"):
                verified = scaled_serving(deepseek, decision, autoscaler, engine=engine)
                objects = _objects(verified)
                assert not [problem for each in objects for problem in _object_problems(each)]
                scaled = _by_kind(objects, KINDS[autoscaler])
                # An object a role, and of each the object that it counts.
                assert len(scaled) == len(decision.instances)
                counted = {(each["kind"], each["metadata"]["name"]): each for each in objects}
                for each in scaled:
                    target = each["spec"]["scaleTargetRef"]
                    assert "replicas" not in counted[target["kind"], target["name"]]["spec"]
                assert len(_by_kind(objects, "PodDisruptionBudget")) == len(decision.instances)
                assert len(_by_kind(objects, "PodMonitor")) == 1


def test_a_schema_notices_what_is_wrong() -> None:
    (each,) = _by_kind(
        _objects(scaled_serving(example_model("llama-3.1-8b"), _small(), "hpa")),
        "HorizontalPodAutoscaler",
    )
    assert not _object_problems(each)
    changes: tuple[dict[str, Any], ...] = (
        {"maxReplicas": 0},
        {"minReplicas": "2"},
        {"targetCPU": 50},
        {"metrics": []},
    )
    for change in changes:
        assert _object_problems(each | {"spec": each["spec"] | change}), change
    assert _object_problems({**each, "apiVersion": "autoscaling/v1"})


def _small(**changes: Any) -> ServeDecision:
    fields = {"devices": 1, "attention_dp": 1, "ep": 1, "count": 2}
    return aggregated(**(fields | changes))


def test_running_and_waiting_requests_fire_at_the_share_of_what_instances_hold(
    deepseek: ModelSpec,
) -> None:
    # 0.85 of 27 requests are 22.95.
    keda = _by_kind(_objects(scaled_serving(deepseek, aggregated(), "keda")), "ScaledObject")[0]
    (trigger,) = keda["spec"]["triggers"]
    pods = f'pod=~"{DEEPSEEK}-aggregated-.*"'
    assert trigger["metadata"]["query"] == (
        f"sum(sum by (pod) (vllm:num_requests_running{{{pods}}})"
        f" + sum by (pod) (vllm:num_requests_waiting{{{pods}}}))"
    )
    assert trigger["metadata"]["threshold"] == "22.95"
    assert (keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"]) == (2, 9)
    hpa = _by_kind(
        _objects(scaled_serving(deepseek, aggregated(), "hpa")), "HorizontalPodAutoscaler"
    )[0]
    (metric,) = hpa["spec"]["metrics"]
    assert metric["pods"]["target"]["averageValue"] == "22950m"
    aibrix = _by_kind(_objects(scaled_serving(deepseek, aggregated(), "aibrix")), "PodAutoscaler")[
        0
    ]
    (source,) = aibrix["spec"]["metricsSources"]
    assert source["targetValue"] == "22"
    assert source["targetMetric"] == metric["pods"]["metric"]["name"]


@each_row("autoscaler", ("hpa", "aibrix"))
def test_the_adapter_makes_the_metric_that_the_autoscaler_asks_for(
    deepseek: ModelSpec, autoscaler: str
) -> None:
    verified = scaled_serving(deepseek, disaggregated(), autoscaler, engine="sglang")
    (rules,) = _objects(verified, "adapter-rules.yaml")
    assert not _problems(rules, SCHEMAS["AdapterRules"], "")
    made = {rule["name"]["as"]: rule["metricsQuery"] for rule in rules["rules"]}
    assert "adapter-rules.yaml" not in _files(scaled_serving(deepseek, aggregated(), "keda"))
    for each in _by_kind(_objects(verified), KINDS[autoscaler]):
        spec = each["spec"]
        asked = (
            [metric["pods"]["metric"]["name"] for metric in spec["metrics"]]
            if autoscaler == "hpa"
            else [source["targetMetric"] for source in spec["metricsSources"]]
        )
        assert set(asked) <= made.keys()
    # A decode instance also has requests whose caches are on their way.
    assert "sglang:num_decode_transfer_queue_reqs" in made["decode_requests_running_and_waiting"]
    assert "decode" not in made["prefill_requests_running_and_waiting"]


def test_the_kv_cache_fires_too_where_its_share_is_reached(deepseek: ModelSpec) -> None:
    verified = scaled_serving(deepseek, aggregated(), "keda", kv_usage=0.2)
    (keda,) = _by_kind(_objects(verified), "ScaledObject")
    _, trigger = keda["spec"]["triggers"]
    assert "avg by (pod) (vllm:kv_cache_usage_perc{" in trigger["metadata"]["query"]
    assert trigger["metadata"]["threshold"] == "0.2"
    (hpa,) = _by_kind(
        _objects(scaled_serving(deepseek, aggregated(), "hpa", kv_usage=0.2)),
        "HorizontalPodAutoscaler",
    )
    assert [m["pods"]["target"]["averageValue"] for m in hpa["spec"]["metrics"]] == [
        "22950m",
        "200m",
    ]
    with pytest.raises(UnknownTargetError, match="aibrix rounds targets down"):
        _files(scaled_serving(deepseek, aggregated(), "aibrix", kv_usage=0.2))


def test_servers_export_their_load_and_are_found_as_they_come(deepseek: ModelSpec) -> None:
    for engine in ("vllm", "sglang"):
        verified = scaled_serving(deepseek, aggregated(count=1), "keda", engine=engine)
        objects = _objects(verified)
        (server, router) = _by_kind(objects, "Deployment")
        (container,) = server["spec"]["template"]["spec"]["containers"]
        assert ("--enable-metrics" in container["command"][-1]) == (engine == "sglang")
        assert container["ports"] == [{"containerPort": 30000, "name": "http"}]
        # A single instance has a router, too: others come.
        command = router["spec"]["template"]["spec"]["containers"][0]["command"][-1]
        assert "--service-discovery" in command
    fixed = sample_serving(deepseek, aggregated(), engine="sglang", emit=("sglang", "kubernetes"))
    assert "--enable-metrics" not in _files(fixed)["deployment.yaml"]
    assert "autoscaler.yaml" not in _files(fixed)


def test_instances_that_were_not_planned_keep_their_number(deepseek: ModelSpec) -> None:
    verified = scaled_serving(deepseek, aggregated(), "hpa")
    decision = aggregated(max_batch=128)
    launched = verified.model_copy(update={"decision": decision})
    assert "planned for other instances than these" in _files(launched)["deployment.yaml"]
    objects = _objects(launched, "deployment.yaml")
    assert objects[0]["spec"]["replicas"] == 2
    assert not _by_kind(objects, "PodDisruptionBudget")


class _Load(BaseHTTPRequestHandler):
    """Answers with a load that falls by one request at each look."""

    left = (3, 2, 0)
    looks = 0

    def do_GET(self) -> None:
        running = self.left[min(type(self).looks, len(self.left) - 1)]
        type(self).looks += 1
        text = (
            f'vllm:num_requests_running{{engine="0"}} {float(running)}\n'
            'vllm:num_requests_running{engine="1"} 0.0\n'
            'vllm:num_requests_waiting{engine="0"} 0.0\n'
            "vllm:num_requests_waiting_by_reason 7.0\n"
        )
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_arguments: Any) -> None:
        pass


def _drain(verified: VerifiedServing, name: str = "Deployment") -> tuple[str, dict[str, Any]]:
    each = _by_kind(_objects(verified), name)[0]
    template = (
        each["spec"]["template"]
        if name == "Deployment"
        else each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    )
    pod = template["spec"]
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["bash", "-c"]
    return command[2], pod


def test_an_instance_ends_once_it_runs_and_queues_nothing(deepseek: ModelSpec) -> None:
    script, pod = _drain(scaled_serving(deepseek, aggregated(), "hpa"))
    # 15 s until no request is sent, and the longest request.
    assert pod["terminationGracePeriodSeconds"] == 15 + 62
    server = HTTPServer(("127.0.0.1", 0), _Load)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        script = script.replace("sleep 15", "true").replace("sleep 1\n", "true\n")
        script = script.replace(":30000", f":{server.server_port}")
        subprocess.run(["bash", "-c", script], check=True, timeout=patient_s(30))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert _Load.looks == len(_Load.left)
    # A server that is gone holds nobody.
    subprocess.run(["bash", "-c", script], check=True, timeout=patient_s(30))


def test_roles_wait_for_their_caches_and_machines_for_their_first(deepseek: ModelSpec) -> None:
    verified = scaled_serving(deepseek, disaggregated(), "hpa", engine="sglang")
    script, pod = _drain(verified)
    assert script.count("sleep 15") == 2
    assert "num_prefill_inflight_queue_reqs" in script
    assert pod["terminationGracePeriodSeconds"] == 2 * 15 + 62
    script, _ = _drain(verified, "LeaderWorkerSet")
    assert "${LWS_LEADER_ADDRESS:-localhost}" in script
    budgets = _by_kind(_objects(verified), "PodDisruptionBudget")
    assert [each["spec"]["selector"]["matchLabels"] for each in budgets] == [
        {"app": DEEPSEEK, "group": "prefill"},
        {"leaderworkerset.sigs.k8s.io/name": f"{DEEPSEEK}-decode"},
    ]


def test_refuses_where_new_instances_would_get_no_requests(deepseek: ModelSpec) -> None:
    stages = stages_beside(stage_machines=1)
    with pytest.raises(UnknownTargetError, match="all instances share a container"):
        _files(scaled_serving(deepseek, stages, "keda"))
    apart = disaggregated(connector="ascend", decode={"devices": 8, "attention_dp": 8, "ep": 8})
    verified = scaled_serving(deepseek, apart, "hpa", devices={"h100": "ascend-910b"})
    with pytest.raises(UnknownTargetError, match=r"load balance proxy .* reads addresses once"):
        _files(verified)


def test_words_say_what_fires_and_how_long_it_takes() -> None:
    scaling = Autoscaling(
        autoscaler="keda",
        capacity_per_s=8.0,
        roles=(_scaled(Role.AGGREGATED),),
        start_up_s=60.0,
        node_provisioning_s=180.0,
    )
    fires, kv_cache, delay = scaling.words()
    assert "above 22.95 running and waiting requests each" in fires
    assert "2 to 9 instances" in fires
    assert "23 % of it is in use there, so that a trigger above that never fires" in kv_cache
    assert delay == (
        "a scale-up takes up to 4.50 min: 30.0 s until it fires, 3.00 min for a machine, 1.00 min"
        " of start-up"
    )
    unknown = scaling.model_copy(update={"start_up_s": None})
    assert "state goal.autoscaler.start_up" in [*unknown.words()][-1]
