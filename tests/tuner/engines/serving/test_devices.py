"""The emitted launchers ask for exactly the plan's devices: counted from what they start.

The counters know the engines' own rules and nothing of the emitters: SGLang's --tp-size counts all
devices of a pipeline stage, vLLM's --tensor-parallel-size those of one data-parallel rank.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.rows import Failures
from tests.tuner.engines.grids import grid
from tests.tuner.engines.serving.testing import aggregated, disaggregated, sample_serving
from tests.tuner.engines.testing import write_emitted
from tuner.config.serve import ServeDecision
from tuner.engines.serve_capabilities import ENGINES
from tuner.engines.serve_writers import SERVE_EMITTERS, emit_all_serving
from tuner.errors import UnknownTargetError
from tuner.spec.model import ModelSpec

DECISIONS = {
    "two machines, an instance each": aggregated(),
    "three instances on half machines": aggregated(count=3, devices=4, attention_dp=4, ep=4),
    "instances over two machines": aggregated(devices=16, attention_dp=16, ep=16),
    "one instance of one device": aggregated(count=1, devices=1, attention_dp=1, ep=1),
    "tensor parallel": aggregated(attention_dp=1, attention_tp=8, ep=1, moe_tp=8),
    "two pipeline stages over two machines": aggregated(
        devices=16, attention_dp=1, attention_tp=8, pp=2
    ),
    "three nodes in equal parts": aggregated(
        count=1, devices=18, attention_tp=1, attention_dp=18, ep=1, moe_tp=18
    ),
    "prefill and decode": disaggregated(),
    "prefill and decode on unlike machines": disaggregated(
        prefill={"pool": "h20"}, from_pool="h20"
    ),
}
"""By name: decisions on machines of 8 devices."""
ON_FOUR = {
    f"{name}, of 4 devices": DECISIONS[name]
    for name in ("instances over two machines", "prefill and decode")
}
LAUNCHERS = [target for target in SERVE_EMITTERS if target not in ENGINES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "points", grid(tuple(ENGINES), ("engine", *LAUNCHERS), (*DECISIONS, *ON_FOUR))
)
def test_the_requested_devices_are_those_of_the_plan(
    points: list[tuple[str, str, str]], deepseek: ModelSpec, launch: Path, programs: Any
) -> None:
    failures = Failures()
    for number, (engine, launcher, name) in enumerate(points):
        target = engine if launcher == "engine" else launcher
        decision = (DECISIONS | ON_FOUR)[name]
        per_node = 4 if name in ON_FOUR else 8
        verified = sample_serving(
            deepseek, decision, engine=engine, emit=(target,), devices_per_node=per_node
        )
        wide = any(group.devices > per_node for group in decision.instances)
        with failures.of(engine, target, name):
            if target == "kubernetes" and engine == "trtllm" and wide:
                with pytest.raises(
                    UnknownTargetError, match=r"span \d machines by MPI; emit slurm or dynamo"
                ):
                    emit_all_serving(verified)
                continue
            folder = launch / str(number)
            for each, files in emit_all_serving(verified).items():
                write_emitted(folder / each, files)
            count = COUNTERS.get(target, _count_scripts)
            assert count(folder, engine, decision, programs) == decision.num_devices
    failures.check()


def _of_call(call: dict[str, Any], launch: Path) -> int:
    """Return the devices of the instance that a server's call belongs to."""
    argv = call["argv"]
    if "sglang.launch_server" in argv:
        return _option(argv, "--tp-size") * _option(argv, "--pp-size")
    if argv[0] == "vllm":
        names = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")
        sizes = [_option(argv, name) for name in names]
        return sizes[0] * sizes[1] * sizes[2]
    path = Path(argv[argv.index("--config") + 1])
    return _of_options(yaml.safe_load(path.read_text()))


def _of_options(options: dict[str, int]) -> int:
    return options["tensor_parallel_size"] * options["pipeline_parallel_size"]


def _option(argv: list[str], name: str) -> int:
    return int(argv[argv.index(name) + 1]) if name in argv else 1


def _machines(call: dict[str, Any]) -> int:
    """Return over how many machines a server says it is spread."""
    argv = call["argv"]
    local = _option(argv, "--data-parallel-size-local")
    if "--data-parallel-size-local" in argv:
        return _option(argv, "--data-parallel-size") // local
    return _option(argv, "--nnodes")


def _count_scripts(launch: Path, engine: str, decision: ServeDecision, programs: Any) -> int:
    """Start every machine of one instance of each group, as the scripts' heads say."""
    total = 0
    others = {"router.sh", "bench_vllm.sh", "bench_aiperf.sh"}
    for script in sorted((launch / engine).glob("*.sh")):
        if script.name in others:
            continue
        head = script.read_text()
        (instances,) = re.findall(r"Instances to start: (\d+)", head)
        ranks = re.findall(r"with NODE_RANK 0 to (\d+)", head)
        last = int(ranks[0]) if ranks else 0
        devices = set()
        for rank in range(last + 1):
            done = programs.run(str(script), cwd=launch, NODE_RANK=str(rank), MASTER_ADDR="first")
            assert done.code == 0, done.stderr
            (call,) = programs.calls()
            devices.add(_of_call(call, launch))
            assert _machines(call) == last + 1
        (each,) = devices
        total += int(instances) * each
    return total


