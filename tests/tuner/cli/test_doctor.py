import json
from importlib.metadata import PackageNotFoundError
from types import MappingProxyType

import pytest

from tuner.cli import app as frame
from tuner.cli.environment import Component, examine

INSTALLED = MappingProxyType({"numpy": "2.4.6", "pulp": "3.3.2"})

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


def test_a_missing_core_package_comes_with_its_command() -> None:
    numpy = _installed(pulp="3.3.2")["numpy"]
    assert (numpy.status, numpy.core) == ("missing", True)
    assert numpy.remedy == "pip install 'numpy>=1.26'"


def test_an_old_core_package_is_broken_and_a_new_one_is_not() -> None:
    assert _installed(numpy="1.9.0", pulp="3.3.2")["numpy"].status == "broken"
    assert _installed(numpy="1.26", pulp="3.3.2")["numpy"].status == "ok"
    assert _installed(numpy="10.0.0", pulp="3.3.2")["numpy"].status == "ok"


def test_torch_is_no_core_package_and_says_what_its_absence_costs() -> None:
    torch = _installed(**INSTALLED)["torch"]
    assert (torch.status, torch.core) == ("missing", False)
    assert "measure" in torch.costs
    assert torch.remedy == "pip install 'torch>=2.7'"


def test_what_draws_reports_and_reads_revisions_says_what_its_absence_costs() -> None:
    found = _installed(**INSTALLED)
    assert (found["plotly"].status, found["plotly"].remedy) == ("missing", "pip install plotly")
    assert "moetune report" in found["plotly"].costs
    assert "--format png" in found["chromium"].costs
    assert found["chromium"].remedy == "apt-get install chromium"
    assert "--against git:REV" in found["git"].costs
    assert not any(found[name].core for name in ("plotly", "chromium", "git"))


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


def test_an_extra_of_measurements_is_named() -> None:
    missing = _installed(**INSTALLED)["aiconfigurator-core"]
    assert "moetune profile import aiconfigurator" in missing.costs


def test_highspy_is_reported_because_it_clashes() -> None:
    assert "highspy" not in _installed(**INSTALLED)
    highspy = _installed(**INSTALLED, highspy="1.15.1")["highspy"]
    assert (highspy.status, highspy.remedy) == ("broken", "pip uninstall highspy")


def test_everything_missing_says_its_cost_and_its_remedy() -> None:
    for finding in _installed().values():
        assert (finding.status == "ok") != bool(finding.costs and finding.remedy)


def test_the_installed_environment_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["usable"] is True
    names = {finding["name"] for finding in report["findings"]}
    assert {"python", "pulp", "CBC", "torch", "torchrun", "Slurm"} <= names


def test_a_missing_core_piece_is_exit_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tuner.cli.environment

    lacking = Component(name="numpy", status="missing", core=True, costs="all", remedy="pip it")
    monkeypatch.setattr(tuner.cli.environment, "examine", lambda: (lacking,))
    assert frame.run(["doctor"]) == 3
    assert capsys.readouterr().out.endswith("numpy: all\n    pip it\n")
