"""Several launches at a time, and what becomes of them when one cannot go on."""

import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner import api
from tuner.config.train import TrainDecision
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.loop import launch_threads
from tuner.verify.verification import Effort, Watcher

CRASHED = LaunchResult(status="crashed", reason="", report=None, wall_s=0.0)


def test_two_launches_meet_and_no_decision_is_launched_twice(planned: Path) -> None:
    meeting = threading.Barrier(2, timeout=60.0)
    launched: list[TrainDecision] = []

    def run(launch: Launch) -> LaunchResult:
        launched.append(launch.decision)
        meeting.wait()
        return CRASHED

    result = api.verify(
        planned,
        effort=Effort(trials=6, steps=3, parallel=2),
        resume=False,
        watcher=Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None),
        launch=run,
    )
    assert len(result.trials) == 6
    assert max(Counter(launched).values()) == 1


@each_row("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_what_flies_is_told_to_stop_when_the_loop_is_left(error: type[BaseException]) -> None:
    stopped = threading.Event()
    ended: list[bool] = []

    def run() -> LaunchResult:
        ended.append(stopped.wait(60.0))
        return CRASHED

    def loop() -> None:
        with launch_threads(2, stop=stopped.set) as threads:
            threads.submit(run)
            raise error

    with pytest.raises(error):
        loop()
    assert ended == [True]


@each_row("parallel", [1, 2])
def test_an_error_of_one_launch_is_raised_where_its_end_is_awaited(parallel: int) -> None:
    def run() -> LaunchResult:
        raise ValueError("refused")

    with (
        pytest.raises(ValueError, match="refused"),
        launch_threads(parallel, stop=lambda: None) as threads,
    ):
        threads.submit(run).result()
