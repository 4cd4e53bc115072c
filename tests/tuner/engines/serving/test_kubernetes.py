"""The objects are of the form that Kubernetes, LeaderWorkerSet and Dynamo's operator take.

The schemas are our own: required and known fields of apps/v1, batch/v1 and v1, of the resource
definition leaderworkerset.x-k8s.io/v1 (kubernetes-sigs/lws) and of nvidia.com/v1beta1
DynamoGraphDeployment (github.com/ai-dynamo/dynamo, deploy/operator/api/v1beta1).
"""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    aggregated,
    disaggregated,
    dynamo_graph,
    sample_serving,
    shared_device,
)
from tests.tuner.models import example_model
from tuner.config.serve import ServeDecision
from tuner.engines.serve_writers import emit_serving
from tuner.engines.serving.releases import ENGINES
from tuner.spec.model import ModelSpec

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
COMPONENT = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?")

DECISIONS = (aggregated(), disaggregated(), disaggregated(prefill={"pool": "h20"}))


def _objects(target: str, engine: str, decision: ServeDecision, model: ModelSpec) -> list[Any]:
    files = emit_serving(target, sample_serving(model, decision, engine=engine))
    return [each for file in files for each in yaml.safe_load_all(file.text)]


def _keys(tree: dict[str, Any], *, needed: set[str], known: set[str] = frozenset()) -> None:  # type: ignore[assignment]  # an empty default
    assert needed <= set(tree) <= needed | known, sorted(set(tree) ^ needed)


def _pod_template(template: dict[str, Any], *, nodes: bool = True) -> None:
    _keys(template, needed={"spec"}, known={"metadata"})
    spec = template["spec"]
    _keys(
        spec,
        needed={"containers"},
        known={"volumes", "serviceAccountName", "restartPolicy", "nodeSelector"},
    )
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for container in spec["containers"]:
        _keys(
            container,
            needed={"name", "image", "command"},
            known={"args", "env", "ports", "readinessProbe", "resources", "volumeMounts"},
        )
        assert DNS_LABEL.fullmatch(container["name"])
        assert all(isinstance(word, str) for word in container["command"])
        assert all(isinstance(word, str) for word in container.get("args", ()))
        for entry in container.get("env", ()):
            assert len(entry) == 2
            assert isinstance(entry.get("value", ""), str)
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes


