"""Faults planted in a copy of moetune, or in what it is given: each is caught, in the right words.

The copy is planned with by its own command line, as a pull request would be.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.store import read_profile, write_header, write_table
from tests.patience import patient_s
from tuner.regress.check import check
from tuner.regress.checks import Manner
from tuner.regress.records import Check, ScenarioVerdict

CHECKOUT = Path(__file__).parents[3]
PACKAGES = ("tuner", "solvers", "profilers")

Faulty = Callable[..., Path]

CHEAP_SPEC = """\
schema_version: 1
model: {examples}/models/mixtral-8x7b/config.json
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 4, devices_per_node: 8, nic: 400Gbit/s}}]
goal: {{kind: train, sequence_length: 4096, global_batch_size: 128, precision: bf16}}
search:
  tensor_model_parallel_size: [1, 2, 4]
  context_parallel_size: 1
  expert_tensor_parallel_size: 1
  micro_batch_size: 1
  pipeline_model_parallel_size: [2, 4]
  dispatcher: alltoall
emit: [megatron-lm]
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    """Copy moetune and change one line of it: faulty(file, old, new) -> its folder."""

    def plant(file: str, old: str, new: str) -> Path:
        tree = tmp_path / "faulty"
        for package in PACKAGES:
            shutil.copytree(CHECKOUT / package, tree / package)
        text = (tree / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, "the line to break has moved"
        (tree / file).write_text(text.replace(old, new), encoding="utf-8")
        return tree

    return plant


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scenario that the real planner plans within a second or two, accepted."""
    folder = tmp_path_factory.mktemp("cheap")
    (folder / "cheap").mkdir()
    spec = CHEAP_SPEC.format(examples=CHECKOUT / "examples")
    (folder / "cheap" / "spec.yaml").write_text(spec, encoding="utf-8")
    assert not check(folder, update=True).failed
    return folder


@pytest.fixture
def cheap(accepted: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(accepted, tmp_path / "checks"))


def checked_by(tree: Path, checks: Path) -> Check:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tuner", "check", str(checks), "--json"],
        env={"PYTHONPATH": str(tree), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient_s(240),
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    result = Check.model_validate_json(done.stdout)
    assert done.returncode == result.failed
    return result


# Takes seconds: the one fault that every run checks by the command itself.
def test_a_bug_in_the_cost_model_is_named_as_changed_costs(cheap: Path, faulty: Faulty) -> None:
    tree = faulty(
        "tuner/costs/train/experts.py",
        "trained(setting, network, pieces=pieces)",
        "trained(setting, network, pieces=1.2 * pieces)",
    )
    (result,) = checked_by(tree, cheap).scenarios
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "fastest step" in result.reason
    assert "most of it in computation" in result.reason


def test_a_slower_link_in_the_profile_is_named_with_its_operation(
    checks: Path, acting: Path
) -> None:
    profile = checks / "quick" / "profile"
    shutil.copytree(CHECKOUT / "examples/profiles/epyc-2-ranks/used/profile", profile)
    # Accepted anew, with a summary of what was measured.
    (checks / "quick" / "plan.json").unlink()
    manner = Manner(tree=acting)
    assert not check(checks, update=True, manner=manner).failed

    stored = read_profile(profile)
    slower = [
        row.model_copy(update={"times_s": tuple(1.1 * time_s for time_s in row.times_s)})
        if row.case.kind == "all_reduce"
        else row
        for row in stored.measurements
        if row.case.operation == "collective"
    ]
    write_table(profile, slower, operation="collective")
    write_header(profile, stored.header)

    (result,) = check(checks, manner=manner).scenarios
    assert result.verdict is ScenarioVerdict.REGRESSION
    assert "collective all_reduce: 10 % slower over its 27 cases, significantly" in result.reason


def test_unchanged_inputs_pass(cheap: Path) -> None:
    assert [one.verdict.value for one in check(cheap).scenarios] == ["pass"]
