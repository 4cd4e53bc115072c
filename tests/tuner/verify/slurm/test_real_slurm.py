"""Trials on a real Slurm while its daemons and moetune itself are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.tuner.verify.testing import marked
from tuner.plans.folder import TRIALS_NAME, VERIFIED_NAME
from tuner.verify.records import Verified, read_trials
from tuner.verify.termination import SCRATCH_PREFIX, TRIAL_MARK

if TYPE_CHECKING:
    from tests.tuner.slurm_cluster import Cluster
else:
    Cluster = Any

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Verifying:
    """`moetune verify` as a process."""

    def __init__(self, folder: Path, cluster: Cluster, *options: str, trials: int = 8) -> None:
        self._said = folder.parent / "said.txt"
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tuner", "verify", str(folder)),
                    *("--launcher", "slurm", "--trials", str(trials), "--steps", "3", *options),
                ],
                env=cluster.environment,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._said.read_text(errors="replace")


@pytest.fixture
def two_nodes(planned: Path) -> Path:
    """The plan of two devices, spread over two nodes of one, whose memory nobody limits."""
    file = planned / "plan.json"
    plan = json.loads(file.read_text())
    plan["cluster"]["pools"][0] |= {"nodes": 2, "devices_per_node": 1, "memory_per_device": None}
    file.write_text(json.dumps(plan))
    return planned


def _finished(folder: Path) -> int:
    return len(list((folder / TRIALS_NAME).glob("[0-9]*.json")))


def _marked() -> list[int]:
    """Processes of any trial."""
    return marked(f"/{TRIALS_NAME}/{SCRATCH_PREFIX}")


def _queued_again(cluster: Cluster) -> bool:
    return any(
        " PENDING" in line for line in cluster.ask("squeue", "-h", "-o", "%i %T").splitlines()
    )


class Runs:
    """Watches which runs of trials live, for as long as a test lasts."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.at_once: set[frozenset[str]] = set()
        """Runs of one trial that were seen side by side, where there were several."""

    def __enter__(self) -> "Runs":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before: dict[str, frozenset[str]] = {}
        while not self._ended.wait(2.0):
            now = _runs()
            for trial, runs in now.items():
                # A run that is being ended may still be seen beside its successor for a moment.
                if len(both := runs & before.get(trial, frozenset())) > 1:
                    self.at_once.add(both)
            before = now


