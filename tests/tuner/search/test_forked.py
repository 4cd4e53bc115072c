"""Tasks that forked processes work out beside this one."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.patience import patient_s
from tuner.search.forked import Task, Worded, numbers


def squares(count: int) -> list[Task]:
    return [lambda n=n: None if n % 3 == 0 else n**2 / 7.0 for n in range(count)]  # type: ignore[misc] # a default binds the loop's value


def recorded(folder: Path, seconds: float) -> Callable[[int], Task]:
    """Tasks that leave the id of their process in a file."""

    def task(index: int) -> Task:
        def run() -> float:
            time.sleep(seconds)
            (folder / str(index)).write_text(str(os.getpid()), encoding="ascii")
            return float(index)

        return run

    return task


def test_numbers_are_the_same_whoever_works_them_out() -> None:
    alone = numbers(squares(40), processes=1, patience_s=patient_s(10.0))
    assert alone[:5] == [None, 1.0 / 7.0, 4.0 / 7.0, None, 16.0 / 7.0]
    for processes in (2, 3, 64):
        assert numbers(squares(40), processes=processes, patience_s=patient_s(10.0)) == alone


def test_words_beside_a_number_come_along_cut_where_they_are_long() -> None:
    def worded() -> float:
        time.sleep(0.02)
        return Worded(0.5, "é" * 400)

    results = numbers([worded] * 8, processes=2, patience_s=patient_s(10.0))
    assert results == [0.5] * 8
    lengths = {len(one.words) for one in results if isinstance(one, Worded)}
    assert lengths == {400, 123}


def test_several_processes_share_the_work(tmp_path: Path) -> None:
    task = recorded(tmp_path, 0.05)
    results = numbers([task(n) for n in range(6)], processes=2, patience_s=patient_s(10.0))
    assert results == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    workers = {int(path.read_text(encoding="ascii")) for path in tmp_path.iterdir()}
    assert len(workers) == 2
    assert os.getpid() in workers
    (other,) = workers - {os.getpid()}
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)


def test_what_a_process_that_died_owes_is_worked_out_here() -> None:
    parent = os.getpid()

    def fatal() -> float:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return 1.0

    assert numbers([fatal] * 4, processes=2, patience_s=patient_s(10.0)) == [1.0] * 4


def test_a_process_that_hangs_is_not_waited_for() -> None:
    parent = os.getpid()

    def stuck() -> float:
        time.sleep(0.05 if os.getpid() == parent else 60.0)
        return 1.0

    started_s = time.monotonic()
    assert numbers([stuck] * 4, processes=2, patience_s=0.2) == [1.0] * 4
    assert time.monotonic() - started_s < 20.0


def test_an_error_of_a_task_is_raised_here_once() -> None:
    def broken() -> float:
        raise ValueError("no number")

    with pytest.raises(ValueError, match="no number"):
        numbers([broken] * 4, processes=2, patience_s=patient_s(10.0))


def test_only_tasks_that_begin_here_are_reported() -> None:
    begun: list[int] = []
    numbers(squares(5), processes=1, patience_s=1.0, starting=begun.append)
    assert begun == [0, 1, 2, 3, 4]
