"""The emitted job on a real Slurm whose nodes are lost, with a program of the test in it."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from tests.tuner.engines.test_restart_loop import PROGRAM, reliable
from tests.tuner.engines.testing import write_emitted
from tests.tuner.slurm_cluster import Cluster, running_cluster
from tuner.engines.launchers.restart_loop import END_S, WATCH_S
from tuner.engines.writers import emit
from tuner.plans.train import VerifiedPlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

RUN = """\
#!/usr/bin/env bash
# Trains for $STEPS steps from the last checkpoint; ends when a rank is silent, as collectives do.
trap 'echo "{name}: rank $NODE_RANK on $SLURMD_NODENAME was signalled" >> "$LOG"; exit 143' TERM
cd "$CHECKPOINTS" || exit
step="$(cat step 2> /dev/null || echo 0)"
rm -f "beat.$NODE_RANK"
echo "{name}: rank $NODE_RANK of $NNODES on $SLURMD_NODENAME from ${{step:-0}}" >> "$LOG"
echo "$SLURM_JOB_END_TIME" > until
silent=0 before=
while ((step < STEPS)); do
  sleep 0.2
  step=$((step + 1))
  echo "$step" > "beat.$NODE_RANK"
  if ((NODE_RANK == 0)); then echo "$step" > .step && mv .step step; fi
  beats="$(cat beat.* 2> /dev/null | sort -n | head -n "$NNODES" | head -n 1)"
  if [[ "$beats" == "$before" ]]; then silent=$((silent + 1)); else silent=0; fi
  before="$beats"
  ((silent < 15)) || exit 1
done
echo "{name}: rank $NODE_RANK is done" >> "$LOG"
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A submitted job, in the folder of its plan."""

    folder: Path
    cluster: Cluster
    number: str

    def log(self) -> list[str]:
        """What the ranks wrote."""
        file = self.folder / "log"
        return file.read_text().splitlines() if file.exists() else []

    def ranks(self) -> list[str]:
        """Starts of ranks: name of the plan, rank and node."""
        return [line.split(" from ")[0] for line in self.log() if " from " in line]

    def said(self) -> str:
        return "".join(file.read_text() for file in self.folder.glob("*.out"))

    def state(self) -> str:
        said = self.cluster.ask("scontrol", "show", "job", self.number)
        return "".join(re.findall(r"JobState=(\w+)", said))

    def wait_for(self, holds: Callable[[], object], *, what: str) -> None:
        try:
            self.cluster.wait_for(holds, what=what, limit_s=120.0)
        finally:
            sys.stderr.write(f"--- {what}\n{self.said()}\n")

    def wait_for_ranks(self, *expected: str) -> None:
        """Wait until these ranks have started, and no others."""
        self.wait_for(lambda: sorted(self.ranks()) == sorted(expected), what=expected[-1])


@pytest.fixture
def four_nodes() -> Iterator[Cluster]:
    """Nodes whose loss Slurm notices later than ranks do, as everywhere."""
    with running_cluster(nodes=4, down_after_s=20, kill_wait_s=15) as one:
        yield one


def write(verified: VerifiedPlan, folder: Path, *, nodes: int = 2) -> Path:
    """Write the job of a plan beside the test's program."""
    launch = folder / "launch"
    provenance = verified.plan.provenance.model_copy(update={"device_kind": {"pool": "cpu"}})
    plan = verified.plan.model_copy(update={"provenance": provenance})
    write_emitted(launch / "slurm", emit("slurm", verified.model_copy(update={"plan": plan})))
    job = launch / "slurm" / "job.sbatch"
    # A minute is long for a test.
    text = job.read_text().replace(f"while sleep {WATCH_S};", "while sleep 1;")
    text = text.replace(f"> {END_S} *", "> 5 *")
    job.write_text(text.replace("NNODES=2", f"NNODES={nodes}"))
    (launch / PROGRAM).mkdir()
    (launch / PROGRAM / "run.sh").write_text(RUN.format(name=folder.name))
    return job


