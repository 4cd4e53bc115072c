"""Runs that end before the time limit of their Slurm job."""

import json
import re
import time
from pathlib import Path
from typing import Any

from tests.expect import present
from tests.rows import Failures, each_row
from tests.tuner.engines.test_checkpoints import RESUMED, saving, saving_on_hosts
from tests.tuner.engines.testing import (
    Recorders,
    changed,
    sample_decision,
    sample_verified,
    write_emitted,
)
from tests.tuner.models import example_model
from tuner.engines.checkpoints import checkpoint_schedule
from tuner.engines.targets import TARGETS
from tuner.engines.writers import emit
from tuner.plans.train import VerifiedPlan

HERE = Path(__file__).parent
FLAG, FIELD = "--exit-duration-in-mins", "train.exit_duration_in_mins"
MEGATRON = ("megatron-lm", "megatron-lm-0.16")
BRIDGE = ("megatron-bridge", "megatron-bridge-26.04", "megatron-bridge-26.02")


def forecast(verified: VerifiedPlan, **changes: Any) -> VerifiedPlan:
    """Change what is forecast of a plan's run."""
    return changed(verified, {f"predicted.run.{name}": value for name, value in changes.items()})


def started(recorders: Recorders, folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Start an emitted script as the first of its nodes."""
    return recorders.start(
        folder / "run.sh",
        *arguments,
        cwd=folder,
        MASTER_ADDR="head",
        NODE_RANK="0",
        MEGATRON_LM="/megatron",
        RECIPE="mine",
        **variables,
    ).only("torchrun")


def minutes(argv: list[str]) -> str:
    """Return what a program is told, the last of it; empty for nothing."""
    said = re.findall(rf"(?:{FLAG} |{FIELD}=)(\S*)", " ".join(argv))
    return said[-1] if said else ""


@each_row(
    ("changes", "expected"),
    (
        ({}, 4),
        ({"checkpoint_write_s": 20.0}, 84),
        ({"checkpoint_stall_s": 30.0}, 124),
        ({"checkpoint_write_s": 20.1, "checkpoint_stall_s": 1.0}, 85),
    ),
)
def test_the_last_step_and_checkpoint_take_twice_what_is_forecast(
    changes: dict[str, Any], expected: int
) -> None:
    # Worked by hand: a step of two seconds, a write in the background and the last one.
    schedule = present(checkpoint_schedule(forecast(saving("megatron-lm"), **changes)))
    assert schedule.ending_s == expected, changes


def test_a_run_in_a_slurm_job_is_told_the_minutes_that_are_left(
    recorders: Recorders, tmp_path: Path, failures: Failures
) -> None:
    for target in (*MEGATRON, *BRIDGE):
        # 120 s are kept for the job and the start, 84 s for the last checkpoint.
        verified = forecast(saving(target), checkpoint_write_s=20.0)
        folder = tmp_path / target
        write_emitted(folder, emit(target, verified))
        for left_s, expected in (
            (3600, {"56"}),  # 3396 s
            (324, {"1", "2"}),  # 120 s, and the time that the script needs
            (100, {"1"}),  # nodes whose clocks differ must all be told a number
            (-5, {""}),
        )[: 4 if target in (MEGATRON[0], BRIDGE[0]) else 1]:
            end = str(int(time.time()) + left_s)
            argv = started(recorders, folder, CHECKPOINTS="/shared", SLURM_JOB_END_TIME=end)
            with failures.of(target, left_s):
                assert minutes(argv) in expected, argv
        far = str(int(time.time()) + 3600)
        own = FLAG if target in MEGATRON else f"{FIELD}=7"
        words = (own, "7") if target in MEGATRON else (own,)
        argv = started(recorders, folder, *words, CHECKPOINTS="/shared", SLURM_JOB_END_TIME=far)
        with failures.of(target, "the user's own"):
            assert minutes(argv) == "7"
        cases: list[dict[str, str]] = [
            {},
            {"CHECKPOINTS": "/shared"},
            {"SLURM_JOB_END_TIME": far},
            {"CHECKPOINTS": "/shared", "SLURM_JOB_END_TIME": ""},
            {"CHECKPOINTS": "/shared", "SLURM_JOB_END_TIME": "NONE"},
            {"CHECKPOINTS": "/shared", "SLURM_JOB_END_TIME": "x[$(touch${IFS}evaluated)]"},
        ]
        # Scripts of other releases have the same lines.
        for environment in cases if target in (MEGATRON[0], BRIDGE[0]) else cases[:1]:
            with failures.of(target, environment):
                assert minutes(started(recorders, folder, **environment)) == ""
                assert not (folder / "evaluated").exists()
        with failures.of(target, "header"):
            assert "SLURM_JOB_END_TIME       when the job ends" in (folder / "run.sh").read_text(
                encoding="utf-8"
            )


@each_row("target", ("megatron-lm", "megatron-bridge"))
def test_checkpoints_on_hosts_do_not_change_it(
    recorders: Recorders, tmp_path: Path, target: str
) -> None:
    folder = tmp_path / target
    write_emitted(folder, emit(target, saving_on_hosts(target, replicas=1)))
    argv = started(
        recorders,
        folder,
        CHECKPOINTS="/shared",
        LOCAL_CHECKPOINTS="/dev/shm/mine",
        SLURM_JOB_END_TIME=str(int(time.time()) + 3600),
    )
    # Worked by hand: 3600 s less 124 s.
    assert minutes(argv) == "57"
    script = (folder / "run.sh").read_text(encoding="utf-8")
    assert "does not save a step to CHECKPOINTS that it\n# has just saved to hosts." in script


def test_every_release_has_the_setting() -> None:
    flags = json.loads((HERE / "megatron_flags.json").read_text(encoding="utf-8"))["releases"]
    assert all(FLAG in known for known in flags.values())
    fields = json.loads((HERE / "bridge_fields.json").read_text(encoding="utf-8"))["releases"]
    assert all(FIELD in known["overrides"] for known in fields.values())
    assert {name for name, one in TARGETS.items() if one.saves_before_time_limit} == {
        *MEGATRON,
        *BRIDGE,
    }


def test_other_scripts_know_no_time_limit() -> None:
    for target in RESUMED.keys() - {*MEGATRON, *BRIDGE}:
        files = emit(target, saving(target))
        assert not any("SLURM_JOB_END_TIME" in file.text for file in files), target
    for target in ("megatron-lm", "megatron-bridge"):
        model = example_model("qwen3-30b-a3b")
        files = emit(target, sample_verified(model, sample_decision(), emit=(target,)))
        assert not any("SLURM_JOB_END_TIME" in file.text for file in files), target
