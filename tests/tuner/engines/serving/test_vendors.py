"""Files of a deployment are those of its devices' vendor, and of an island a folder each."""

import json
import re
import shlex
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rows import each_row
from tests.tuner.engines.serving.testing import aggregated, disaggregated, islands, sample_serving
from tests.tuner.engines.testing import assert_golden, texts_of
from tests.tuner.models import example_model
from tuner.config.serve import Instances, PlannedKvTransfer, ServeDecision, ServeRouter
from tuner.engines.launchers.pods import POOL_LABEL
from tuner.engines.serve_writers import emit_all_serving, emit_serving, unlaunchable
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.serving.routers import RouterPolicy

GOLDEN = Path(__file__).parent / "golden" / "vendors"
MIXTRAL = example_model("mixtral-8x7b")
DEVICES = {"a": "h100-sxm", "b": "mi300x", "c": "ascend-910b"}
RESOURCES = {
    "h100-sxm": "nvidia.com/gpu",
    "mi300x": "amd.com/gpu",
    "ascend-910b": "huawei.com/Ascend910",
}
IMAGES = {
    ("vllm", "h100-sxm"): "vllm/vllm-openai:v0.33.0",
    ("vllm", "mi300x"): "vllm/vllm-openai-rocm:v0.33.0",
    ("vllm", "ascend-910b"): "quay.io/ascend/vllm-ascend:v0.23.0",
    ("sglang", "h100-sxm"): "lmsysorg/sglang:v0.5.23",
    ("sglang", "mi300x"): "lmsysorg/sglang:v0.5.23-rocm720-mi30x",
    ("sglang", "ascend-910b"): "quay.io/ascend/sglang:cann9.0.0-910b-v0.5.23",
}
GROUP: dict[str, Any] = {
    "devices": 8,
    "attention_tp": 4,
    "attention_dp": 2,
    "ep": 8,
    "a2a_backend": "allgather",
}
PREFILL = GROUP | {"devices": 4, "attention_dp": 1, "ep": 4, "count": 1, "a2a_backend": "none"}
DECODE = PREFILL | {"attention_tp": 2, "attention_dp": 2, "a2a_backend": "allgather"}


def _pair(one: str, other: str, **transfer: Any) -> ServeDecision:
    return disaggregated(
        prefill=PREFILL | {"pool": one},
        decode=DECODE | {"pool": other},
        from_pool=one,
        to_pool=other,
        **transfer,
    )


def _serving(decision: ServeDecision, engine: str = "vllm", **more: Any) -> VerifiedServing:
    return sample_serving(MIXTRAL, decision, engine=engine, devices=DEVICES, **more)


def _islands(names: tuple[str, str]) -> ServeDecision:
    decision = islands(names=names, pools=("a", "c"), share=0.75)
    groups = tuple(one.model_copy(update=GROUP) for one in decision.instances)
    return decision.model_copy(update={"instances": groups})


def _text(verified: VerifiedServing, target: str, name: str) -> str:
    return texts_of(emit_serving(target, verified))[name]