def submit(job: Path, folder: Path, cluster: Cluster, *, steps: int) -> Job:
    (folder / "checkpoints").mkdir()
    done = subprocess.run(
        ["sbatch", "--parsable", "--cpus-per-task=1", str(job)],
        env=cluster.environment
        | {
            "LOG": str(folder / "log"),
            "CHECKPOINTS": str(folder / "checkpoints"),
            "STEPS": str(steps),
        },
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    return Job(folder=folder, cluster=cluster, number=done.stdout.strip())


def test_a_spare_takes_the_place_of_a_lost_node_and_the_queue_gives_another(
    four_nodes: Cluster, tmp_path: Path
) -> None:
    cluster = four_nodes
    job = submit(
        write(reliable(hosts=("n2", "n1")), tmp_path / "plan"), tmp_path, cluster, steps=150
    )
    starts = ["plan: rank 0 of 2 on n2", "plan: rank 1 of 2 on n1"]
    job.wait_for_ranks(*starts)
    (stated,) = re.findall(r"EndTime=(\S+)", cluster.ask("scontrol", "show", "job", job.number))
    until = int((tmp_path / "checkpoints" / "until").read_text())
    assert datetime.fromtimestamp(until).isoformat() == stated
    cluster.lose_node("n2")
    starts += ["plan: rank 0 of 2 on n3", "plan: rank 1 of 2 on n1"]
    job.wait_for_ranks(*starts)
    cluster.lose_node("n3")
    job.wait_for(lambda: job.state() == "PENDING", what="the job to be queued again")
    job.wait_for(
        lambda: "ReqNodeList=(null)" in cluster.ask("scontrol", "show", "job", job.number),
        what="any nodes to be good enough",
    )
    # Slurm waits two minutes before it starts a requeued job.
    cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    starts += ["plan: rank 0 of 2 on n4", "plan: rank 1 of 2 on n1"]
    job.wait_for_ranks(*starts)
    job.wait_for(lambda: job.state() == "COMPLETED", what="the job to be done")
    begun = [int(line.split(" from ")[1]) for line in job.log() if " from " in line]
    assert begun[::2] == sorted(set(begun[::2]))


def test_a_second_lost_node_leaves_the_plan_for_fewer_which_a_signal_ends(
    four_nodes: Cluster, tmp_path: Path
) -> None:
    cluster = four_nodes
    job_file = write(reliable(), tmp_path / "plan")
    write(reliable(), tmp_path / "plan" / "fewer-nodes", nodes=1)
    job = submit(job_file, tmp_path, cluster, steps=10_000)
    starts = ["plan: rank 0 of 2 on n1", "plan: rank 1 of 2 on n2"]
    job.wait_for_ranks(*starts)
    cluster.lose_node("n2")
    starts += ["plan: rank 0 of 2 on n1", "plan: rank 1 of 2 on n3"]
    job.wait_for_ranks(*starts)
    cluster.lose_node("n3")
    starts += ["fewer-nodes: rank 0 of 1 on n1"]
    job.wait_for_ranks(*starts)
    cluster.ask("scancel", "--batch", "--signal=TERM", job.number)
    job.wait_for(lambda: job.state() == "FAILED", what="the job to end")
    assert job.log()[-1] == "fewer-nodes: rank 0 on n1 was signalled", job.log()
    assert sorted(job.ranks()) == sorted(starts)


def test_the_loss_of_the_batch_host_queues_the_job_again(
    four_nodes: Cluster, tmp_path: Path
) -> None:
    cluster = four_nodes
    job = submit(write(reliable(), tmp_path / "plan"), tmp_path, cluster, steps=100)
    job.wait_for_ranks("plan: rank 0 of 2 on n1", "plan: rank 1 of 2 on n2")
    cluster.lose_node("n1")
    job.wait_for(lambda: job.state() == "PENDING", what="the job to be queued again")
    cluster.ask("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    job.wait_for(lambda: job.state() == "COMPLETED", what="the job to be done")
    assert sorted(job.ranks()[2:]) == ["plan: rank 0 of 2 on n2", "plan: rank 1 of 2 on n3"]
