"""Records of trials that a plan or its study does not name, and records that are missing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.verify.testing import SILENT
from tuner import api
from tuner.errors import PlanUnreadableError
from tuner.goals.verify import command_trials
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME
from tuner.verify.records import Verified
from tuner.verify.verification import Effort


@pytest.fixture
def folder(datasheet_plan: Path) -> Path:
    """A plan on datasheets, which names the only decisions that can be launched."""
    steps = (f'{{"step": {at}, "step_s": 0.5}}\n' for at in range(8))
    (datasheet_plan / "steps.jsonl").write_text("".join(steps))
    return datasheet_plan


def _verify(
    folder: Path, *, resume: bool, on_message: Callable[[str], None] = lambda _line: None
) -> Verified:
    by = command_trials(command=f"cat '{folder}/steps.jsonl'", metrics="jsonl")
    effort = Effort(trials=1, steps=3)
    return api.verify(
        folder, effort=effort, resume=resume, watcher=SILENT, by=by, on_message=on_message
    )


def test_the_record_of_a_decision_that_the_plan_does_not_name_is_refused(folder: Path) -> None:
    assert _verify(folder, resume=False).winner is not None
    file = folder / TRIALS_NAME / "0000.json"
    record = json.loads(file.read_text())
    record["decision"]["fp8_recipe"] = "fp8-of-another-plan"
    file.write_text(json.dumps(record))
    with pytest.raises(PlanUnreadableError, match=r"is not trial 0 .* move study\.db\* away"):
        _verify(folder, resume=True)
    study = folder / TRIALS_NAME / STUDY_NAME
    study.unlink()
    with pytest.raises(PlanUnreadableError, match="fp8-of-another-plan, which this plan does not"):
        _verify(folder, resume=True)
    # The way out that the line names.
    file.unlink()
    study.unlink()
    assert _verify(folder, resume=True).winner is not None


def test_a_record_that_was_deleted_is_not_written_again_without_a_word(folder: Path) -> None:
    _verify(folder, resume=False)
    file, study = (folder / TRIALS_NAME / name for name in ("0000.json", STUDY_NAME))
    kept, said = file.read_bytes(), list[str]()
    file.unlink()
    with pytest.raises(PlanUnreadableError, match=r"holds trial 0, whose .* missing: add --resume"):
        _verify(folder, resume=False)
    assert not file.exists()
    for _ in range(2):
        _verify(folder, resume=True, on_message=said.append)
        assert file.read_bytes() == kept
    (line,) = said
    assert "holds trial 0, whose record is missing and written again; to measure it again" in line
    # The way out that the line names.
    file.unlink()
    study.unlink()
    _verify(folder, resume=True)
    assert file.read_bytes() != kept