def _deployment(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "apps/v1"
    spec = each["spec"]
    _keys(spec, needed={"replicas", "selector", "template"}, known={"strategy"})
    chosen = spec["selector"]["matchLabels"]
    assert chosen.items() <= spec["template"]["metadata"]["labels"].items()
    _pod_template(spec["template"])


def _leader_worker_set(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = each["spec"]
    _keys(spec, needed={"leaderWorkerTemplate", "replicas"})
    template = spec["leaderWorkerTemplate"]
    _keys(template, needed={"workerTemplate", "size"}, known={"leaderTemplate", "restartPolicy"})
    assert template["size"] > 1
    assert template["restartPolicy"] in (
        "Default",
        "RecreateGroupOnPodRestart",
        "RecreateGroupAfterStart",
        "None",
    )
    _pod_template(template["leaderTemplate"])
    _pod_template(template["workerTemplate"])
    # A worker that a Service or the router chose would answer nobody.
    assert "labels" not in template["workerTemplate"].get("metadata", {})


def _service(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "v1"
    _keys(each["spec"], needed={"selector", "ports"}, known={"clusterIP"})
    assert each["spec"].get("clusterIP", "None") == "None"


def _job(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "batch/v1"
    _keys(each["spec"], needed={"template"}, known={"backoffLimit"})
    assert each["spec"]["template"]["spec"]["restartPolicy"] in ("Never", "OnFailure")
    _pod_template(each["spec"]["template"])


def _config_map(each: dict[str, Any]) -> None:
    assert all(re.fullmatch(r"[-._a-zA-Z0-9]+", name) for name in each["data"])
    assert sum(map(len, each["data"].values())) < 2**20


def _graph(each: dict[str, Any]) -> None:
    assert each["apiVersion"] == "nvidia.com/v1beta1"
    spec = each["spec"]
    _keys(spec, needed={"backendFramework", "components"}, known={"env"})
    assert spec["backendFramework"] in ("sglang", "vllm", "trtllm")
    assert len(spec["components"]) <= 25
    names = [component["name"].lower() for component in spec["components"]]
    assert len(set(names)) == len(names)
    for component in spec["components"]:
        _keys(
            component,
            needed={"name", "type", "replicas", "podTemplate"},
            known={"multinode", "sharedMemorySize"},
        )
        mounts = component["podTemplate"]["spec"]["containers"][0].get("volumeMounts", ())
        has_own = any(mount["mountPath"] == "/dev/shm" for mount in mounts)
        assert has_own == (component.get("sharedMemorySize") == "0")
        assert COMPONENT.fullmatch(component["name"])
        assert component["type"] in ("frontend", "worker", "prefill", "decode")
        assert component.get("multinode", {"nodeCount": 2})["nodeCount"] >= 2
        _pod_template(component["podTemplate"])
        (main,) = component["podTemplate"]["spec"]["containers"]
        assert main["name"] == "main"
        # The operator reads Dynamo's own release off the image.
        assert re.fullmatch(r".+:\d+\.\d+\.\d+", main["image"])
        # Grove joins both names; 45 letters are what is left of a pod's.
        assert len(each["metadata"]["name"]) + len(component["name"]) <= 45


def _plain(each: dict[str, Any]) -> None:
    assert each["apiVersion"] in ("v1", "rbac.authorization.k8s.io/v1")


SCHEMAS: dict[str, Callable[[dict[str, Any]], None]] = {
    "Deployment": _deployment,
    "LeaderWorkerSet": _leader_worker_set,
    "Service": _service,
    "Job": _job,
    "ConfigMap": _config_map,
    "DynamoGraphDeployment": _graph,
    "ServiceAccount": _plain,
    "Role": _plain,
    "RoleBinding": _plain,
}


@each_row(("target", "engine", "decision"), product(("kubernetes", "dynamo"), ENGINES, DECISIONS))
def test_objects_are_of_the_form_that_is_taken(
    deepseek: ModelSpec, target: Any, engine: Any, decision: Any
) -> None:
    if (target, engine, decision.mode) == ("kubernetes", "trtllm", "disaggregated"):
        # Instances over several machines, which Kubernetes alone cannot start for this engine.
        return
    objects = _objects(target, engine, decision, deepseek)
    for each in objects:
        assert DNS_LABEL.fullmatch(each["metadata"]["name"])
        SCHEMAS[each["kind"]](each)
    keys = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(keys)) == len(keys)


def _expanded(word: str, values: dict[str, str]) -> str:
    """Replace `$(NAME)` and `$$` as Kubernetes does (third_party/forked/golang/expansion)."""
    found, index = "", 0
    while index < len(word):
        if word[index : index + 2] == "$$":
            found, index = found + "$", index + 2
        elif word[index : index + 2] == "$(" and ")" in word[index:]:
            end = word.index(")", index)
            found += values.get(word[index + 2 : end], word[index : end + 1])
            index = end + 1
        else:
            found, index = found + word[index], index + 1
    return found


@each_row("engine", ENGINES)
def test_kubernetes_leaves_the_commands_as_they_are(deepseek: ModelSpec, engine: Any) -> None:
    for each in _objects("kubernetes", engine, aggregated(), deepseek):
        if each["kind"] not in ("Deployment", "Job"):
            continue
        (container,) = each["spec"]["template"]["spec"]["containers"]
        values = {entry["name"]: "X" for entry in container["env"]}
        script = container["command"][-1]
        assert _expanded(script, values) == script


def test_names_arrive_as_they_were_and_no_rollout_asks_for_more_devices(
    deepseek: ModelSpec,
) -> None:
    model = deepseek.model_copy(update={"name": "a$(PORT)$$b"})
    each = _objects("kubernetes", "sglang", aggregated(), model)[0]
    (container,) = each["spec"]["template"]["spec"]["containers"]
    (value,) = (entry["value"] for entry in container["env"] if entry["name"] == "MODEL")
    assert _expanded(value, {"PORT": "30000"}) == "a$(PORT)$$b"
    each = _objects("kubernetes", "vllm", aggregated(), deepseek)[0]
    assert each["spec"]["strategy"] == {"type": "Recreate"}


def test_the_router_finds_leaders_only(deepseek: ModelSpec) -> None:
    objects = _objects("kubernetes", "sglang", disaggregated(), deepseek)
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in objects}
    router = by_name["Deployment", "moetune-deepseek-v3-router"]
    script = router["spec"]["template"]["spec"]["containers"][0]["command"][-1]
    selectors = dict(re.findall(r"--(prefill|decode)-selector (.+?) *\\?\n", script))
    decode = by_name["LeaderWorkerSet", "moetune-deepseek-v3-decode"]
    leaders = decode["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    chosen = dict(pair.split("=") for pair in selectors["decode"].split())
    assert chosen.items() <= leaders.items()
    prefill = by_name["Deployment", "moetune-deepseek-v3-prefill"]["spec"]["template"]["metadata"]
    assert prefill["annotations"] == {"sglang.ai/bootstrap-port": "30010"}
    assert "pods" in by_name["Role", "moetune-deepseek-v3-router"]["rules"][0]["resources"]


def test_files_reach_the_pods_that_read_them(deepseek: ModelSpec) -> None:
    objects = _objects("dynamo", "trtllm", disaggregated(), deepseek)
    (files,) = (each for each in objects if each["kind"] == "ConfigMap")
    (graph,) = (each for each in objects if each["kind"] == "DynamoGraphDeployment")
    for component in graph["spec"]["components"][1:]:
        pod = component["podTemplate"]["spec"]
        (volume,) = (each for each in pod["volumes"] if "configMap" in each)
        assert volume["configMap"]["name"] == files["metadata"]["name"]
        args = pod["containers"][0]["args"]
        path = Path(args[args.index("--extra-engine-args") + 1])
        assert path.name in files["data"]
        (mount,) = (
            each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume["name"]
        )
        assert str(path.parent) == mount["mountPath"]


EAGLE = {"speculative": {"method": "eagle", "draft_tokens": 2, "acceptance": 0.6}}


@each_row("engine", ("sglang", "vllm"))
def test_pods_read_where_the_draft_layer_lies_from_a_variable(
    deepseek: ModelSpec, engine: str
) -> None:
    verified = sample_serving(deepseek, aggregated(draft_tokens=2), engine=engine, goal=EAGLE)
    option = "--spec-model" if engine == "vllm" else "--speculative-draft-model-path"
    text, graph = dynamo_graph(verified)
    assert "# Put the path or name of the weights into MODEL and DRAFT_MODEL" in text
    assert {"name": "DRAFT_MODEL", "value": ""} in graph["spec"]["env"]
    args = graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["args"]
    assert args[args.index(option) + 1] == "$(DRAFT_MODEL)"
    (pod, *_) = (
        each["spec"]["template"]["spec"]["containers"][0]
        for file in emit_serving("kubernetes", verified)
        for each in yaml.safe_load_all(file.text)
        if each["kind"] == "Deployment"
    )
    assert {"name": "DRAFT_MODEL", "value": ""} in pod["env"]
    assert f'{option} "$DRAFT_MODEL"' in pod["command"][-1]


def test_a_frontend_that_routes_by_caches_hears_of_them(deepseek: ModelSpec) -> None:
    options = {
        "sglang": "--kv-events-config",
        "vllm": "--kv-events-config",
        "trtllm": "--publish-kv-events",
    }
    cached = {"concurrency": 8, "input_tokens": 900, "output_tokens": 90, "prefix_hit": 0.5}
    for (engine, option), traffic in product(
        options.items(), (cached, cached | {"prefix_hit": 0.0})
    ):
        verified = sample_serving(
            deepseek, disaggregated(), engine=engine, goal={"traffic": traffic}
        )
        _, graph = dynamo_graph(verified)
        told = {
            component["name"]: component["podTemplate"]["spec"]["containers"][0]["args"]
            for component in graph["spec"]["components"]
        }
        by_cache = bool(traffic["prefix_hit"])
        assert told["frontend"][-1] == ("kv" if by_cache else "round-robin")
        assert (option in told["prefill"]) == by_cache
        assert option not in told["decode"]


@each_row("target", ("kubernetes", "dynamo"))
def test_pods_that_share_devices_have_the_division(target: str) -> None:
    objects = _objects(target, "sglang", shared_device(), example_model("qwen3-235b-a22b"))
    (files,) = (each["data"] for each in objects if each["kind"] == "ConfigMap")
    (text,) = files.values()
    assert yaml.safe_load(text)["manual_divisions"] == [[56, 76, 1]]
    (name,) = files
    assert f"/{name}" in yaml.safe_dump(objects[1:])
