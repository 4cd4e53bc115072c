"""Scripts of plans that put nodes in order; torchrun and srun only write down their calls."""

from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.rows import Failures
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    directives_of,
    sample_decision,
    sample_verified,
    texts_of,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.launchers.hosts import HOSTS_NAME
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.writers import emit, emit_all
from tuner.plans.stage_placement import NodeOrder, StageDevices, StagePlacement
from tuner.plans.train import VerifiedPlan

MIXTRAL = example_model("mixtral-8x7b")

WHOLE_LAYERS: dict[str, Any] = {
    "recompute": "full",
    "stage_recompute": ("full", "full"),
    "chunks": (1, 1),
}
PROGRAMS: dict[str, dict[str, Any]] = {
    "reference": {},
    "torchrun": {},
    "megatron-lm": {},
    "megatron-lm-0.16": WHOLE_LAYERS,
    "megatron-bridge": {},
    "torchtitan": {"zero_stage": 3, **WHOLE_LAYERS},
    "deepspeed": WHOLE_LAYERS,
}
"""What each can launch, as changes of the sample."""

ORDER = ("node3", "node1.cluster", "node4", "node2")
WIDE = {"data_parallel_size": 16, "expert_data_parallel_size": 2}
"""Two stages of 16 devices: four nodes."""


