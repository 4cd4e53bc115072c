"""Checkpoints as they are configured and launched: events, reports, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from profilers.steps.config import StepConfig, StepReport

Fields = dict[str, Any]
Start = Callable[..., subprocess.CompletedProcess[str]]


def _checkpoints(folder: Path, **changed: Any) -> Fields:
    shared = {"folder": str(folder / "shared"), "interval_steps": 2}
    return {"total_steps": 4, "shared": shared} | changed


def test_events_say_when_each_phase_of_a_launch_was_reached(
    tmp_path: Path, tiny_config: Callable[..., Fields], start_ranks: Start
) -> None:
    shared = {"folder": str(tmp_path / "shared"), "interval_steps": 1}
    fields = tiny_config(data=2, checkpoints=_checkpoints(tmp_path, shared=shared))
    (tmp_path / "step.json").write_text(json.dumps(fields), encoding="utf-8")
    options = [str(tmp_path / "step.json"), f"--report={tmp_path / 'report.json'}"]
    options.append(f"--events={tmp_path / 'events.jsonl'}")
    done = start_ranks("profilers.steps", *options, ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    report = StepReport.model_validate_json((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (report.restored_step, len(report.step_s), report.memory) == (0, 4, ())
    save = ["save_began", "written", "durable", "pruned", "training_resumed"]
    expected = ["process_start", "group_joined", "model_built", "restored"]
    expected += [*["step_done", *save] * 4, "finished"]
    for rank in range(2):
        lines = (tmp_path / f"events-{rank}.jsonl").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines]
        assert [event["event"] for event in events] == expected
        assert {event["rank"] for event in events} == {rank}
        times = [event["time_s"] for event in events]
        assert times == sorted(times)
        losses = [event["loss"] for event in events if event["event"] == "step_done"]
        assert losses == list(report.losses)


def test_what_checkpoints_cannot_be_is_one_line(
    tmp_path: Path, tiny_config: Callable[..., Fields], refused: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    shared = _checkpoints(tmp_path)["shared"]
    cases: list[tuple[Fields, str]] = [
        ({"shared": shared | {"interval_steps": 0}}, "interval_steps: Input should be greater"),
        ({"kept": 0}, "checkpoints.kept: Input should be greater than or equal to 1"),
        ({"keep": 1}, "checkpoints.keep: Extra inputs are not permitted"),
        ({"total_steps": True}, "checkpoints.total_steps: "),
        ({"host": {"folder": "/dev/shm/run"}}, "checkpoints.host: Extra inputs are not permitted"),
        ({"shared": shared | {"folder": str(tmp_path / "file")}}, "file: File exists"),
        ({"shared": shared | {"folder": str(tmp_path / "file" / "x")}}, "Not a directory"),
    ]
    wrong = []
    for changed, said in cases:
        line = refused(tiny_config(checkpoints=_checkpoints(tmp_path, **changed)))
        if said not in line:
            wrong.append(f"{said!r} expected, not {line!r}")
    assert not wrong
    limited = tiny_config(checkpoints=_checkpoints(tmp_path))
    assert "nothing is metered" in refused(limited, "--memory-limit", "1GiB")
    for option in ("--events", "--checkpoints"):
        line = refused(tiny_config(), option, "events.jsonl")
        assert f"{option} needs a configuration with checkpoints" in line
    # The command line's folder goes before the configuration's.
    assert "file: File exists" in refused(limited, "--checkpoints", str(tmp_path / "file"))
    absent = str(tmp_path / "absent" / "events.jsonl")
    assert "events-0.jsonl: No such file or directory" in refused(limited, "--events", absent)


def test_microbatches_that_cannot_be_run_are_refused(tiny_config: Callable[..., Fields]) -> None:
    cases: list[tuple[Fields, str]] = [
        ({"data": 3, "microbatches": [2, 1]}, "a count for each of 3 data ranks"),
        ({"data": 3, "microbatches": [2, 2, 1]}, "with 4 (global_batch_size / micro_batch_size)"),
        ({"data": 2, "microbatches": [4, 0]}, "greater than or equal to 1"),
        ({"data": 2, "pipeline": 2, "expert": 2, "microbatches": [3, 1]}, "not [3, 1]"),
        (
            {"data": 2, "pipeline": 2, "virtual": 2, "microbatches": [6, 2], "micro_batch_size": 1},
            "virtual_pipeline 1",
        ),
    ]
    wrong = []
    for changed, said in cases:
        with pytest.raises(ValidationError) as error:
            StepConfig.model_validate(tiny_config(**changed))
        if said not in str(error.value):
            wrong.append(f"{said!r} expected, not {error.value}")
    assert not wrong


def test_fields_that_say_nothing_are_not_written(tiny_config: Callable[..., Fields]) -> None:
    written = StepConfig.model_validate(tiny_config()).model_dump()
    assert not {"checkpoints", "microbatches"} & set(written)
    config = StepConfig.model_validate(
        tiny_config(data=2, microbatches=[3, 1], checkpoints=_checkpoints(Path("somewhere")))
    )
    assert StepConfig.model_validate_json(config.model_dump_json()) == config
    assert [config.sequences_of(rank) for rank in (0, 1)] == [range(6), range(6, 8)]


@pytest.mark.slow
def test_a_killed_rank_ends_the_launch_and_the_next_one_goes_on(
    tmp_path: Path, tiny_config: Callable[..., Fields], start_ranks: Start
) -> None:
    """As a supervisor does it: by the command line, with kill -9 of one rank."""
    fields = tiny_config(data=2) | {"checkpoints": _checkpoints(tmp_path, total_steps=10**6)}
    config = tmp_path / "step.json"
    config.write_text(json.dumps(fields), encoding="utf-8")
    options = ["profilers.steps", str(config), f"--report={tmp_path / 'report.json'}"]
    command = [sys.executable, "-m", "profilers.local_ranks", "--ranks", "2", *options]
    events = tmp_path / "events.jsonl"
    with subprocess.Popen([*command, f"--events={events}"], stderr=subprocess.PIPE) as job:
        own = tmp_path / "events-1.jsonl"
        while '"durable"' not in (own.read_text("utf-8") if own.exists() else ""):
            assert job.poll() is None
            time.sleep(0.05)
        os.kill(json.loads(own.read_text("utf-8").splitlines()[0])["pid"], signal.SIGKILL)
        assert job.wait() == 128 + signal.SIGKILL
    fields["checkpoints"]["total_steps"] = 8
    config.write_text(json.dumps(fields), encoding="utf-8")
    done = start_ranks(*options, ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    report = StepReport.model_validate_json((tmp_path / "report.json").read_text("utf-8"))
    assert report.restored_step is not None
    assert report.restored_step >= 2
    assert len(report.losses) == 8 - report.restored_step

    # Nothing is left to do; the report says so.
    done = start_ranks(*options, ranks=2)
    assert (done.returncode, done.stderr) == (0, "")
    report = StepReport.model_validate_json((tmp_path / "report.json").read_text("utf-8"))
    assert (report.restored_step, report.step_s) == (8, ())
