"""Moving between cores, on this machine and on made-up ones."""

import os
import threading
from pathlib import Path

import pytest

from profilers.cores import LAST_CACHE, Cores, listed

needs_affinity = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="threads have no affinity here"
)


@pytest.mark.parametrize(
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
    assert listed(tmp_path / "list") == cores


def test_a_machine_that_lists_nothing_has_no_other_cores(tmp_path: Path) -> None:
    assert listed(tmp_path / "missing") == frozenset()
    assert Cores.of_this_thread(tmp_path).count <= 1


def on_a_thread_of_its_own(run: object) -> None:
    """What a test pins must not stay pinned when it fails."""
    assert callable(run)
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


@needs_affinity
def test_a_rank_goes_round_the_cores_that_are_near_and_may_use_all_in_the_end() -> None:
    def run() -> None:
        allowed = os.sched_getaffinity(0)
        cores = Cores(sorted(allowed), allowed=frozenset(allowed))
        seen = []
        for _ in range(2 * len(allowed)):
            cores.move()
            seen.append(frozenset(os.sched_getaffinity(0)))
        if len(allowed) > 1:
            assert seen == [frozenset({core}) for core in [*sorted(allowed)[1:], min(allowed)]] * 2
        cores.leave()
        assert os.sched_getaffinity(0) == allowed

    on_a_thread_of_its_own(run)


@needs_affinity
def test_only_cores_behind_the_same_cache_are_near(tmp_path: Path) -> None:
    for core in os.sched_getaffinity(0):
        file = tmp_path / f"cpu{core}" / LAST_CACHE
        file.parent.mkdir(parents=True)
        file.write_text(f"{core},9999")
    cores = Cores.of_this_thread(tmp_path)
    assert cores.count == 1
    before = os.sched_getaffinity(0)
    cores.move()
    assert os.sched_getaffinity(0) == before


@needs_affinity
def test_a_core_that_was_taken_away_is_given_up() -> None:
    def run() -> None:
        before = os.sched_getaffinity(0)
        cores = Cores((min(before), 2**20), allowed=frozenset(before))
        cores.move()
        assert cores.count == 0
        cores.move()
        cores.leave()
        assert os.sched_getaffinity(0) == before

    on_a_thread_of_its_own(run)
