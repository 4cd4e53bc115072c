"""Which leases hold, by a clock that the test turns."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tests.expect import present
from tuner.verify.study.shared import (
    Lease,
    LeaseWatch,
    Worker,
    process_has_gone,
    renewal_thread,
    this_worker,
)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _elsewhere(renewals: int) -> Lease:
    return Lease(worker=Worker(token="a" * 32, place="boot", pid=1, started=1)).model_copy(
        update={"renewals": renewals}
    )


def _observe(watch: LeaseWatch, clock: Clock, counts: list[int]) -> bool:
    """Look every 10 s at a lease with these counts; return whether it has ended."""
    for count in counts:
        clock.now_s += 10.0
        watch.observe({7: _elsewhere(count)})
    return watch.has_ended(7, _elsewhere(counts[-1]))


def test_a_lease_that_is_not_renewed_in_time_has_ended() -> None:
    clock = Clock()
    watch = LeaseWatch(lease_s=60.0, now_s=clock)
    assert not _observe(watch, clock, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    assert not _observe(watch, clock, [8] * 6)
    assert _observe(watch, clock, [8])
    assert not _observe(watch, clock, [9])


def test_time_in_which_nobody_looked_does_not_count() -> None:
    clock = Clock()
    watch = LeaseWatch(lease_s=60.0, now_s=clock)
    assert not _observe(watch, clock, [5])
    # All of a suspended job wake at the same moment, and this one looks first.
    clock.now_s += 3600.0
    assert not _observe(watch, clock, [5])


def test_a_lease_that_was_given_up_or_whose_process_is_no_more_has_ended_at_once() -> None:
    watch = LeaseWatch(now_s=Clock())
    here = this_worker()
    assert watch.has_ended(0, Lease())
    assert not watch.has_ended(0, Lease(worker=here))
    assert watch.has_ended(0, Lease(worker=here.model_copy(update={"pid": 2**22 + 1})))


def test_an_ended_process_is_seen_in_its_own_place_only() -> None:
    alive = this_worker()
    assert not process_has_gone(alive)
    # Its number may belong to another process by now.
    assert process_has_gone(alive.model_copy(update={"started": alive.started - 1}))
    assert process_has_gone(alive.model_copy(update={"pid": 2**22 + 1}))
    for place in ("", "another boot"):
        assert not process_has_gone(alive.model_copy(update={"pid": 2**22 + 1, "place": place}))


def test_a_killed_process_that_nobody_has_waited_for_has_gone() -> None:
    code = "from tuner.verify.study.shared import this_worker as w; print(w().model_dump_json())"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(end='', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        worker = Worker.model_validate_json(present(process.stdout).readline())
        if not worker.place:
            pytest.skip("this system does not tell boots and processes apart")
        assert not process_has_gone(worker)
        process.kill()
        # It stays a zombie until it is waited for without this flag.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_has_gone(worker)


def test_renewals_go_on_until_the_end() -> None:
    renewals: list[float] = []
    thrice = threading.Event()

    def renew() -> None:
        renewals.append(time.monotonic())
        if len(renewals) == 3:
            thrice.set()

    with renewal_thread(renew, lease_s=0.06):
        assert thrice.wait(60.0)
    assert not any(thread.name == "renewal" for thread in threading.enumerate())
