"""Who counts as present and who as gone, by a clock that the test turns."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tuner.verify.study.worker import (
    Attendance,
    Worker,
    WorkerHeartbeat,
    heartbeat_thread,
    process_has_gone,
    this_worker,
)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _elsewhere() -> Worker:
    return this_worker().model_copy(update={"place": "another boot", "pid": 1})


def _look(attendance: Attendance, clock: Clock, worker: Worker, counts: list[int]) -> None:
    """Look every 10 s at a worker whose beats are these."""
    for count in counts:
        clock.now_s += 10.0
        attendance.look({worker.token: WorkerHeartbeat(worker=worker, count=count)})


def test_a_beat_that_stands_still_for_the_lease_is_the_end_of_a_worker() -> None:
    clock = Clock()
    attendance = Attendance(lease_s=60.0, now_s=clock)
    worker = _elsewhere()
    _look(attendance, clock, worker, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert not attendance.has_gone(worker.token)
    _look(attendance, clock, worker, [8] * 6)
    assert not attendance.has_gone(worker.token)
    _look(attendance, clock, worker, [8])
    assert attendance.has_gone(worker.token)
    _look(attendance, clock, worker, [9])
    assert not attendance.has_gone(worker.token)


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = Clock()
    attendance = Attendance(lease_s=60.0, now_s=clock)
    worker = _elsewhere()
    _look(attendance, clock, worker, [5])
    # All of a suspended job wake at the same moment, and this one looks first.
    clock.now_s += 3600.0
    _look(attendance, clock, worker, [5])
    assert not attendance.has_gone(worker.token)


def test_a_worker_that_signed_off_has_gone_at_once() -> None:
    attendance = Attendance(now_s=Clock())
    worker = _elsewhere()
    attendance.look({worker.token: WorkerHeartbeat(worker=worker, count=3)})
    assert attendance.present(but=this_worker()) == (worker,)
    attendance.look({})
    assert attendance.has_gone(worker.token)
    assert attendance.present(but=this_worker()) == ()


def test_only_a_sign_shows_that_a_worker_elsewhere_is_there() -> None:
    clock = Clock()
    attendance = Attendance(now_s=clock)
    worker, here = _elsewhere(), this_worker()
    _look(attendance, clock, worker, [7])
    assert not attendance.is_seen(worker)
    assert attendance.is_seen(here)
    _look(attendance, clock, worker, [8])
    assert attendance.is_seen(worker)


def test_an_ended_process_is_seen_in_its_own_place_only() -> None:
    alive = this_worker()
    assert not process_has_gone(alive)
    # Its number may belong to another process by now.
    assert process_has_gone(alive.model_copy(update={"started": alive.started - 1}))
    assert process_has_gone(alive.model_copy(update={"pid": 2**22 + 1}))
    for place in ("", "another boot"):
        assert not process_has_gone(alive.model_copy(update={"pid": 2**22 + 1, "place": place}))


def test_a_killed_process_that_nobody_has_waited_for_has_gone() -> None:
    code = "from tuner.verify.study.worker import this_worker as w; print(w().model_dump_json())"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(end='', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        worker = Worker.model_validate_json(process.stdout.readline())
        if not worker.place:
            pytest.skip("this system does not tell boots and processes apart")
        assert not process_has_gone(worker)
        process.kill()
        # It stays a zombie until it is waited for without this flag.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_has_gone(worker)


def test_beats_go_on_until_the_end() -> None:
    heartbeats: list[float] = []
    thrice = threading.Event()

    def heartbeat() -> None:
        heartbeats.append(time.monotonic())
        if len(heartbeats) == 3:
            thrice.set()

    with heartbeat_thread(heartbeat, lease_s=0.06):
        assert thrice.wait(60.0)
    assert not any(thread.name == "beat" for thread in threading.enumerate())
