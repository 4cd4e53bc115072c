import json
from importlib.metadata import PackageNotFoundError
from types import MappingProxyType

import pytest

from tuner.cli import app as frame
from tuner.environment import Finding, examine

INSTALLED = MappingProxyType({"numpy": "2.4.6", "pulp": "3.3.2"})


def _installed(**versions: str) -> dict[str, Finding]:
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
    import tuner.environment

    lacking = Finding(name="numpy", status="missing", core=True, costs="all", remedy="pip it")
    monkeypatch.setattr(tuner.environment, "examine", lambda: (lacking,))
    assert frame.run(["doctor"]) == 3
    assert capsys.readouterr().out.endswith("numpy: all\n    pip it\n")
