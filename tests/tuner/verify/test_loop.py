"""Several launches at a time, and what becomes of them when one cannot go on."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.steps.config import StepConfig
from tests.rows import each_row
from tests.tuner.verify.testing import FakeLauncher, decision_of
from tuner import api
from tuner.config.train import TrainDecision
from tuner.verify.launcher import Hopeless, LaunchResult, never_hopeless
from tuner.verify.loop import launch_threads
from tuner.verify.verification import Effort, Watcher

Launcher = Callable[..., FakeLauncher]

CRASHED = LaunchResult(status="crashed", reason="", report=None, wall_s=0.0)


def test_two_launches_meet_and_no_decision_is_launched_twice(planned: Path) -> None:
    meeting = threading.Barrier(2, timeout=60.0)
    launched: list[TrainDecision] = []

    def launch(
        config: StepConfig,
        *,
        folder: Path,
        deadline_s: float,
        hopeless: Hopeless = never_hopeless,
    ) -> LaunchResult:
        del folder, deadline_s
        launched.append(decision_of(config))
        meeting.wait()
        return CRASHED

    result = api.verify(
        planned,
        effort=Effort(trials=6, steps=3, parallel=2),
        resume=False,
        watcher=Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None),
        launch=launch,
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
