"""Deployments whose KV caches stay inside a machine: one script, one task, one container."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.expect import present
from tests.patience import patient_s
from tests.tuner.engines.serving.testing import disaggregated, sample_serving, stages_beside
from tuner.engines.files import EmittedFile
from tuner.engines.serve_writers import emit_serving
from tuner.errors import UnknownTargetError
from tuner.estimate.serving.objects import object_commands
from tuner.plans.serve import VerifiedServing
from tuner.spec.model import ModelSpec

SETTINGS = {
    ("vllm", "nixl"): {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on"},
    ("vllm", "mooncake"): {"MC_INTRANODE_NVLINK=true"},
    ("sglang", "mooncake"): {
        "MC_INTRANODE_NVLINK=true",
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK",
    },
    ("sglang", "nixl"): set[str](),
}
ONE = {"attention_dp": 1, "ep": 1, "count": 1}


def inside(
    model: ModelSpec, engine: str = "vllm", connector: str = "nixl", link: str = "scale_up"
) -> VerifiedServing:
    """Return prefill on 4 devices and two decode instances of 2, of one machine."""
    decision = disaggregated(
        prefill={**ONE, "devices": 4, "attention_tp": 4, "moe_tp": 4},
        decode={**ONE, "count": 2, "devices": 2, "attention_tp": 2, "moe_tp": 2},
        connector=connector,
        link=link,
    )
    return sample_serving(model, engine=engine, decision=decision)


def files(target: str, verified: VerifiedServing) -> dict[str, EmittedFile]:
    return {str(one.path): one for one in emit_serving(target, verified)}


def test_connectors_get_what_keeps_caches_inside(deepseek: ModelSpec) -> None:
    every = {f"export {line}" for lines in SETTINGS.values() for line in lines}
    for (engine, connector), wanted in SETTINGS.items():
        for link in ("scale_up", "network"):
            made = files(engine, inside(deepseek, engine, connector, link))
            for name in ("prefill.sh", "decode.sh"):
                exported = every & set(made[name].text.splitlines())
                expected = {f"export {line}" for line in wanted} if link == "scale_up" else set()
                assert exported == expected, (engine, connector, link)
            assert ("machine.sh" in made) is (link == "scale_up")


def logged(folder: Path) -> list[str]:
    return sorted(path.read_text().strip() for path in folder.iterdir())


def test_one_script_starts_all_instances_and_the_router(
    deepseek: ModelSpec, tmp_path: Path
) -> None:
    for one in files("vllm", inside(deepseek)).values():
        (tmp_path / one.path).write_text(one.text)
    for name in ("prefill", "decode"):
        (tmp_path / f"{name}.sh").write_text(f"echo {name} $CUDA_VISIBLE_DEVICES $PORT; sleep 1\n")
    (tmp_path / "router.sh").write_text('echo "$PREFILL_URLS" "$DECODE_URLS"; sleep 1\n')
    environment = {**os.environ, "MODEL": "m", "AVAILABLE": "8", "LOGS": str(tmp_path / "logs")}
    done = subprocess.run(
        ["bash", str(tmp_path / "machine.sh")], env=environment, timeout=patient_s(30), check=False
    )
    assert done.returncode == 0
    assert logged(tmp_path / "logs") == [
        "decode 4,5 30200",
        "decode 6,7 30400",
        "http://127.0.0.1:30000 http://127.0.0.1:30200 http://127.0.0.1:30400",
        "prefill 0,1,2,3 30000",
    ]


def test_slurm_gives_them_one_task_on_a_machine_of_its_own(deepseek: ModelSpec) -> None:
    job = files("slurm", inside(deepseek))["job.sbatch"].text
    assert "#SBATCH --exclusive\n" in job
    assert "#SBATCH --ntasks=1\n#SBATCH --gpus-per-task=8\n" in job
    assert "hetjob" not in job
    assert job.count("srun ") == 1
    assert 'instance.sh" machine task 0 1 &\nwait -n\n' in job


def test_kubernetes_gives_them_one_container(deepseek: ModelSpec) -> None:
    text = files("kubernetes", inside(deepseek))["deployment.yaml"].text
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert list(objects) == ["ConfigMap", "Deployment", "Service"]
    assert set(objects["ConfigMap"]["data"]) == {
        "prefill.sh",
        "decode.sh",
        "router.sh",
        "machine.sh",
    }
    spec = objects["Deployment"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert spec["replicas"] == 1
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert container["command"][-1].endswith("exec bash /moetune/machine.sh\n")
    assert "pip install --quiet vllm-router" in container["command"][-1]
    port = objects["Service"]["spec"]["ports"][0]["port"]
    assert container["readinessProbe"]["httpGet"]["port"] == port == 8000
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()


def test_instances_of_containers_are_read_and_started_apart(deepseek: ModelSpec) -> None:
    text = files("kubernetes", inside(deepseek))["deployment.yaml"].text
    read = present(object_commands(text, source="deployment.yaml"))
    servers = {one.name: one for one in read if "vllm serve" in one.text}
    assert {name: one.replicas for name, one in servers.items()} == {"prefill": 1, "decode": 2}
    assert all("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in one.text for one in servers.values())
    with pytest.raises(UnknownTargetError, match="plan with 'emit: \\[dynamo\\]'"):
        emit_serving("dynamo", inside(deepseek))
    emit_serving("dynamo", inside(deepseek, link="network"))


def test_machines_that_share_stages_run_the_same_script(
    deepseek: ModelSpec, tmp_path: Path
) -> None:
    verified = sample_serving(deepseek, engine="sglang", decision=stages_beside(stage_machines=2))
    made = files("sglang", verified)
    (tmp_path / "machine.sh").write_text(made["machine.sh"].text)
    for name in ("prefill", "decode"):
        assert SETTINGS["sglang", "mooncake"] <= {
            line.removeprefix("export ") for line in made[f"{name}.sh"].text.splitlines()
        }
        said = "$CUDA_VISIBLE_DEVICES $PORT $NNODES $NODE_RANK $MASTER_ADDR ${HOST_IP:-}"
        (tmp_path / f"{name}.sh").write_text(f"echo {name} {said}; sleep 1\n")
    (tmp_path / "router.sh").write_text('echo "$PREFILL_URLS" "$DECODE_URLS"; sleep 1\n')
    environment = {**os.environ, "MODEL": "m", "AVAILABLE": "8", "LOGS": str(tmp_path / "logs")}
    environment.pop("HOST_IP", None)
    for rank, router in enumerate((["http://first:30000 http://first:30200"], [])):
        names = {"NODE_RANK": str(rank), "MASTER_ADDR": "first"}
        done = subprocess.run(
            ["bash", str(tmp_path / "machine.sh")],
            env=environment | names,
            timeout=patient_s(30),
            check=False,
        )
        assert done.returncode == 0
        assert logged(tmp_path / "logs" / str(rank)) == [
            f"decode 4,5,6,7 30200 2 {rank} first",
            *router,
            f"prefill 0,1,2,3 30000 2 {rank} first",
        ]
    done = subprocess.run(
        ["bash", str(tmp_path / "machine.sh")], env=environment, capture_output=True, check=False
    )
    assert done.returncode
    assert b"set NODE_RANK and MASTER_ADDR" in done.stderr


def test_launchers_give_shared_stages_as_many_machines(deepseek: ModelSpec) -> None:
    verified = sample_serving(deepseek, engine="sglang", decision=stages_beside(stage_machines=2))
    job = files("slurm", verified)["job.sbatch"].text
    assert "#SBATCH --exclusive\n" in job
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in job
    assert job.count("srun ") == 1
    assert 'instance.sh" machine "$index" 0 2 &' in job
    text = files("kubernetes", verified)["deployment.yaml"].text
    objects = {one["kind"]: one for one in yaml.safe_load_all(text)}
    assert list(objects) == ["ConfigMap", "LeaderWorkerSet", "Service"]
    template = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    leader, worker = template["leaderTemplate"], template["workerTemplate"]
    (container,) = leader["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert 'NODE_RANK="$LWS_WORKER_INDEX" MASTER_ADDR=' in container["command"][-1]
    assert container["command"][-1].endswith("exec bash /moetune/machine.sh\n")
    assert container["readinessProbe"]["httpGet"]["port"] == 8000
    assert "readinessProbe" not in worker["spec"]["containers"][0]
    labels = leader["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()
    with pytest.raises(UnknownTargetError, match="plan with 'emit: \\[dynamo\\]'"):
        emit_serving("dynamo", verified)


def test_stages_are_as_many_on_each_machine() -> None:
    with pytest.raises(ValueError, match="pp 2 stages on 3 machines, as many on each"):
        stages_beside(stage_machines=3)
