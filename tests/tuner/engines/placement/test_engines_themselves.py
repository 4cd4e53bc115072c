"""The engines' own readers, where their packages are installed: `pip install --no-deps` is enough.

Only the file that reads a placement is run, with stand-ins for the modules around it, so that no
device and none of the packages' dependencies are needed.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch

from solvers.placement.ranks import Ranks
from tests.benchmarks.sglang_expert_location import ExpertLocation
from tests.expect import present
from tests.solvers.placement.dispatch.static import ENGINE_SEED, targets
from tests.solvers.placement.dispatch.testing import sample_case
from tests.tuner.engines.placement.testing import sample_decision, sample_placement
from tests.tuner.engines.testing import write_emitted
from tuner.engines.place_writers import emit_placement

Stand = Callable[..., ModuleType]


def _installed(package: str, path: str) -> Path:
    result = importlib.util.find_spec(package)
    folders = [] if result is None else list(result.submodule_search_locations or ())
    file = Path(folders[0], path) if folders else None
    if file is None or not file.exists():
        pytest.skip(f"{package} is not installed")
    return file


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Put a module in place of a package's own."""

    def put(name: str, **members: Any) -> ModuleType:
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


def _load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    folder = [str(path.parent)] if path.name == "__init__.py" else None
    spec = present(
        importlib.util.spec_from_file_location(name, path, submodule_search_locations=folder)
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    present(spec.loader).exec_module(module)
    return module


@pytest.fixture
def sglang() -> ExpertLocation:
    """The engine's reader, as the benchmark of dispatch rules runs it."""
    return ExpertLocation(_installed("sglang", "srt/eplb/expert_location.py"))


def test_sglang_reads_its_file(sglang: ExpertLocation, tmp_path: Path) -> None:
    decision = sample_decision(ranks_per_node=2)
    write_emitted(tmp_path, emit_placement("sglang", sample_placement(decision)))
    (first, *_) = sglang.read(
        str(tmp_path / "init_expert_location.json"),
        layers=4,
        experts=6,
        redundant=decision.redundant_experts,
        ranks=4,
        nodes=2,
    )
    rows = first.physical_to_logical_map.tolist()
    assert [rows[layer] for layer in decision.layer_ids] == [
        list(row) for row in decision.physical_to_logical
    ]
    assert first.num_local_physical_experts == 2


@pytest.mark.parametrize("per_node", [4, 16])
def test_sglang_sends_statically_as_we_say(sglang: ExpertLocation, per_node: int) -> None:
    ranks = Ranks.uniform(ranks=16, slots_per_rank=5, ranks_per_node=per_node)
    case = sample_case(passes=1, layers=3, experts=64, ranks=ranks, seed=7)
    target_HLE = sglang.targets(
        json.dumps({"physical_to_logical_map": case.placement.expert_LS.tolist()}),
        layers=3,
        experts=64,
        redundant=16,
        ranks=16,
        nodes=16 // per_node,
    )
    ours_HLE = np.tile(np.argmax(case.copies_LEG > 0, axis=2), (ranks.num_ranks, 1, 1))
    drawn = 0
    for layer, expert, target_H in targets(replace(case, seed=ENGINE_SEED)):
        ours_HLE[:, layer, expert] = target_H
        drawn += 1
    assert drawn >= 30
    np.testing.assert_array_equal(ours_HLE, target_HLE)


def test_vllm_takes_the_planned_table_in_place_of_its_own_rule(
    stand_in: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = _installed("vllm", "distributed/eplb/policy/__init__.py")
    for name in ("vllm", "vllm.config", "vllm.distributed", "vllm.distributed.eplb"):
        stand_in(name)
    stand_in("vllm.config.parallel", EPLBPolicyOption=Literal["default"])
    policies = _load("vllm.distributed.eplb.policy", path, monkeypatch).EPLB_POLICIES
    decision = sample_decision()
    write_emitted(tmp_path, emit_placement("vllm", sample_placement(decision)))
    _load("moetune_placement", tmp_path / "moetune_placement.py", monkeypatch).register()
    # As EplbState.rearrange calls it.
    in_order = torch.tensor([[*range(6), 0, 1]] * 2)
    table = policies["default"].rebalance_experts(torch.rand(2, 6), 8, 1, 1, 4, in_order)
    assert table.tolist() == [list(row) for row in decision.physical_to_logical]
    draft = policies["default"].rebalance_experts(torch.rand(1, 6), 8, 1, 1, 4, in_order[:1])
    assert sorted(set(draft[0].tolist())) == list(range(6))
