"""Loops over the plan of `planned` with a launcher that starts nothing."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.tuner.verify.testing import DecisionSpace, FakeLauncher, Join, Joined, Record, Verify
from tuner import api
from tuner.config.train import TrainDecision
from tuner.goals.train_folder import read_plan, read_used_profile, write_plan
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME, write_trial
from tuner.verify.records import TrialRecord, Verified
from tuner.verify.search import StudySearch
from tuner.verify.space import TrainSpace
from tuner.verify.study.database import open_study
from tuner.verify.study.shared import (
    TRAINING,
    StudyCallbacks,
    Worker,
    former_trials,
    join_workers,
    this_worker,
)
from tuner.verify.verification import Effort, Watcher


@pytest.fixture(scope="session")
def datasheet_folder(
    write_spec: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a plan for Megatron-LM that no profile stands behind; read only."""
    folder = tmp_path_factory.mktemp("datasheet")
    spec = write_spec(
        folder,
        pool={"profile": None, "device": "H200", "memory_per_device": None},
        search={"micro_batch_size": [1, 2], "tensor_model_parallel_size": [1]},
        emit=("megatron-lm",),
    )
    made = api.plan(spec)
    write_plan(folder / "plan", made.plan, spec=made.spec, profiles=made.profiles)
    return folder / "plan"


@pytest.fixture
def datasheet_plan(datasheet_folder: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(datasheet_folder, tmp_path / "datasheet plan"))


def _space_of(folder: Path, **changes: Any) -> TrainSpace:
    plan = read_plan(folder).model_copy(update=changes)
    machine = api.machine_of(plan.cluster.pools[0], read_used_profile(folder))
    return TrainSpace(plan=plan, machine=machine)


@pytest.fixture(scope="session")
def bound_space(bound_plan: Path) -> TrainSpace:
    """The neighbourhood of the plan that `planned` copies."""
    return _space_of(bound_plan)


@pytest.fixture
def space(bound_space: TrainSpace) -> DecisionSpace:
    """The neighbourhood of a plan's folder: space(folder, emit=...)."""

    def neighbourhood(folder: Path, **changes: Any) -> TrainSpace:
        is_bound = not changes and read_plan(folder) == bound_space.plan
        return bound_space if is_bound else _space_of(folder, **changes)

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
    decision = present(read_plan(planned).decision)
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


@pytest.fixture
def ghost() -> Callable[[], Worker]:
    """A worker of this place whose process has ended, as others see it."""

    def worker() -> Worker:
        # Process ids end at 2**22.
        return this_worker().model_copy(update={"pid": 2**22 + 1})

    return worker


@pytest.fixture
def joined(ghost: Callable[[], Worker]) -> Joined:
    """Join a folder's study as a worker that others take for killed, until the block is left."""

    @contextmanager
    def study(
        neighbourhood: TrainSpace,
        folder: Path,
        finished: Sequence[TrialRecord] = (),
        *,
        where: Path | str = "",
        name: str = "test",
        write: Callable[[TrialRecord], None] | None = None,
        on_message: Callable[[str], None] = lambda _line: None,
        **how: Any,
    ) -> Iterator[StudySearch]:
        outside = StudyCallbacks(
            write=write or (lambda record: write_trial(folder, record)),
            copy=lambda record: write_trial(folder, record),
            on_message=on_message,
        )
        database = open_study(
            where or folder / TRIALS_NAME / STUDY_NAME,
            study_name=name,
            former=former_trials(finished),
            on_message=on_message,
        )
        what: dict[str, Any] = {"worker": ghost()} | how
        with join_workers(
            database, kind=TRAINING, finished=finished, outside=outside, **what
        ) as shared:
            yield StudySearch(neighbourhood, shared)

    return study


@pytest.fixture
def join(joined: Joined) -> Iterator[Join]:
    """Join likewise until the end of the test: join(space, folder)."""
    with ExitStack() as left_at_the_end:
        yield lambda *what, **how: left_at_the_end.enter_context(joined(*what, **how))
