"""Records of trials that a plan does not name are refused; a journal of no use is begun anew."""

import json
from pathlib import Path

import pytest

from tuner import api
from tuner.errors import PlanUnreadableError
from tuner.goals.verify import command_trials
from tuner.plans.folder import JOURNAL_NAME, TRIALS_NAME
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
    with pytest.raises(PlanUnreadableError, match="fp8-of-another-plan, which this plan does not"):
        _verify(folder, resume=True)
    # The way out that the line names.
    file.unlink()
    assert _verify(folder, resume=True).winner is not None


def test_a_journal_that_optuna_cannot_follow_is_begun_anew(folder: Path) -> None:
    first = _verify(folder, resume=False)
    journal = folder / TRIALS_NAME / JOURNAL_NAME
    lines = journal.read_text().splitlines()
    wide = {"name": "FloatDistribution", "attributes": {"low": 0, "high": 10**400}}
    spoilt = {
        "wide": json.dumps(json.loads(lines[1]) | {"distributions": {"x": json.dumps(wide)}}),
        "deep": "[" * 100_000,
        "deep object": '{"a":' * 100_000,
        "distributions": json.dumps(json.loads(lines[1]) | {"distributions": 5}),
        "params": json.dumps(json.loads(lines[1]) | {"params": [1]}),
        "attributes": json.dumps(json.loads(lines[1]) | {"user_attrs": 5}),
        "state": json.dumps(json.loads(lines[1]) | {"state": 99}),
        "time": json.dumps(json.loads(lines[1]) | {"datetime_start": 5}),
        "ended twice": "\n".join((lines[-1], lines[-1])),
        "two objectives": json.dumps(json.loads(lines[0]) | {"directions": [1, 1]}),
        "to be maximized": json.dumps(json.loads(lines[0]) | {"directions": [2]}),
        "huge": json.dumps(json.loads(lines[1]) | {"study_id": 10**400}),
    }
    failures = []
    for name, line in spoilt.items():
        at = 0 if "ob" in name or "max" in name else 1
        journal.write_text("\n".join((*lines[:at], line, *lines[at + 1 :])) + "\n")
        try:
            result = _verify(folder, resume=True)
        except Exception as error:
            failures.append(f"{name}: {error!r}")
            continue
        if result.winner != first.winner:
            failures.append(f"{name}: another winner")
        if name not in ("ended twice", "huge") and not list(journal.parent.glob("*.damaged*")):
            failures.append(f"{name}: taken for a journal of this study")
        for file in journal.parent.glob("*.damaged*"):
            file.unlink()
    assert failures == []
