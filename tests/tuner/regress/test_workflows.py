"""The workflows of examples/ci: their commands exist, and run from a fresh clone."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patience import patient_s
from tests.rows import each_row
from tests.tuner.cli.refusals import output

CHECKOUT = Path(__file__).parents[3]
CI = CHECKOUT / "examples" / "ci"


def github() -> list[str]:
    """Return the commands of the GitHub workflow in their order."""
    workflow: Mapping[str, Any] = yaml.safe_load((CI / "github-actions.yml").read_text())
    (job,) = workflow["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def gitlab() -> list[str]:
    """Return the commands of the GitLab job in their order."""
    (job,) = yaml.safe_load((CI / "gitlab-ci.yml").read_text()).values()
    return [*job["before_script"], *job["script"]]


@each_row("commands", [github(), gitlab()])
def test_every_option_of_a_workflow_exists(
    capsys: pytest.CaptureFixture[str], commands: list[str]
) -> None:
    shown = output(capsys, ["check", "--help"])
    lines = [line for command in commands for line in command.splitlines() if "moetune" in line]
    options = {
        option for line in lines if "check" in line for option in re.findall(r"--[a-z-]+", line)
    }
    assert {"--against", "--junit", "--markdown"} <= options
    assert all(option in shown for option in options)


def test_artifacts_are_what_the_commands_write() -> None:
    job = yaml.safe_load((CI / "gitlab-ci.yml").read_text())["moetune-check"]
    written = set(re.findall(r"moetune\.\w+", " ".join(gitlab())))
    assert written == set(job["artifacts"]["paths"])
    assert job["artifacts"]["reports"]["junit"] in written
    steps = yaml.safe_load((CI / "github-actions.yml").read_text())["jobs"]["check"]["steps"]
    (upload,) = (step for step in steps if "upload-artifact" in step.get("uses", ""))
    assert set(upload["with"]["path"].split()) == written


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("commands", [github(), gitlab()], ids=["github", "gitlab"])
def test_a_workflow_runs_as_written_from_a_fresh_clone(commands: list[str], tmp_path: Path) -> None:
    clone, summary = tmp_path / "clone", tmp_path / "summary.md"
    subprocess.run(["git", "clone", "-q", str(CHECKOUT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    head = subprocess.run(
        ["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    branch = subprocess.run(
        ["git", "-C", str(clone), "branch", "--show-current"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "GITHUB_ACTIONS": "true",
        "GITHUB_BASE_REF": branch,
        "GITHUB_STEP_SUMMARY": str(summary),
        "CI_MERGE_REQUEST_DIFF_BASE_SHA": head,
    }
    for command in commands:
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", command],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patient_s(1200),
            check=False,
        )
        if command.startswith("pip install") and "No matching distribution" in done.stderr:
            pytest.skip("packages cannot be downloaded here")
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert summary.read_text().startswith("## moetune check: passed")
    assert (clone / "moetune.xml").is_file()
    assert (clone / "moetune.md").is_file()
