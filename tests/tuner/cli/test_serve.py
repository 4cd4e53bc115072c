"""`moetune plan` and `explain` where the goal is to serve."""

import json
from pathlib import Path

import pytest

from tests.tuner.cli.refusals import output, refusal
from tests.tuner.serve_specs import serve_spec
from tuner.cli.app import run
from tuner.units import format_s

EXAMPLES = Path(__file__).parents[3] / "examples" / "serving"
FEW = "objective: devices\n  modes: [aggregated]"


# Seconds: what users start with, whole, and several pools in it.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed-pool", "deepseek-v3-32-h200"])
def test_examples_are_planned_explained_and_emitted(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    shown = output(capsys, ["plan", EXAMPLES / f"{name}.yaml", "-o", out])
    assert "Bound by " in shown
    table = shown[shown.index("\n  mode ") :].splitlines()[2:]
    plan = json.loads((out / "plan.json").read_text())
    modes = [reply["mode"] for reply in plan["modes"]]
    assert all(mode.replace("_", " ") in "\n".join(table) for mode in modes)
    assert table[0].split()[:2] == [plan["decision"]["mode"], "chosen"]
    low, high = plan["predicted"]["tpot_s_band"]
    assert f"{format_s(low)} to {format_s(high)}" in shown
    assert all((out / file).is_file() for file in plan["files"])
    devices = sum(one["count"] * one["devices"] for one in plan["decision"]["instances"])
    expected = json.loads(next(out.glob("launch/*/expected.json")).read_text())
    assert expected["num_devices"] == devices
    assert "Where the time of a decode step goes" in output(
        capsys, ["explain", out, "--what-if", "none"]
    )


def test_json_is_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    run(["plan", str(serve_spec(tmp_path, extra=FEW)), "-o", str(out), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads((out / "plan.json").read_text())
    assert shown["goal"]["kind"] == "serve"
    assert shown["certificate"]["space"]["priced"] > 0
    low, high = shown["predicted"]["tpot_s_band"]
    assert low < shown["predicted"]["tpot_s"]["mean"] < high


def test_a_deployment_is_verified_by_a_command_of_the_users_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    run(["plan", str(serve_spec(tmp_path, engine="sglang", extra=FEW)), "-o", out])
    capsys.readouterr()
    by_command = ["verify", out, "--launcher", "command"]
    for options, said in (
        ([*by_command, "--command", "true", "--parallel", "2"], "only jobs of Slurm run side by"),
        (
            [*by_command, "--command", "true", "--storage", "x"],
            "--storage is for plans that train; leave it out",
        ),
        ([*by_command, "--command", "true", "--budget", "1h"], "--budget is for plans that train"),
        ([*by_command, "--command", "true", "--steps", "8"], "--steps is for plans that train"),
        ([*by_command, "--no-requeue"], "--no-requeue is for --launcher slurm"),
        (["verify", out], "--launcher command --command 'bash {launch}/local.sh'"),
        (by_command, "--command is needed, e.g. --command 'bash {launch}/local.sh'"),
        ([*by_command, "--command", "true"], "--url: say where the deployment answers"),
        ([*by_command, "--command", "true", "--start-limit", "soon"], "--start-limit: "),
    ):
        assert said in refusal(capsys, options)
