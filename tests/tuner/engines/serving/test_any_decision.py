"""Whatever is decided, launchers ask for exactly its devices, or one line says why there are none.

The counter reads the emitted files alone: directives, resource limits, device lists, and options as
the engines themselves count them (SGLang's --tp-size has all devices of a pipeline stage, vLLM's
--tensor-parallel-size those of one data-parallel rank).
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import present
from tests.patience import patient_s
from tests.rows import each_row
from tests.tuner.engines.serving.testing import (
    AFD_ENGINE,
    aggregated,
    attention_expert,
    disaggregated,
    sample_instances,
    sample_serving,
    shared_device,
)
from tests.tuner.engines.testing import directives_of, texts_of
from tests.tuner.models import example_model
from tuner.config.serve import Instances, PlannedKvTransfer, Role, ServeDecision
from tuner.engines.serve_writers import SERVE_EMITTERS, emit_serving, unlaunchable
from tuner.engines.serving.releases import ENGINES
from tuner.engines.serving.shape import group_shapes
from tuner.errors import UnknownTargetError
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

MODES = ("aggregated", "disaggregated", "shared_device", "attention_expert", "prefill_offload")
ROLES = {
    "aggregated": (Role.AGGREGATED,),
    "disaggregated": (Role.PREFILL, Role.DECODE),
    "shared_device": (Role.AGGREGATED,),
    "attention_expert": (Role.PREFILL, Role.ATTENTION, Role.EXPERT),
    "prefill_offload": (Role.PREFILL, Role.AGGREGATED),
}
DEVICES = {"h100": "h100", "A Pool_of H20s": "h20", "l40s": "l40s"}
GOAL = {"speculative": {"method": "mtp", "draft_tokens": 4, "acceptance": 0.7}}
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
BENCHES = {"bench_vllm.sh", "bench_aiperf.sh", "router.sh", "cell.sh", "cell-2.sh"}


@pytest.fixture(scope="module", params=["deepseek-v3", "qwen3-235b-a22b"])
def model(request: pytest.FixtureRequest) -> ModelSpec:
    return example_model(str(request.param))


@st.composite
def decisions(draw: Any) -> ServeDecision:
    """Decisions of every mode, most of which some engine can launch."""
    mode = draw(st.sampled_from(MODES))
    # One tensor degree for all, so that caches fit together more often than not.
    tensor = draw(st.sampled_from([1, 2, 4, 8]))
    page = draw(st.sampled_from([None, 64]))
    drafts = draw(st.sampled_from([0, 0, 3]))
    groups = tuple(
        draw(_groups(role, mode=mode, tensor=tensor, page=page, drafts=drafts))
        for role in ROLES[mode]
        for _ in range(draw(st.integers(1, 2)))
    )
    ends = PlannedKvTransfer(
        from_pool=groups[0].pool,
        to_pool=groups[-1].pool,
        connector=draw(st.sampled_from(["nixl", "mooncake"])),
        path="device",
        request_bytes=2**30,
        seconds=0.01,
    )
    return ServeDecision(
        mode=mode,
        instances=groups,
        handovers=(ends,) if Role.PREFILL in ROLES[mode] else (),
        offload_above_tokens=2048 if mode == "prefill_offload" else None,
    )


@st.composite
def _groups(
    draw: Any, role: Role, *, mode: str, tensor: int, page: int | None, drafts: int
) -> Instances:
    is_shared = mode == "shared_device"
    data = 1 if is_shared else draw(st.sampled_from([1, 2, 4, 16]))
    stages = 1 if is_shared or role is Role.DECODE else draw(st.sampled_from([1, 1, 2, 4]))
    ranks = tensor * data
    whole = draw(st.booleans())
    return sample_instances(
        role,
        pool=draw(st.sampled_from(sorted(DEVICES))),
        count=draw(st.integers(1, 4)),
        devices=ranks * stages,
        attention_tp=tensor,
        attention_dp=data,
        pp=stages,
        ep=ranks if whole else 1,
        moe_tp=1 if whole else ranks,
        page_size=page,
        draft_tokens=0 if is_shared or role is Role.PREFILL or stages > 1 else drafts,
        chunked_prefill=not is_shared,
        prefill_share_ratio=0.5 if is_shared else None,
    )


@settings(deadline=None, max_examples=20)
@given(decision=decisions(), devices_per_node=st.sampled_from([4, 8]))
def test_requested_devices_are_those_of_the_decision_or_a_line_says_why(
    model: ModelSpec, decision: ServeDecision, devices_per_node: int
) -> None:
    for engine in ENGINES:
        verified = _serving(model, decision, engine, devices_per_node=devices_per_node)
        broken = unlaunchable(verified)
        if broken:
            assert all(line.isprintable() for line in broken)
            with pytest.raises(ValueError, match=re.escape(broken[0])):
                emit_serving(engine, verified)
        else:
            _count(verified, engine)


WIDE: dict[str, Any] = {"devices": 16, "attention_dp": 1, "attention_tp": 8, "ep": 8, "pp": 2}
WHOLE = sample_instances(Role.AGGREGATED)


COUNTED = (
    aggregated(**WIDE),
    disaggregated(),
    disaggregated(decode={"draft_tokens": 3, "page_size": 64}, prefill={"page_size": 64}),
    aggregated().model_copy(
        update={"instances": (WHOLE, WHOLE.model_copy(update={"pool": "l40s", "count": 3}))}
    ),
    shared_device(),
    attention_expert(),
    attention_expert(expert={"devices": 4, "attention_dp": 4, "ep": 4}),
)


@each_row(("engine", "decision"), product(ENGINES, COUNTED))
def test_every_mode_that_an_engine_has_is_counted(
    model: ModelSpec, engine: Any, decision: Any
) -> None:
    verified = _serving(model, decision, engine)
    if unlaunchable(verified):
        is_shared = decision.mode == "shared_device"
        has_it = model.architecture == "Qwen3MoeForCausalLM" and engine == "sglang"
        drafts = bool(decision.instances[-1].draft_tokens)
        has_afd_units = decision.mode == "attention_expert" and engine != "vllm"
        assert has_afd_units or (is_shared and not has_it) or (drafts and not model.mtp_num_layers)
        return
    _count(verified, engine)


def _serving(
    model: ModelSpec, decision: ServeDecision, engine: str, *, devices_per_node: int = 8
) -> VerifiedServing:
    goal = GOAL if any(group.draft_tokens for group in decision.instances) else {}
    if engine == "vllm" and decision.mode == "attention_expert":
        goal = goal | AFD_ENGINE
    return sample_serving(
        model,
        decision,
        engine=engine,
        goal=goal,
        devices_per_node=devices_per_node,
        devices=DEVICES,
    )


def _count(verified: VerifiedServing, engine: str) -> None:
    own = texts_of(emit_serving(engine, verified))
    wide = any(shape.nodes > 1 for shape in group_shapes(verified))
    for target in SERVE_EMITTERS:
        if target in ENGINES and target != engine:
            continue
        if verified.decision.mode == "attention_expert" and target in ("kubernetes", "dynamo"):
            continue
        if (engine, target) == ("trtllm", "kubernetes") and wide:
            with pytest.raises(UnknownTargetError, match="by MPI; emit slurm or dynamo"):
                emit_serving(target, verified)
            continue
        files = texts_of(emit_serving(target, verified))
        counted = COUNTERS.get(target, _scripts)(files, engine)
        assert counted == verified.decision.num_devices, target
        if target == "local":
            # Every script that is started lies in the engine's folder.
            started = set(re.findall(r"^start (\S+) ", files["local.sh"], re.MULTILINE))
            assert {f"{name}.sh" for name in started} == _servers(own)


@settings(deadline=None, max_examples=8)
@given(decision=decisions())
def test_every_script_is_bash_and_every_name_a_label(decision: ServeDecision) -> None:
    model = example_model("deepseek-v3")
    bash = present(shutil.which("bash"))
    for engine in ENGINES:
        verified = _serving(model, decision, engine)
        if unlaunchable(verified):
            continue
        scripts = []
        for target in (engine, "slurm", "local"):
            files = emit_serving(target, verified)
            scripts += [f.text for f in files if f.path.suffix in (".sh", ".sbatch")]
        checked = subprocess.run(
            [bash, "-n"],
            input="\n".join(scripts),
            text=True,
            capture_output=True,
            check=False,
            timeout=patient_s(60),
        )
        assert checked.returncode == 0, checked.stderr
        if decision.mode == "attention_expert":
            continue
        for file in emit_serving("dynamo", verified):
            for each in yaml.safe_load_all(file.text):
                names = [part["name"] for part in each.get("spec", {}).get("components", ())]
                names.append(each["metadata"]["name"])
                assert all(map(DNS_LABEL.fullmatch, names))


def _servers(files: dict[str, str]) -> set[str]:
    return {name for name in files if name.endswith(".sh")} - BENCHES


def _scripts(files: dict[str, str], engine: str) -> int:
    total = 0
    for name, text in files.items():
        if name not in _servers(files):
            continue
        (instances,) = re.findall(r"Instances to start: (\d+)", text)
        if engine == "trtllm":
            options = yaml.safe_load(files[name.removesuffix(".sh") + ".yaml"])
            each = options["tensor_parallel_size"] * options["pipeline_parallel_size"]
        else:
            each = _of_words(text, engine)
        total += int(instances) * each
    return total


def _of_words(text: str, engine: str) -> int:
    names = {
        "sglang": ("--tp-size", "--pp-size"),
        "vllm": (
            "--tensor-parallel-size",
            "--pipeline-parallel-size",
            "--data-parallel-size",
        ),
    }
    body = "".join(line for line in text.splitlines(True) if not line.startswith("#"))
    product = 1
    for name in names[engine]:
        found = re.search(rf"{name}[ \n'-]+(\d+)", body)
        product *= int(found.group(1)) if found else 1
    return product


def _local(files: dict[str, str], engine: str) -> int:
    del engine
    lists = re.findall(r"^start \S+ (\d+) ([\d,]+)$", files["local.sh"], flags=re.MULTILINE)
    devices = [device for _, listed in lists for device in listed.split(",")]
    assert len(set(devices)) == len(devices)
    assert len({port for port, _ in lists}) == len(lists)
    (needed,) = re.findall(r"AVAILABLE < (\d+)", files["local.sh"])
    assert int(needed) == len(devices)
    return len(devices)


def _slurm(files: dict[str, str], engine: str) -> int:
    del engine
    total = 0
    for component in files["job.sbatch"].split("#SBATCH hetjob\n"):
        asked = directives_of(component)
        if "gpus-per-task" in asked:
            total += int(asked["ntasks"]) * int(asked["gpus-per-task"])
        else:
            total += int(asked["nodes"]) * int(asked["gpus-per-node"])
    return total


def _limits(pod: dict[str, Any]) -> int:
    containers = pod["spec"]["containers"]
    return sum(int(each["resources"]["limits"]["nvidia.com/gpu"]) for each in containers)


def _kubernetes(files: dict[str, str], engine: str) -> int:
    total = 0
    for each in yaml.safe_load_all(files["deployment.yaml"]):
        if each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            pods = [template["leaderTemplate"]] + [template["workerTemplate"]] * (
                template["size"] - 1
            )
        elif each["kind"] == "Deployment" and each["metadata"]["labels"]["role"] != "router":
            pods = [each["spec"]["template"]]
        else:
            continue
        held = sum(map(_limits, pods))
        if engine != "trtllm":
            assert _of_words(pods[0]["spec"]["containers"][0]["command"][-1], engine) == held
        total += each["spec"]["replicas"] * held
    return total


def _dynamo(files: dict[str, str], engine: str) -> int:
    total = 0
    documents = list(yaml.safe_load_all(files["graph.yaml"]))
    (graph,) = (each for each in documents if each["kind"] == "DynamoGraphDeployment")
    for component in graph["spec"]["components"]:
        if component["type"] == "frontend":
            continue
        nodes = component.get("multinode", {"nodeCount": 1})["nodeCount"]
        held = nodes * _limits(component["podTemplate"])
        (container,) = component["podTemplate"]["spec"]["containers"]
        if engine != "trtllm":
            assert _of_words("\n".join(container["args"]), engine) == held
        total += component["replicas"] * held
    return total


COUNTERS: dict[str, Callable[[dict[str, str], str], int]] = {
    "local": _local,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "dynamo": _dynamo,
}
