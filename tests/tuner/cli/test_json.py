"""`--json` of every command: it is there, and what it prints is of a published schema."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from tests.rows import each_row
from tuner.cli import app as frame
from tuner.cli.schema import SCHEMAS

ROOT = Path(__file__).parents[3]
STORED = ROOT / "examples" / "profiles" / "epyc-2-ranks"
MIXTRAL = ROOT / "examples" / "worked" / "mixtral-8x7b-64-a100"
SERVING = ROOT / "examples" / "serving" / "mixed-pool.yaml"
DEPLOYED = ROOT / "examples" / "serving" / "deepseek-v3-32-h200.yaml"
SERVER = "vllm serve M --tensor-parallel-size 4"
RUNS = ROOT / "tests" / "tuner" / "backtest" / "runs.csv"
MODEL = ROOT / "examples" / "models" / "tiny-moe"
REQUESTED = ("--what-if", "nodes=+1", "--time-limit", "4s", "--json")
Captured = pytest.CaptureFixture[str]

BY_COMMAND = {
    "doctor": "doctor",
    "profile": "profile",
    "profile show": "shown-profile",
    "profile diff": "profile-diff",
    "profile import": "profile",
    "estimate": "estimate",
    "init": "spec",
    "plan": "plan",
    "verify": "verified",
    "explain": "explained-plan",
    "compare": "comparison",
    "report": "report",
    "backtest": "backtest",
    "calibrate": "calibration",
    "check": "check",
    "schema": "",
}
"""Schema of what each command prints for a training run; a schema is itself the answer."""


def commands() -> Iterator[tuple[str, Any]]:
    root = typer.main.get_command(frame.app)
    for name, command in root.commands.items():  # type: ignore[attr-defined]  # a group's
        yield name, command
        for below, inner in getattr(command, "commands", {}).items():
            yield f"{name} {below}", inner


def printed(capsys: Captured, *arguments: str | Path) -> str:
    assert frame.run([str(one) for one in arguments]) in (0, 1)
    return capsys.readouterr().out


def of_schema(name: str, text: str) -> BaseModel:
    module, _, attribute = SCHEMAS[name].partition(":")
    kind: type[BaseModel] = getattr(import_module(module), attribute)
    return kind.model_validate_json(text)


@each_row(
    ("name", "command"),
    list(commands()),
)
def test_every_command_has_it_and_a_published_schema(name: str, command: Any) -> None:
    assert "--json" in [flag for parameter in command.params for flag in parameter.opts]
    assert name in BY_COMMAND
    schema = BY_COMMAND[name]
    assert not schema or schema in SCHEMAS


def test_doctor_prints_its_schema(capsys: Captured) -> None:
    of_schema("doctor", printed(capsys, "doctor", "--json"))


def test_a_shown_profile_and_a_difference_are_of_their_schemas(capsys: Captured) -> None:
    profile = STORED / "used" / "profile"
    of_schema("shown-profile", printed(capsys, "profile", "show", profile, "--json"))
    of_schema("profile-diff", printed(capsys, "profile", "diff", profile, profile, "--json"))
    recording = ROOT / "examples" / "routing" / "python"
    of_schema("shown-recording", printed(capsys, "profile", "show", recording, "--json"))


def test_estimates_are_of_their_schemas(capsys: Captured) -> None:
    spec, launch = MIXTRAL / "spec.yaml", MIXTRAL / "public.sh"
    of_schema("estimate", printed(capsys, "estimate", spec, "--launch", launch, "--json"))
    requested = ("estimate", SERVING, "--launch", SERVER, "--pool", "h100", "--json")
    of_schema("serving-estimate", printed(capsys, *requested))


def test_a_plan_and_its_explanation_are_of_their_schemas(capsys: Captured, tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--device", "h100-sxm", "--devices", "2", "--batch", "4")
    of_schema("plan", printed(capsys, "plan", *flags, "-o", tmp_path / "plan", "--json"))
    of_schema("explained-plan", printed(capsys, "explain", tmp_path / "plan", *REQUESTED))


@pytest.mark.slow
def test_plans_of_other_goals_are_of_their_schemas(capsys: Captured, tmp_path: Path) -> None:
    balance = ROOT / "examples" / "placement" / "balance.yaml"
    for name, spec in (("serve", DEPLOYED), ("place", balance)):
        folder = tmp_path / name
        made = printed(capsys, "plan", spec, "-o", folder, "--json", "--time-limit", "10s")
        of_schema(f"{name}-plan", made)
        of_schema(f"explained-{name}-plan", printed(capsys, "explain", folder, *REQUESTED))


def test_a_backtest_is_of_its_schema(capsys: Captured) -> None:
    of_schema("backtest", printed(capsys, "backtest", RUNS, "--json"))


def test_a_stored_verification_is_of_its_schema() -> None:
    of_schema("verified", (STORED / "verified.json").read_text())
