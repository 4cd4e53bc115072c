import json
from importlib.metadata import PackageNotFoundError

import pytest

from tests.rows import each_row
from tests.tuner.cli.refusals import output
from tuner.cli.environment import Component, examine

INSTALLED = {"numpy": "2.4.6", "pulp": "3.3.2"}

ENGINES = (
    "megatron-core<0.17,>=0.16.1; extra == 'engines'",
    "torchtitan==0.3.0; extra == 'engines'",
    "deepspeed==0.19.8; extra == 'engines'",
)


def _none(name: str) -> str:
    raise PackageNotFoundError(name)


def _installed(**versions: str) -> dict[str, Component]:
    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    found = examine(
        requirements=("numpy>=1.26", "pulp>=2.8", "torch>=2.7; extra == 'torch'"),
        installed=version,
        which=lambda _name: None,
    )
    return {finding.name: finding for finding in found}


@each_row(
    ("versions", "name", "status", "is_core", "costs", "remedy"),
    [
        ({"pulp": "3.3.2"}, "numpy", "missing", True, "", "pip install 'numpy>=1.26'"),
        ({"numpy": "1.9.0"}, "numpy", "broken", True, "", None),
        ({"numpy": "1.26"}, "numpy", "ok", True, "", None),
        ({"numpy": "10.0.0"}, "numpy", "ok", True, "", None),
        (INSTALLED, "torch", "missing", False, "measure", "pip install 'torch>=2.7'"),
        (INSTALLED, "plotly", "missing", False, "moetune report", "pip install plotly"),
        (INSTALLED, "chromium", "missing", False, "--format png", "apt-get install chromium"),
        (INSTALLED, "git", "missing", False, "--against git:REV", None),
        (
            INSTALLED,
            "aiconfigurator-core",
            "missing",
            False,
            "moetune profile import aiconfigurator",
            None,
        ),
        # It clashes, and is reported only where it is.
        (INSTALLED | {"highspy": "1.15.1"}, "highspy", "broken", None, "", "pip uninstall highspy"),
    ],
)
def test_what_lacks_is_told_with_its_cost_and_its_command(
    versions: dict[str, str],
    name: str,
    status: str,
    is_core: bool | None,
    costs: str,
    remedy: str | None,
) -> None:
    found = _installed(**versions)[name]
    assert found.status == status
    assert found.core == (found.core if is_core is None else is_core)
    assert costs in found.costs
    assert found.remedy == (found.remedy if remedy is None else remedy)
    assert "highspy" not in _installed(**INSTALLED)


def test_any_browser_of_its_kind_will_do() -> None:
    found = examine(
        requirements=("plotly>=6.0; extra == 'report'",),
        installed=_none,
        which=lambda name: "/opt/chrome" if name == "google-chrome" else None,
    )
    named = {finding.name: finding for finding in found}
    assert (named["chromium"].status, named["chromium"].found) == ("ok", "/opt/chrome")
    assert named["plotly"].remedy == "pip install 'plotly>=6.0'"


def test_engines_are_added_without_what_their_metadata_asks_for() -> None:
    found = {finding.name: finding for finding in examine(requirements=ENGINES, installed=_none)}
    core = found["megatron-core"]
    assert (core.status, core.core) == ("missing", False)
    assert core.remedy == "pip install --no-deps 'megatron-core<0.17,>=0.16.1'"
    assert found["deepspeed"].remedy.endswith("--no-build-isolation --no-deps 'deepspeed==0.19.8'")
    assert "--no-deps 'torchtitan==0.3.0' tyro" in found["torchtitan"].remedy


def test_everything_missing_says_its_cost_and_its_remedy() -> None:
    for finding in _installed().values():
        assert (finding.status == "ok") != bool(finding.costs and finding.remedy)


def test_the_installed_environment_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(output(capsys, ["doctor", "--json"]))
    assert report["usable"] is True
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "pulp", "CBC", "torch", "torchrun", "Slurm"} <= names


def test_a_missing_core_piece_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tuner.cli.environment

    lacking = Component(name="numpy", status="missing", core=True, costs="all", remedy="pip it")
    monkeypatch.setattr(tuner.cli.environment, "examine", lambda: (lacking,))
    assert output(capsys, ["doctor"], code=3).endswith("numpy: all\n    pip it\n")