def test_container_and_resource_are_those_of_the_vendor() -> None:
    for engine, (pool, device) in product(("vllm", "sglang"), DEVICES.items()):
        verified = _serving(aggregated(pool=pool, **GROUP), engine)
        assert not unlaunchable(verified)
        objects = list(yaml.safe_load_all(_text(verified, "kubernetes", "deployment.yaml")))
        pods = [one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"]
        engines = [pod["containers"][0] for pod in pods if "resources" in pod["containers"][0]]
        assert {one["image"] for one in engines} == {IMAGES[engine, device]}
        assert [one["resources"]["limits"] for one in engines] == [{RESOURCES[device]: "8"}]


@each_row(
    ("pool", "variable"),
    (
        ("a", "CUDA_VISIBLE_DEVICES"),
        ("b", "HIP_VISIBLE_DEVICES"),
        ("c", "ASCEND_RT_VISIBLE_DEVICES"),
    ),
)
def test_devices_are_dealt_out_by_the_vendors_variable(pool: str, variable: str) -> None:
    verified = _serving(aggregated(pool=pool, **GROUP))
    assert f'{variable}="$3" PORT' in _text(verified, "local", "local.sh")
    assert f"({variable})" in _text(verified, "vllm", "aggregated.sh")


def test_deepep_is_refused_where_it_does_not_run() -> None:
    deepep = GROUP | {"a2a_backend": "deepep_normal"}
    assert not unlaunchable(_serving(aggregated(pool="a", **deepep)))
    for pool in ("b", "c"):
        line, *_ = unlaunchable(_serving(aggregated(pool=pool, **deepep)))
        assert "a2a_backend deepep_normal is not one of allgather, none" in line
    pcie = sample_serving(
        MIXTRAL, aggregated(pool="a", **deepep), engine="vllm", devices={"a": "l40s"}
    )
    (line,) = unlaunchable(pcie)
    assert "needs NVLink between the devices of a machine" in line


def test_caches_pass_between_nvidia_and_amd_through_host_memory() -> None:
    verified = _serving(_pair("b", "a", path="host"))
    assert not unlaunchable(verified)
    for name in ("prefill.sh", "decode.sh"):
        text = _text(verified, "vllm", name)
        assert '"kv_buffer_device": "cpu"' in text
        assert "--attention-backend TRITON_ATTN" in text
        assert "Both sides need the same MODEL, release and attention backend" in re.sub(
            r"\s*\n#\s*", " ", text
        )
    assert "--attention-backend" not in _text(_serving(_pair("a", "a")), "vllm", "prefill.sh")


@each_row(
    ("engine", "decision", "rules"),
    (
        ("vllm", _pair("a", "c", path="host"), ("connector", "release", "host_path")),
        ("sglang", _pair("a", "b", connector="mooncake", path="host"), ("host_path",)),
    ),
)
def test_a_pair_that_no_connector_joins_names_its_rules(
    engine: str, decision: Any, rules: Any
) -> None:
    lines = unlaunchable(_serving(decision, engine))
    for rule in rules:
        assert any(f"rule {rule}: " in line for line in lines), lines


def test_ascend_gets_the_plugins_connector_and_proxy() -> None:
    verified = _serving(_pair("c", "c", connector="ascend"))
    assert not unlaunchable(verified)
    text = _text(verified, "vllm", "decode.sh")
    assert "--all2all-backend" not in text
    option = next(line for line in text.splitlines() if "--kv-transfer-config" in line)
    _, quoted = shlex.split(option.rstrip("\\").replace('"$KV_PORT"', "30020"))
    config = json.loads(quoted)
    assert config["kv_connector"] == "MooncakeConnectorV1"
    assert config["kv_connector_extra_config"] == {
        "prefill": {"dp_size": 1, "tp_size": 4},
        "decode": {"dp_size": 2, "tp_size": 2},
    }
    assert "load_balance_proxy_server_example.py" in _text(verified, "vllm", "router.sh")
    wider = disaggregated(
        prefill=DECODE | {"pool": "c"},
        decode=PREFILL | {"pool": "c"},
        from_pool="c",
        to_pool="c",
        connector="ascend",
    )
    (line,) = unlaunchable(_serving(wider))
    assert "prefill's must be decode's at least" in line
    sglang = _text(_serving(_pair("c", "c", connector="ascend"), "sglang"), "sglang", "prefill.sh")
    assert "--disaggregation-transfer-backend ascend" in sglang
    assert "ASCEND_MF_STORE_URL" in sglang


def test_one_machine_refuses_and_islands_have_engines_of_their_own() -> None:
    with pytest.raises(UnknownTargetError, match="Dynamo's runtime images are for NVIDIA"):
        emit_serving("dynamo", _serving(aggregated(pool="b", **GROUP)))
    with pytest.raises(UnknownTargetError, match="no machine holds devices of amd and nvidia"):
        emit_serving("local", _serving(_pair("b", "a", path="host")))
    goal = {"engines": {"c": {"name": "sglang"}}}
    files = emit_all_serving(_serving(_islands(("x", "y")), emit=("vllm", "slurm"), goal=goal))
    assert {"x/vllm", "y/sglang"} < set(files)
    assert any("sglang.launch_server" in one.text for one in files["y/sglang"])


def test_islands_have_a_folder_each_and_a_router_in_front(tmp_path: Path) -> None:
    names, pools = ("nvidia", "huawei"), ("a", "c")
    files = emit_all_serving(_serving(_islands(names), emit=("vllm", "slurm", "kubernetes")))
    assert set(files) == {
        "front",
        *(f"{name}/{target}" for name in names for target in ("vllm", "slurm", "kubernetes")),
    }
    (front,) = files["front"]
    assert "WEIGHTS=(750 250)" in front.text
    path = tmp_path / "front.sh"
    path.write_text(front.text)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    without = subprocess.run(
        ["bash", str(path)], capture_output=True, text=True, check=False, env={"PATH": "/bin"}
    )
    assert without.returncode == 1
    assert "NVIDIA_URL" in without.stderr
    apps: list[tuple[str, str]] = []
    for name, pool in zip(names, pools, strict=True):
        deployment = files[f"{name}/kubernetes"][0].text
        assert IMAGES["vllm", DEVICES[pool]] in deployment
        # Islands of one vendor would otherwise take each other's machines.
        assert f"{POOL_LABEL}: {pool}" in deployment or f"{POOL_LABEL}: '{pool}'" in deployment
        objects = list(yaml.safe_load_all(deployment))
        apps += [(one["kind"], one["metadata"]["name"]) for one in objects]
        job = next(one.text for one in files[f"{name}/slurm"] if one.path.name == "job.sbatch")
        assert "--gpus-per-task=8" in job
        assert '"$JOB/../vllm"' in job
    assert len(set(apps)) == len(apps)  # One namespace holds both.


def test_a_single_chosen_pool_is_served_by_its_engine() -> None:
    goal = {"engines": {"c": {"name": "sglang"}}}
    both = _serving(_islands(("x", "y")), emit=("vllm", "slurm", "kubernetes"), goal=goal)
    only = aggregated(pool="c", **GROUP)
    plan = both.plan.model_copy(update={"decision": only})
    files = emit_all_serving(both.model_copy(update={"plan": plan, "decision": only}))
    assert set(files) == {"sglang", "slurm", "kubernetes"}
    # Machines of the pools that stand idle are not taken.
    assert re.search(rf"{POOL_LABEL}: '?c'?$", files["kubernetes"][0].text, re.MULTILINE)
    texts = [one.text for one in files["sglang"]]
    assert any("sglang.launch_server" in one for one in texts)
    assert not any("vllm serve" in one for one in texts)


def test_an_island_needs_no_other_pool_to_have_its_engine() -> None:
    # TensorRT-LLM does not serve on Ascend, which has an engine of its own.
    goal = {"engine": {"name": "trtllm"}, "engines": {"c": {"name": "vllm"}}}
    decision = _islands(("x", "y"))
    groups = tuple(
        one.model_copy(update={"attention_tp": 8, "attention_dp": 1, "a2a_backend": "none"})
        for one in decision.instances
    )
    decision = decision.model_copy(update={"instances": groups})
    files = emit_all_serving(_serving(decision, emit=("trtllm",), goal=goal))
    assert set(files) == {"x/trtllm", "y/vllm", "front"}
    # And the other way round: the engine of one pool is missing on the other's devices.
    goal = {"engine": {"name": "vllm"}, "engines": {"a": {"name": "trtllm"}}}
    files = emit_all_serving(_serving(decision, emit=("vllm",), goal=goal))
    assert set(files) == {"x/trtllm", "y/vllm", "front"}


def test_an_island_of_one_decode_instance_has_no_policy_to_choose_it_by() -> None:
    groups: list[Instances] = []
    paths: list[PlannedKvTransfer] = []
    for name, pool, decodes in (("x", "a", 3), ("y", "b", 1)):
        pair = _pair(pool, pool)
        counts = dict(zip(pair.instances, (2, decodes), strict=True))
        groups += [
            one.model_copy(update={"island": name, "count": count}) for one, count in counts.items()
        ]
        paths += pair.handovers
    decision = _islands(("x", "y")).model_copy(
        update={
            "mode": "disaggregated",
            "instances": tuple(groups),
            "handovers": tuple(paths),
            "router": ServeRouter(
                policy=RouterPolicy.LEAST_REQUESTS, decode_policy=RouterPolicy.POWER_OF_TWO
            ),
        }
    )
    files = emit_all_serving(_serving(decision, emit=("vllm",)))
    routers = {
        name: next(one.text for one in files[f"{name}/vllm"] if one.path.name == "router.sh")
        for name in ("x", "y")
    }
    assert "--decode-policy power_of_two" in routers["x"]
    assert "--decode-policy round_robin" in routers["y"]
    assert "--prefill-policy cache_aware" in routers["y"]


@each_row(
    ("name", "decision"),
    {
        "amd-nvidia": _pair("b", "a", path="host"),
        "huawei": _pair("c", "c", connector="ascend"),
    }.items(),
)
def test_files_of_each_vendor_equal_the_golden_ones(name: str, decision: Any) -> None:
    files = texts_of(emit_serving("vllm", _serving(decision)))
    for file in ("prefill.sh", "decode.sh", "router.sh"):
        assert_golden(files[file], GOLDEN / name / file)


def test_the_plugins_connector_gets_one_shape_per_side() -> None:
    decision = _pair("c", "c", connector="ascend")
    prefill, decode = decision.instances
    wider = prefill.model_copy(update={"devices": 8, "attention_tp": 8, "ep": 8})
    mixed = decision.model_copy(update={"instances": (prefill, wider, decode)})
    lines = unlaunchable(_serving(mixed))
    assert any("2 kinds of prefill instances: the connector of vllm-ascend" in one for one in lines)
