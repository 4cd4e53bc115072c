"""Loops over the plan of `planned` with a launcher that starts nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner import api
from tuner.plan import TrainDecision
from tuner.plan_folder import read_plan, read_used_profile
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.records import TrialRecord, Verified
from tuner.verify.testing import FakeLauncher
from tuner.verify.verification import Effort, Watcher

Around = Callable[..., Neighbourhood]
Record = Callable[..., TrialRecord]
Verify = Callable[..., Verified]


@pytest.fixture
def around() -> Around:
    """The neighbourhood of a plan's folder: around(folder, emit=...)."""

    def neighbourhood(folder: Path, **changes: Any) -> Neighbourhood:
        plan = read_plan(folder).model_copy(update=changes)
        return Neighbourhood(
            plan=plan,
            work=api.work_of(plan),
            machine=api.machine_of(plan.cluster.pools[0], read_used_profile(folder)),
            limits=plan.search,
        )

    return neighbourhood


@pytest.fixture
def verify() -> Verify:
    """Verify with a fake: verify(folder, launcher, trials=8, resume=False, ended=...)."""

    def verified(
        folder: Path,
        launcher: FakeLauncher,
        *,
        trials: int = 8,
        resume: bool = False,
        ended: Callable[[TrialRecord], None] = lambda _record: None,
    ) -> Verified:
        return api.verify(
            folder,
            effort=Effort(trials=trials, steps=5),
            resume=resume,
            watcher=Watcher(started=lambda _decision, _seconds: None, ended=ended),
            launch=launcher,
        )

    return verified


@pytest.fixture
def record(planned: Path) -> Record:
    """A trial that ran, 2 s predicted of which 0.5 s communicate: record(3, measured_s=2.2)."""
    decision = read_plan(planned).decision
    assert decision is not None
    default: TrainDecision = decision

    def made(number: int, *, measured_s: float | None = 2.0, **changes: Any) -> TrialRecord:
        fields: dict[str, Any] = {
            "number": number,
            "origin": "plan",
            "decision": default,
            "status": "ok" if measured_s is not None else "crashed",
            "predicted_step_s": 2.0,
            "predicted_communication_s": 0.5,
            "predicted_activation_bytes": (1000,),
            "measured_steps_s": () if measured_s is None else (measured_s,) * 5,
            "measured_step_s": measured_s,
            "measured_activation_bytes": (1000,),
            "wall_s": 1.0,
            "engine": "reference",
            "release": "2.0",
            "device": "here",
        }
        return TrialRecord.model_validate(fields | changes)

    return made