def placed(program: str, *, hosts: tuple[str, ...] = ORDER, pools: int = 1) -> VerifiedPlan:
    """A plan for four nodes in that order; of several pools only the first one's are named."""
    decision = sample_decision(**(WIDE | PROGRAMS[program]))
    verified = sample_verified(MIXTRAL, decision, emit=(program, "slurm"), waived="for a test")
    order = NodeOrder(
        pool="pool",
        nodes=hosts[: len(hosts) // pools],
        spare=("node9",),
        step_time_before_s=3.0,
        step_time_after_s=2.0,
        bound_s=2.0,
    )
    placement = StagePlacement(
        stages=tuple(
            StageDevices(pool="pool" if stage < 2 / pools else "old", layers=16, devices=16)
            for stage in range(2)
        ),
        hosts=hosts,
        node_orders=(order,),
    )
    return changed(verified, {"plan.placement": placement})


def environment(**changes: str) -> dict[str, str]:
    wanted = {"MEGATRON_LM": "/megatron", "MODULE": "mine", "CONFIG": "mixtral", "TRAIN": "mine.py"}
    return wanted | changes


def test_every_node_gets_the_number_of_its_line(tmp_path: Path, failures: Failures) -> None:
    recorders = Recorders(tmp_path / "recorders")
    for number, program in enumerate(PROGRAMS):
        verified = placed(program)
        write_emitted(tmp_path, emit_all(verified))
        placement = present(verified.plan.placement)
        lines = (tmp_path / program / HOSTS_NAME).read_text().splitlines()
        assert tuple(lines) == placement.hosts == ORDER
        # One script sets the number of all programs: every node of the first, one of the others.
        for rank in range(len(ORDER)) if number == 0 else [number % len(ORDER)]:
            ran = recorders.run(
                tmp_path / program / "run.sh",
                cwd=tmp_path,
                **environment(SLURMD_NODENAME=ORDER[rank]),
            )
            with failures.of(program, rank):
                assert ran.code == 0, ran.stderr
                argv = ran.only("torchrun")
                assert f"--node-rank={rank}" in argv
                assert "--master-addr=node3" in argv
                (each,) = (word for word in argv if word.startswith("--nproc-per-node="))
                assert len(ORDER) * int(each.split("=")[1]) == verified.decision.num_devices == 32


def test_a_slurm_job_lays_its_tasks_out_in_that_order(tmp_path: Path, failures: Failures) -> None:
    recorders = Recorders(tmp_path / "recorders")
    for program in PROGRAMS:
        write_emitted(tmp_path, emit_all(placed(program)))
        job = tmp_path / "slurm" / "job.sbatch"
        assert tuple((job.parent / HOSTS_NAME).read_text().splitlines()) == ORDER
        directives = directives_of(job.read_text())
        ran = recorders.run(
            job,
            cwd=job.parent,
            **environment(SLURM_JOB_ID="7", SLURMD_NODENAME="node4", SLURM_NODEID="3"),
        )
        with failures.of(program):
            assert directives["nodelist"].split(",") == list(ORDER)
            assert int(directives["nodes"]) * int(directives["gpus-per-node"]) == 32
            assert ran.code == 0, ran.stderr
            (srun,) = [call for call in ran.calls if call["program"] == "srun"]
            assert srun["argv"][:3] == ["--nodes=4", "--ntasks=4", "--distribution=arbitrary"]
            hostfile = Path(srun["environment"]["SLURM_HOSTFILE"])
            assert tuple(hostfile.read_text().splitlines()) == ORDER
            argv = ran.only("torchrun")
            # Slurm's own number of the node is not asked for: node4 is on the third line.
            assert "--node-rank=2" in argv
            assert "--master-addr=node3" in argv


def test_short_and_full_names_are_one_node(tmp_path: Path, recorders: Recorders) -> None:
    write_emitted(tmp_path, emit_all(placed("reference")))
    for here, rank in (("node1", 1), ("node1.cluster", 1), ("node2.cluster", 3)):
        ran = recorders.run(tmp_path / "reference" / "run.sh", cwd=tmp_path, SLURMD_NODENAME=here)
        assert f"--node-rank={rank}" in ran.only("torchrun"), here


def test_a_start_in_the_wrong_place_says_so(tmp_path: Path, failures: Failures) -> None:
    write_emitted(tmp_path, emit_all(placed("reference")))
    recorders = Recorders(tmp_path / "recorders")
    cases: list[tuple[dict[str, str], str]] = [
        ({"SLURMD_NODENAME": "node9"}, "hosts.txt: start on the nodes that it names"),
        ({"HOSTFILE": "nowhere"}, "nowhere cannot be read"),
        ({"NNODES": "8", "NPROC_PER_NODE": "4"}, "names 4 nodes, NNODES is 8"),
    ]
    for changes, said in cases:
        ran = recorders.run(
            tmp_path / "reference" / "run.sh",
            cwd=tmp_path,
            **({"SLURMD_NODENAME": "node3"} | changes),
        )
        with failures.of(changes):
            assert ran.code == 2
            assert said in ran.stderr
            assert ran.calls == ()


def test_nodes_without_a_name_are_left_to_the_reader(tmp_path: Path) -> None:
    hosts = ("node3", "node1", "old $(rm)-0", "old $(rm)-1")
    write_emitted(tmp_path, emit_all(placed("megatron-lm", hosts=hosts, pools=2)))
    lines = (tmp_path / "megatron-lm" / HOSTS_NAME).read_text().splitlines()
    assert lines == ["node3", "node1", "old-rm--0", "old-rm--1"]
    job = (tmp_path / "slurm" / "job.sbatch").read_text()
    assert "--nodelist" not in job
    assert "# Lines like old-rm--0 are placeholders for nodes of that pool" in job
    assert "$(rm)" not in job + (tmp_path / "megatron-lm" / "run.sh").read_text()


def test_a_name_that_is_no_host_is_refused() -> None:
    with pytest.raises(ValueError, match="is no name of a host"):
        emit("reference", placed("reference", hosts=("a;b", *ORDER[1:])))


def test_an_order_is_of_the_plans_own_decision() -> None:
    verified = placed("reference")
    other = sample_decision(**WIDE, micro_batch_size=2)
    assert launch_shape(verified.plan, verified.decision).hosts == ORDER
    assert launch_shape(verified.plan, other).hosts == ()
    assert HOSTS_NAME in texts_of(emit("reference", placed("reference")))
    assert HOSTS_NAME not in texts_of(
        emit("reference", changed(verified, {"plan.placement": None}))
    )
