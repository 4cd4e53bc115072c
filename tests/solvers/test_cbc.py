"""What CBC's files say is believed; what PuLP makes of them is not."""

import math
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from solvers.cbc import parse_cbc_output, run_cbc
from solvers.errors import BackendFailedError
from solvers.result import Status

STOPPED_LOG = """Result - Stopped on time limit

Objective value:                460.31521739
Lower bound:                    441.062
Gap:                            0.04
"""


def test_an_incumbent_at_the_time_limit_is_feasible_with_its_bound() -> None:
    solution = "Stopped on time - objective value 460.31521739\n   0 x0_1   1   12.5\n"
    result = parse_cbc_output(solution, STOPPED_LOG)
    assert result.status is Status.FEASIBLE
    assert result.bound == pytest.approx(441.0615)
    assert result.value_of_column == {"x0_1": 1.0}


def test_a_solution_file_that_says_optimal_after_a_stop_is_not_believed() -> None:
    result = parse_cbc_output("Optimal - objective value 460.31521739\n", STOPPED_LOG)
    assert result.status is Status.FEASIBLE
    assert result.bound == pytest.approx(441.0615)


def test_every_ending_has_one_meaning() -> None:
    for first_line, status, bound in (
        ("Optimal - objective value 12.50000000", Status.OPTIMAL, 12.5),
        ("Infeasible - objective value 3.0", Status.INFEASIBLE, math.inf),
        ("Integer infeasible - objective value 3.0", Status.INFEASIBLE, math.inf),
        ("Stopped on nodes - objective value 3.0", Status.UNKNOWN, -math.inf),
        ("Unbounded - objective value 3.0", Status.UNKNOWN, -math.inf),
        ("", Status.UNKNOWN, -math.inf),
    ):
        result = parse_cbc_output(first_line + "\n", "Result - Optimal solution found\n")
        assert (result.status, result.bound) == (status, bound)


def test_without_an_integer_solution_the_continuous_one_is_not_taken_for_it() -> None:
    first = "Stopped on time (no integer solution - continuous used) - objective value 8.9"
    result = parse_cbc_output(f"{first}\n  0 x0_0 0.4 0\n", STOPPED_LOG)
    assert result.status is Status.UNKNOWN
    assert result.value_of_column == {}


def program(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


@contextmanager
def waiting_threads(count: int) -> Iterator[None]:
    """Threads that the system may hand a signal of the process to."""
    is_over = threading.Event()
    for _ in range(count):
        threading.Thread(target=is_over.wait).start()
    try:
        yield
    finally:
        is_over.set()


@pytest.mark.parametrize("other_threads", [0, 4])
def test_an_interrupt_leaves_no_process_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_threads: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private dir"))
    (tmp_path / "private dir").mkdir()
    note = tmp_path / "pid"
    # Stands in for CBC: interrupts its caller, then hangs.
    fake = program(tmp_path / "cbc", f"echo $$ > '{note}'; kill -INT $PPID; exec sleep 600\n")
    with waiting_threads(other_threads), pytest.raises(KeyboardInterrupt):
        run_cbc(executable=fake, write_model=Path.touch, time_limit_s=500.0, threads=1)
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)
    assert list((tmp_path / "private dir").iterdir()) == []


def test_an_interrupt_while_the_program_starts_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    fake = program(tmp_path / "cbc", "exec sleep 600\n")
    with waiting_threads(4), pytest.raises(KeyboardInterrupt):
        run_cbc(executable=fake, write_model=Path.touch, time_limit_s=500.0, threads=1)
    assert [process.poll() for process in started] == [-signal.SIGKILL]


def test_a_broken_program_is_named_and_not_taken_for_a_result(tmp_path: Path) -> None:
    fake = program(tmp_path / "cbc", "echo out of licences\n")
    with pytest.raises(BackendFailedError, match="no solution \\(out of licences\\); reinstall"):
        run_cbc(executable=fake, write_model=Path.touch, time_limit_s=5.0, threads=1)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(BackendFailedError, match="cannot be started"):
        run_cbc(
            executable=str(tmp_path / "absent"),
            write_model=Path.touch,
            time_limit_s=5.0,
            threads=1,
        )


def test_what_preprocessing_breaks_is_retried_without_it(tmp_path: Path) -> None:
    # Stands in for CBC: with preprocessing it calls an infeasible model optimal.
    fake = program(
        tmp_path / "cbc",
        'case "$*" in\n'
        '  *"-preprocess off"*) echo "Infeasible - objective value 3.0" > solution.txt;;\n'
        '  *) echo "Optimal - objective value 3.0" > solution.txt\n'
        '     echo "Cgl0013I Postprocessed model is infeasible - possible tolerance issue";;\n'
        "esac\n",
    )
    result = run_cbc(executable=fake, write_model=Path.touch, time_limit_s=5.0, threads=1)
    assert result.status is Status.INFEASIBLE


def test_a_model_is_not_infeasible_because_preprocessing_ran_out_of_time(tmp_path: Path) -> None:
    # Stands in for CBC 2.10.3, which says so of a feasible model of 132 columns in 25 ms.
    says = (
        'echo "Integer infeasible - objective value 0.0" > solution.txt\n'
        'echo "Pre-processing says infeasible or unbounded"\n'
    )
    for waits, limit_s, status in (
        ("sleep 0.3\n", 0.25, Status.UNKNOWN),
        ("", 60.0, Status.INFEASIBLE),
    ):
        executable = program(tmp_path / f"cbc-{status.value}", waits + says)
        result = run_cbc(
            executable=executable, write_model=Path.touch, time_limit_s=limit_s, threads=1
        )
        assert result.status is status
