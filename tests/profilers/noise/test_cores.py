"""Moving between cores, on this machine and on made-up ones."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.noise.cores import LAST_LEVEL_CACHE, MAX_CORES, Cores, parse_cores
from tests.rows import each_row

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="threads have no affinity here"
)


@each_row(
    ("text", "cores"),
    [
        ("0-3,8\n", {0, 1, 2, 3, 8}),
        ("5", {5}),
        ("0-1,4-5", {0, 1, 4, 5}),
        ("", set()),
        ("all", set()),
        ("3-", {3}),
    ],
)
def test_lists_of_cores_are_read(tmp_path: Path, text: str, cores: set[int]) -> None:
    (tmp_path / "list").write_text(text)
    assert parse_cores(tmp_path / "list") == cores


def test_a_machine_that_lists_nothing_has_no_other_cores(tmp_path: Path) -> None:
    assert parse_cores(tmp_path / "missing") == frozenset()
    assert Cores.of_this_thread(tmp_path).count == 1


def on_a_thread_of_its_own(run: Callable[[], None]) -> None:
    """What a test pins must not stay pinned when it fails."""
    failed: list[BaseException] = []

    def caught() -> None:
        try:
            run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=caught)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def behind_one_cache(cpus: Path, text: str) -> Path:
    """A machine whose cores all say so."""
    for core in os.sched_getaffinity(0):
        file = cpus / f"cpu{core}" / LAST_LEVEL_CACHE
        file.parent.mkdir(parents=True)
        file.write_text(text)
    return cpus


@needs_affinity
def test_a_rank_goes_to_the_chosen_core_and_may_use_all_in_the_end() -> None:
    def run() -> None:
        allowed = frozenset(os.sched_getaffinity(0))
        near = sorted(allowed)[:MAX_CORES]
        cores = Cores(near, allowed=allowed)
        assert cores.count == len(near)
        for number in [*range(len(near)), 0]:
            cores.enter(number)
            assert cores.current == number
            assert os.sched_getaffinity(0) == ({near[number]} if len(near) > 1 else allowed)
        cores.leave()
        assert os.sched_getaffinity(0) == allowed

    on_a_thread_of_its_own(run)


@needs_affinity
def test_cores_behind_the_same_cache_are_near_as_far_as_they_may_be_used(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    cores = Cores.of_this_thread(behind_one_cache(tmp_path, f"0-{max(allowed)},9999"))
    assert cores.count == min(len(allowed), MAX_CORES)


@needs_affinity
def test_cores_behind_other_caches_are_not_near(tmp_path: Path) -> None:
    cores = Cores.of_this_thread(behind_one_cache(tmp_path, "9999"))
    assert cores.count == 1
    before = os.sched_getaffinity(0)
    cores.enter(0)
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_a_core_that_is_taken_away_is_given_up_and_the_rank_is_free_in_the_end() -> None:
    def run() -> None:
        before = frozenset(os.sched_getaffinity(0))
        cores = Cores((min(before), 2**20), allowed=before)
        cores.enter(0)
        assert os.sched_getaffinity(0) == {min(before)}
        cores.enter(1)
        assert (cores.count, cores.current) == (1, 0)
        cores.enter(0)
        cores.leave()
        assert os.sched_getaffinity(0) == before

    on_a_thread_of_its_own(run)