def _runs() -> dict[str, frozenset[str]]:
    """By trial: its runs that have ranks which live."""
    outcome: dict[str, set[str]] = {}
    for pid in _marked():
        try:
            process = psutil.Process(pid)
            environment, command = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        starters = {"torch.distributed.run", "profilers.local_ranks"}
        if "profilers.steps" in command and not starters & set(command):
            names = ("SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
            run = ".".join(environment.get(name, "0") for name in names)
            outcome.setdefault(environment[TRIAL_MARK], set()).add(run)
    return {trial: frozenset(runs) for trial, runs in outcome.items()}


def test_eight_trials_survive_a_node_the_controller_and_moetune_dying_in_one_study(
    two_nodes: Path, cluster: Cluster
) -> None:
    wait_for = cluster.wait_for
    verifying = Verifying(two_nodes, cluster)
    with Runs() as runs:
        try:
            # A node dies under a job and comes back when its absence has been felt.
            wait_for(_marked, what="ranks of a trial")
            before = _finished(two_nodes)
            cluster.kill("slurmd.n2")
            wait_for(
                lambda: _finished(two_nodes) > before or _queued_again(cluster),
                what="the trial to end or to be queued again",
            )
            cluster.start_node("n2")
            wait_for(lambda: _finished(two_nodes) > before, what="a trial after the node's death")

            # The controller dies as soon as a job runs, which it may not have written down yet.
            wait_for(_marked, what="ranks of another trial")
            before = _finished(two_nodes)
            cluster.kill("slurmctld")
            cluster.start_controller()
            wait_for(
                lambda: cluster.tend() and _finished(two_nodes) > before + 1,
                what="a trial that began after the controller's death",
            )

            # moetune dies under a job, and is started again.
            wait_for(_marked, what="ranks of another trial")
            os.kill(verifying.process.pid, signal.SIGKILL)
            verifying.process.wait()
            verifying = Verifying(two_nodes, cluster, "--resume")
            wait_for(
                lambda: cluster.tend() and verifying.process.poll() is not None,
                what="the study to end",
                limit_s=600.0,
            )
            assert verifying.process.returncode == 0, verifying.said()
        finally:
            if verifying.process.poll() is None:
                verifying.process.terminate()
            verifying.process.wait(timeout=60)
            sys.stderr.write(verifying.said())
        wait_for(lambda: not cluster.jobs(), what="the queue to be empty")
        wait_for(lambda: not _marked(), what="no process to be left")

    records = read_trials(two_nodes / TRIALS_NAME)
    # What Slurm lost with its controller's memory has failed, and nothing else has.
    assert len([one for one in records if one.status != "ok"]) <= 1, verifying.said()
    assert len({record.decision for record in records}) == 8
    outcome = Verified.model_validate_json((two_nodes / VERIFIED_NAME).read_bytes())
    assert (len(outcome.trials), outcome.winner is not None) == (8, True)
    assert not runs.at_once
    assert not list((two_nodes / TRIALS_NAME).glob(f"{SCRATCH_PREFIX}*"))


def test_eight_trials_survive_the_death_of_the_controller_and_of_moetune(
    two_nodes: Path, cluster: Cluster
) -> None:
    wait_for = cluster.wait_for
    verifying = Verifying(two_nodes, cluster)
    try:
        wait_for(lambda: _finished(two_nodes) >= 1, what="a first trial")

        # The controller dies once it has written down that the job exists.
        wait_for(_marked, what="ranks of another trial")
        cluster.wait_for_saved_state()
        cluster.kill("slurmctld")
        cluster.start_controller()
        before = _finished(two_nodes)
        wait_for(lambda: _finished(two_nodes) > before, what="a trial after it")

        # moetune dies while a job runs: the job is cancelled, and its decision launched again.
        wait_for(_marked, what="ranks of another trial")
        (cancelled,) = cluster.jobs()
        before = _finished(two_nodes)
        os.kill(verifying.process.pid, signal.SIGKILL)
        verifying.process.wait()
        wait_for(lambda: cancelled not in cluster.jobs(), what="the job to be cancelled")
        verifying = Verifying(two_nodes, cluster, "--resume")
        assert verifying.process.wait(timeout=600) == 0, verifying.said()
        assert _finished(two_nodes) >= before
    finally:
        if verifying.process.poll() is None:
            verifying.process.terminate()
        verifying.process.wait(timeout=60)
        sys.stderr.write(verifying.said())

    records = read_trials(two_nodes / TRIALS_NAME)
    assert len(records) == 8
    assert len({record.decision for record in records}) == 8
    assert [record.status for record in records] == ["ok"] * 8, verifying.said()
    outcome = Verified.model_validate_json((two_nodes / VERIFIED_NAME).read_bytes())
    assert len(outcome.trials) == 8
    assert outcome.winner is not None
    wait_for(lambda: not cluster.jobs(), what="the queue to be empty")
    wait_for(lambda: not _marked(), what="no process to be left")
    assert not list((two_nodes / TRIALS_NAME).glob(f"{SCRATCH_PREFIX}*"))


def test_a_trial_whose_node_dies_ends_well_all_the_same_or_is_queued_again(
    two_nodes: Path, cluster: Cluster
) -> None:
    verifying = Verifying(two_nodes, cluster, trials=2)
    try:
        cluster.wait_for(_marked, what="ranks of a trial")
        cluster.kill("slurmd.n2")
        cluster.wait_for(
            lambda: _finished(two_nodes) or _queued_again(cluster),
            what="the trial to end or to be queued again",
        )
        cluster.start_node("n2")
        assert verifying.process.wait(timeout=600) == 0, verifying.said()
    finally:
        if verifying.process.poll() is None:
            verifying.process.terminate()
        verifying.process.wait(timeout=60)
        sys.stderr.write(verifying.said())
    records = read_trials(two_nodes / TRIALS_NAME)
    assert [record.status for record in records] == ["ok", "ok"]
    assert verifying.said().count("submitted") == 2
    cluster.wait_for(lambda: not cluster.jobs(), what="the queue to be empty")
    cluster.wait_for(lambda: not _marked(), what="no process to be left")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_verification_cancels_its_jobs(
    two_nodes: Path, cluster: Cluster, how: signal.Signals
) -> None:
    verifying = Verifying(two_nodes, cluster, "--parallel", "2")
    try:
        cluster.wait_for(lambda: len(cluster.jobs()) == 2, what="two jobs")
        verifying.process.send_signal(how)
        assert verifying.process.wait(timeout=60) == (130 if how == signal.SIGINT else 143)
    finally:
        verifying.process.kill()
        verifying.process.wait()
        sys.stderr.write(verifying.said())
    cluster.wait_for(lambda: not cluster.jobs(), what="the queue to be empty")
    cluster.wait_for(lambda: not _marked(), what="no process to be left")
