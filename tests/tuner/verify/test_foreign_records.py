"""Records of trials that a plan or its study does not name are refused."""

import json
from pathlib import Path

import pytest

from tuner import api
from tuner.errors import PlanUnreadableError
from tuner.goals.verify import command_trials
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME
from tuner.verify.records import Verified
from tuner.verify.verification import Effort, Watcher

SILENT = Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None)


@pytest.fixture
def folder(datasheet_plan: Path) -> Path:
    """A plan on datasheets, which names the only decisions that can be launched."""
    steps = (f'{{"step": {at}, "step_s": 0.5}}\n' for at in range(8))
    (datasheet_plan / "steps.jsonl").write_text("".join(steps))
    return datasheet_plan


def _verify(folder: Path, *, resume: bool) -> Verified:
    by = command_trials(command=f"cat '{folder}/steps.jsonl'", metrics="jsonl", folder=folder)
    effort = Effort(trials=1, steps=3)
    return api.verify(folder, effort=effort, resume=resume, watcher=SILENT, by=by)


def test_the_record_of_a_decision_that_the_plan_does_not_name_is_refused(folder: Path) -> None:
    assert _verify(folder, resume=False).winner is not None
    file = folder / TRIALS_NAME / "0000.json"
    record = json.loads(file.read_text())
    record["decision"]["fp8_recipe"] = "fp8-of-another-plan"
    file.write_text(json.dumps(record))
    with pytest.raises(PlanUnreadableError, match=r"is not trial 0 .* move study\.db away"):
        _verify(folder, resume=True)
    study = folder / TRIALS_NAME / STUDY_NAME
    study.unlink()
    with pytest.raises(PlanUnreadableError, match="fp8-of-another-plan, which this plan does not"):
        _verify(folder, resume=True)
    # The way out that the line names.
    file.unlink()
    study.unlink()
    assert _verify(folder, resume=True).winner is not None
