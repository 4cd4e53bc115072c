"""Planning processes that crash, hang, starve or are broken: each costs one answer."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from tests.expect import present
from tests.patience import patient_s
from tests.rows import each_row
from tuner.regress.worker import run_job as answer_here
from tuner.regress.workers import Limits, Planner, PlanningJob, PlanResult


def arguments(planner: Planner, folder: Path, text: str, *, kind: str = "train") -> PlanResult:
    spec = folder / "spec.yaml"
    spec.write_text(f"does: {text}\n")
    return planner.plan(PlanningJob(kind=kind, spec=spec, profiles=()))


def said(run_job: PlanResult) -> str:
    assert run_job.plan is not None, run_job.error
    return str(run_job.plan["binding_constraint"])


def test_plans_come_back_with_their_time(acting: Path, tmp_path: Path) -> None:
    with Planner(scratch=tmp_path, limits=Limits(solve_s=7.0), tree=acting) as planner:
        result = arguments(planner, tmp_path, "hello")
        assert said(result).startswith("hello within 7 s")
        assert present(result.cpu_s) > 0.0


def test_every_plan_has_a_process_of_its_own(acting: Path, tmp_path: Path) -> None:
    with Planner(scratch=tmp_path, limits=Limits(), tree=acting) as planner:
        processes = {said(arguments(planner, tmp_path, "hello")) for _ in range(3)}
    assert len(processes) == 3


@each_row(
    ("text", "words"),
    [
        ("crash", "planning crashed: ValueError: a defect"),
        ("kill", "planning was killed by SIGKILL"),
        ("end", "the planning process ended early"),
        ("starve", "ran out of the memory"),
        ("refuse", "spec: nothing of it can be used"),
    ],
)
def test_what_breaks_costs_one_answer(text: str, words: str, acting: Path, tmp_path: Path) -> None:
    limits = Limits(memory_bytes=8 * 2**30)
    with Planner(scratch=tmp_path, limits=limits, tree=acting) as planner:
        broken = arguments(planner, tmp_path, text)
        assert broken.plan is None
        assert words in broken.error
        assert said(arguments(planner, tmp_path, "after")).startswith("after")


def test_what_hangs_is_killed(acting: Path, tmp_path: Path) -> None:
    with Planner(scratch=tmp_path, limits=Limits(wall_s=0.5), tree=acting) as planner:
        assert "no plan within 0.5 s" in arguments(planner, tmp_path, "hang").error


def test_what_solvers_print_is_no_answer(acting: Path, tmp_path: Path) -> None:
    with Planner(scratch=tmp_path, limits=Limits(), tree=acting) as planner:
        assert said(arguments(planner, tmp_path, "print")).startswith("print")


def test_a_version_that_lacks_a_planner_says_so(acting: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(acting, tmp_path / "older"))
    (older / "tuner" / "api.py").write_text('"""Plans nothing."""\n')
    with Planner(scratch=tmp_path, limits=Limits(), tree=older) as planner:
        result = arguments(planner, tmp_path, "hello")
    assert "this version of moetune lacks what the scenario needs" in result.error


def test_a_version_that_cannot_start_says_why(acting: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(acting, tmp_path / "broken"))
    (broken / "tuner" / "api.py").write_text("import what_nobody_has\n")
    with Planner(scratch=tmp_path, limits=Limits(), tree=broken) as planner:
        assert "what_nobody_has" in arguments(planner, tmp_path, "hello").error


def test_stopping_ends_a_plan_that_another_thread_waits_for(acting: Path, tmp_path: Path) -> None:
    answers: list[PlanResult] = []
    with Planner(scratch=tmp_path, limits=Limits(), tree=acting) as planner:
        said(arguments(planner, tmp_path, "hello"))
        (tmp_path / "hang.yaml").write_text("does: hang")
        job = PlanningJob(kind="train", spec=tmp_path / "hang.yaml", profiles=())
        waiting = threading.Thread(target=lambda: answers.append(planner.plan(job)))
        waiting.start()
        planner.stop()
        waiting.join(timeout=patient_s(60.0))
        assert not waiting.is_alive()
        assert answers[0].plan is None
        assert arguments(planner, tmp_path, "hello").error == "stopped"


def test_nothing_plans_on_for_a_check_that_was_killed(acting: Path, tmp_path: Path) -> None:
    (tmp_path / "hang.yaml").write_text("does: hang")
    program = (
        "import sys; from pathlib import Path;"
        "from tuner.regress.workers import Limits, Planner, PlanningJob;"
        "scratch, tree, spec = map(Path, sys.argv[1:]);"
        "planner = Planner(scratch=scratch, limits=Limits(), tree=tree);"
        "planner.plan(PlanningJob(kind='train', spec=spec, profiles=()))"
    )
    words = (sys.executable, "-c", program, tmp_path, acting, tmp_path / "hang.yaml")
    with subprocess.Popen(list(map(str, words))) as check:
        begun_s = time.monotonic()
        workers: list[psutil.Process] = []
        while len(workers) < 2 and time.monotonic() < begun_s + 120.0:
            time.sleep(0.1)
            # The worker, and the job that it has forked.
            workers = psutil.Process(check.pid).children(recursive=True)
        check.kill()
    assert len(workers) == 2
    assert psutil.wait_procs(workers, timeout=patient_s(60.0))[1] == []


def test_the_worker_runs_jobs_in_process_too(tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text("goal: {kind: train}")
    here = Path.cwd()
    job = {"kind": "train", "spec": str(spec), "profiles": [], "time_limit_s": 1.0}
    try:
        assert "error" in answer_here(job)
    finally:
        os.chdir(here)