def _count_local(launch: Path, engine: str, decision: ServeDecision, programs: Any) -> int:
    servers = sum(group.count for group in decision.instances)
    few = programs.run(
        str(launch / "local/local.sh"), cwd=launch, AVAILABLE=str(decision.num_devices - 1)
    )
    assert few.code == 2
    assert f"the plan is for {decision.num_devices}" in few.stderr
    done = programs.run(
        str(launch / "local/local.sh"),
        cwd=launch,
        servers=servers if servers > 1 else 0,
        AVAILABLE=str(decision.num_devices),
    )
    assert done.code == 0, done.stderr
    calls = programs.calls()
    assert len(calls) == servers
    seen: list[str] = []
    for call in calls:
        devices = call["environment"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(devices) == _of_call(call, launch)
        seen += devices
    assert sorted(map(int, seen)) == list(range(len(seen))), "a device has two instances"
    assert len({call["environment"]["PORT"] for call in calls}) == servers
    return len(seen)


def _count_slurm(launch: Path, engine: str, decision: ServeDecision, programs: Any) -> int:
    text = (launch / "slurm/job.sbatch").read_text()
    components = [
        dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", part, flags=re.MULTILINE))
        for part in text.split("#SBATCH hetjob\n")
    ]
    requested = sum(_requested(component) for component in components)
    nodelists = {
        f"SLURM_JOB_NODELIST{suffix}": ",".join(f"n{i}" for i in range(64))
        for suffix in ("", *(f"_HET_GROUP_{index}" for index in range(len(components))))
    }
    instances = sum(group.count for group in decision.instances)
    done = programs.run(
        "job.sbatch",
        cwd=launch / "slurm",
        servers=_processes(components) if instances > 1 else 0,
        SLURM_JOB_ID="7",
        **nodelists,
    )
    assert done.code == 0, done.stderr
    steps = programs.calls("steps.jsonl")
    assert sum(_requested(step) for step in steps) == requested
    calls = programs.calls()
    by_port: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        by_port.setdefault(call["environment"]["PORT"], []).append(call)
    assert len(by_port) == instances
    started = sum(_of_call(found[0], launch) for found in by_port.values())
    assert started == requested
    return requested


def _requested(options: dict[str, str]) -> int:
    """Return the devices of a component or a step (sbatch(1), srun(1))."""
    if "gpus-per-task" in options:
        return int(options["ntasks"]) * int(options["gpus-per-task"])
    return int(options["nodes"]) * int(options["gpus-per-node"])


def _processes(components: Iterable[dict[str, str]]) -> int:
    """Return the tasks of all components."""
    return sum(
        int(component["ntasks"])
        if "ntasks" in component
        else int(component["nodes"]) * int(component["ntasks-per-node"])
        for component in components
    )


def _count_kubernetes(launch: Path, engine: str, decision: ServeDecision, programs: Any) -> int:
    objects = list(yaml.safe_load_all((launch / "kubernetes/deployment.yaml").read_text()))
    files: dict[str, str] = next(
        (each["data"] for each in objects if each["kind"] == "ConfigMap"), {}
    )
    for name, text in files.items():
        (launch / name).write_text(text)
    total = 0
    for each in objects:
        if each["kind"] == "Deployment" and each["metadata"]["labels"]["role"] != "router":
            pods = [each["spec"]["template"]]
        elif each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            workers = template["size"] - 1
            pods = [template["leaderTemplate"], *([template["workerTemplate"]] * workers)]
        else:
            continue
        resident = [_limits(pod) for pod in pods]
        command = pods[0]["spec"]["containers"][0]["command"]
        for rank in range(len(pods)):
            done = programs.run(
                *command[1:],
                cwd=launch,
                FILES=str(launch),
                LWS_WORKER_INDEX=str(rank),
                LWS_LEADER_ADDRESS="leader",
                LWS_GROUP_SIZE=str(len(pods)),
            )
            assert done.code == 0, done.stderr
            (call,) = programs.calls()
            assert _of_call(call, launch) == sum(resident)
            assert _machines(call) == len(pods)
        total += each["spec"]["replicas"] * sum(resident)
    return total


def _limits(pod: dict[str, Any]) -> int:
    containers = pod["spec"]["containers"]
    return sum(int(each["resources"]["limits"]["nvidia.com/gpu"]) for each in containers)


def _count_dynamo(launch: Path, engine: str, decision: ServeDecision, programs: Any) -> int:
    objects = list(yaml.safe_load_all((launch / "dynamo/graph.yaml").read_text()))
    (graph,) = (each for each in objects if each["kind"] == "DynamoGraphDeployment")
    files: dict[str, str] = next(
        (each["data"] for each in objects if each["kind"] == "ConfigMap"), {}
    )
    total = 0
    for component in graph["spec"]["components"]:
        if component["type"] == "frontend":
            continue
        (container,) = component["podTemplate"]["spec"]["containers"]
        nodes = component.get("multinode", {"nodeCount": 1})["nodeCount"]
        resident = nodes * _limits(component["podTemplate"])
        args = container["args"]
        if engine == "trtllm":
            name = Path(args[args.index("--extra-engine-args") + 1]).name
            assert _of_options(yaml.safe_load(files[name])) == resident
        else:
            program = "sglang.launch_server" if engine == "sglang" else "vllm"
            assert _of_call({"argv": [program, *args]}, launch) == resident
        total += component["replicas"] * resident
    return total


COUNTERS: dict[str, Callable[[Path, str, ServeDecision, Any], int]] = {
    "local": _count_local,
    "slurm": _count_slurm,
    "kubernetes": _count_kubernetes,
    "dynamo": _count_dynamo,
}
