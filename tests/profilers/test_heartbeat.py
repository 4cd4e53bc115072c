"""Who is said to have left, from beats by hand and from a store that is a dictionary."""

import threading
import time

from profilers.heartbeat import Beat, FaultDetector, Heartbeat

NAMES = {1: "rank 1 on host-b", 2: "rank 2 on host-c"}


class Shelf:
    """A store in memory; once it is shut, nothing answers."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_shut = False

    def set(self, key: str, value: str, /) -> None:
        self._require_open()
        self.values[key] = value

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._require_open()
        return [self.values[key].encode() for key in keys]

    def _require_open(self) -> None:
        if self.is_shut:
            raise RuntimeError("connection reset")


def _beats(first: int, second: int, *, cases: int = 0) -> dict[int, Beat]:
    return {1: Beat(number=first, cases=0), 2: Beat(number=second, cases=cases)}


def test_beats_that_go_on_are_no_news() -> None:
    detector = FaultDetector(names=NAMES, gone_s=5.0)
    for second in range(20):
        assert detector.update(_beats(second, second), own_cases=0, now_s=float(second)) == ""


def test_a_rank_whose_beats_stand_still_is_named() -> None:
    detector = FaultDetector(names=NAMES, gone_s=5.0)
    found = [
        detector.update(_beats(min(second, 3), second), own_cases=0, now_s=float(second))
        for second in range(12)
    ]
    assert not any(found[:9])
    assert found[9] == "rank 1 on host-b died or was cut off 6 s ago"


def test_a_rank_that_beats_and_does_no_case_while_others_wait_hangs() -> None:
    detector = FaultDetector(names=NAMES, gone_s=5.0, stuck_s=30.0)
    found = [
        detector.update(_beats(second, second, cases=7), own_cases=7, now_s=float(second))
        for second in range(40)
    ]
    assert not any(found[:31])
    assert found[31] == "rank 1 on host-b hangs: no case done in 31 s"


def test_ranks_that_all_run_one_long_case_do_not_hang() -> None:
    detector = FaultDetector(names=NAMES, stuck_s=30.0)
    for second in range(100):
        assert detector.update(_beats(second, second), own_cases=0, now_s=float(second)) == ""


def test_a_beat_is_read_as_it_was_written() -> None:
    beat = Beat(number=12, cases=340)
    assert Beat.parsed(beat.written().encode()) == beat


def test_the_thread_reports_a_silent_peer() -> None:
    shelf, faults, heard = Shelf(), [], threading.Event()
    shelf.set("moetune-beat-1", Beat(number=1, cases=0).written())

    def lost(who: str) -> None:
        faults.append(who)
        heard.set()

    detector = FaultDetector(names={1: "rank 1"}, gone_s=0.05)
    heart = Heartbeat(shelf, rank=0, names={1: "rank 1"}, lost=lost, beat_s=0.01, detector=detector)
    heart.start()
    assert heard.wait(30.0)
    heart.stop()
    assert faults[0].startswith("rank 1 died")


def test_a_rank_that_lost_its_peers_learns_which_one_left() -> None:
    shelf = Shelf()
    faults: list[str] = []
    shelf.set("moetune-beat-1", Beat(number=1, cases=0).written())
    # Long enough to ask before the thread tells by itself.
    detector = FaultDetector(names={1: "rank 1"}, gone_s=3.0)
    heart = Heartbeat(
        shelf, rank=0, names={1: "rank 1"}, lost=faults.append, beat_s=0.01, detector=detector
    )
    heart.start()
    assert heart.blamed(patience_s=30.0).startswith("rank 1 died")
    heart.stop()
    assert faults == []


def test_a_store_that_is_gone_says_that_the_first_rank_left() -> None:
    shelf, faults, heard = Shelf(), [], threading.Event()

    def lost(who: str) -> None:
        faults.append(who)
        heard.set()

    heart = Heartbeat(shelf, rank=3, names={}, lost=lost, beat_s=0.01)
    heart.start()
    shelf.is_shut = True
    assert heard.wait(30.0)
    heart.stop()
    assert faults == ["the first rank, which keeps the store, left"]


def test_stopping_ends_the_thread_in_silence() -> None:
    shelf = Shelf()
    faults: list[str] = []
    heart = Heartbeat(shelf, rank=0, names={}, lost=faults.append, beat_s=0.01)
    before = threading.active_count()
    heart.start()
    started_s = time.monotonic()
    heart.stop()
    assert time.monotonic() - started_s < 30.0
    assert threading.active_count() <= before
    assert faults == []
