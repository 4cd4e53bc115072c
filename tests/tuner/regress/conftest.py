"""Plans as small as they can be read, and scenarios that plan within a second."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.regress.check import check
from tuner.regress.checks import Manner
from tuner.regress.observed import PlanFacts, plan_facts

FIXTURES = Path(__file__).parent / "fixtures"
QUICK_SPEC = """\
goal: {kind: train, global_batch_size: 256}
step_ratio: 1.0
does: ""
"""
"""For `acting`: its batch, by how much its step is longer, and what else it does."""

Fields = dict[str, Any]


def raw_plan(**changes: Any) -> Fields:
    """A training plan's JSON as far as it is compared; `a__b` changes field b of a."""
    plan: Fields = {
        "model": {"hidden_size": 64},
        "cluster": {"pools": [{"name": "h100", "nodes": 4}]},
        "goal": {"kind": "train", "global_batch_size": 128},
        "emit": ["megatron-lm"],
        "decision": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4},
        "predicted": {
            "step_time_s": 10.0,
            "step_time_s_band": [8.0, 12.0],
            "peak_memory_bytes": [2**36, 2**35],
            "peak_memory_bytes_band": [[2**35, 2**37], [2**34, 2**36]],
            "breakdown_s": {"computation": 8.0, "expert": 2.0},
        },
        "certificate": {"status": "optimal", "objective": 10.0, "bound": 9.99, "gap_ratio": 0.001},
        "binding_constraint": "memory_per_device: 71 GiB",
        "alternatives": [],
        "provenance": {"moetune_version": "0.1.0", "profile_sha256": {"h100": "a"}},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        inside = plan
        for part in path:
            inside = inside[part]
        inside[last] = value
    return plan


@pytest.fixture(scope="session")
def seen() -> Callable[..., PlanFacts]:
    """What is compared of such a plan: seen(predicted__step_time_s=11.0) -> Observed."""
    return lambda **changes: plan_facts(raw_plan(**changes))


@pytest.fixture(scope="session")
def acting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A moetune whose planner does what the spec says, and plans what a fixture holds."""
    tree = tmp_path_factory.mktemp("acting")
    for package, error in (
        ("tuner", "TunerError"),
        ("solvers", "SolverError"),
        ("profilers", "ProfilerError"),
    ):
        (tree / package).mkdir()
        (tree / package / "__init__.py").write_text("")
        (tree / package / "errors.py").write_text(f"class {error}(Exception): pass\n")
    shutil.copy(FIXTURES / "acting.py", tree / "tuner" / "api.py")
    shutil.copy(FIXTURES / "plan-1-train.json", tree / "tuner" / "plan.json")
    return tree


@pytest.fixture(scope="session")
def accepted_checks(tmp_path_factory: pytest.TempPathFactory, acting: Path) -> Path:
    """A folder of checks with one accepted scenario `quick`, planned by `acting`; read only."""
    folder = tmp_path_factory.mktemp("accepted") / "checks"
    (folder / "quick").mkdir(parents=True)
    (folder / "quick" / "spec.yaml").write_text(QUICK_SPEC, encoding="utf-8")
    assert not check(folder, update=True, manner=Manner(tree=acting)).failed
    return folder


@pytest.fixture
def checks(accepted_checks: Path, tmp_path: Path) -> Path:
    """A copy of it for one test."""
    return Path(shutil.copytree(accepted_checks, tmp_path / "checks"))
