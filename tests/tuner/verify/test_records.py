"""Trial records on disk: what is damaged is named, and nothing is guessed."""

import json
from pathlib import Path

import pytest

from tests.rows import each_row
from tests.tuner.verify.testing import Record
from tuner.errors import PlanUnreadableError
from tuner.plans import folder
from tuner.plans.folder import TRIALS_NAME, write_trial
from tuner.verify.records import read_trials


def test_records_come_back_as_they_were_written_in_order(planned: Path, record: Record) -> None:
    written = [record(number, measured_s=1.0 + number) for number in (12, 3, 7)]
    for one in written:
        write_trial(planned, one)
    assert read_trials(planned / TRIALS_NAME) == tuple(sorted(written, key=lambda one: one.number))


def test_a_plan_without_trials_has_none(planned: Path) -> None:
    assert read_trials(planned / TRIALS_NAME) == ()


def _damaged(text: str, damage: str) -> str:
    fields = json.loads(text)
    if damage == "truncated":
        return text[: len(text) // 2]
    if damage == "empty":
        return ""
    if damage == "unknown key":
        return json.dumps(fields | {"bogus": 1})
    if damage == "other version":
        return json.dumps(fields | {"schema_version": 2})
    if damage == "negative time":
        return json.dumps(fields | {"measured_step_s": -1.0})
    return json.dumps([fields])


@each_row(
    "damage", ["truncated", "empty", "unknown key", "other version", "negative time", "a list"]
)
def test_a_damaged_record_is_one_line_that_names_the_file_and_the_way_out(
    planned: Path, record: Record, damage: str
) -> None:
    write_trial(planned, record(0))
    write_trial(planned, record(1))
    file = planned / TRIALS_NAME / "0001.json"
    file.write_text(_damaged(file.read_text(), damage))
    with pytest.raises(PlanUnreadableError, match=r"0001\.json.*delete it") as raised:
        read_trials(planned / TRIALS_NAME)
    assert raised.value.exit_code == 2


def test_a_folder_or_a_giant_in_place_of_a_record_is_one_line(
    planned: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trial(planned, record(0))
    (planned / TRIALS_NAME / "0001.json").mkdir()
    with pytest.raises(PlanUnreadableError, match=r"0001\.json: Is a directory"):
        read_trials(planned / TRIALS_NAME)
    (planned / TRIALS_NAME / "0001.json").rmdir()
    monkeypatch.setattr(folder, "MAX_RECORD_BYTES", 10)
    with pytest.raises(PlanUnreadableError, match=r"0000\.json: larger than any"):
        read_trials(planned / TRIALS_NAME)
