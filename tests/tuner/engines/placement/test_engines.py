"""Every emitted placement, read back by readers written from the formats' descriptions alone."""

import importlib.util
import json
import sys
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tests.expect import present
from tests.rows import Failures, each_row
from tests.tuner.engines.placement.testing import (
    sample_decision,
    sample_placement,
    without_replicas,
)
from tests.tuner.engines.testing import write_emitted
from tuner.config.place import PlaceDecision
from tuner.engines.files import EmittedFile
from tuner.engines.place_writers import emit_placement
from tuner.engines.placement.targets import PLACE_TARGETS
from tuner.errors import UnknownTargetError, UnsuitedPlacementError
from tuner.plans.place import VerifiedPlacement
from tuner.spec.place import Dispatch
from tuner.units import spans

Start = Callable[..., tuple[list[str], Path]]
Rows = dict[int, list[list[int]]]
"""By decoder layer: the experts of each rank."""

HOSTILE = (
    "plain name",
    'it\'s "quoted"',
    "$(touch injected)",
    "`touch injected`",
    "line\ntouch injected",
    "carriage\rtouch injected",
    "separator\u2028import injected",
    '"""\nimport injected\n"""',
    "\x1b[2J",
)


def _decision(target: str) -> PlaceDecision:
    return without_replicas() if target == "megatron" else sample_decision()


def _planned(decision: PlaceDecision) -> Rows:
    each = decision.slots_per_rank[0]
    return {
        layer: [list(row[first : first + each]) for first in range(0, len(row), each)]
        for layer, row in zip(decision.layer_ids, decision.physical_to_logical, strict=True)
    }


def _ranks(row: list[int], ranks: int) -> list[list[int]]:
    """Slot p lives on rank p // (slots / ranks)."""
    each, rest = divmod(len(row), ranks)
    assert rest == 0
    return [[row[p] for p in range(len(row)) if p // each == rank] for rank in range(ranks)]


def _read_sglang(folder: Path, decision: PlaceDecision) -> Rows:
    record = json.loads((folder / "init_expert_location.json").read_text())
    assert list(record) == ["physical_to_logical_map"]
    table = record["physical_to_logical_map"]
    assert len(table) == decision.num_layers
    for row in table:
        assert set(row) == set(range(decision.num_experts))
    return {layer: _ranks(table[layer], decision.ranks) for layer in decision.layer_ids}


def _read_trtllm(folder: Path, decision: PlaceDecision) -> Rows:
    record = yaml.safe_load((folder / "moe_load_balancer.yaml").read_text())
    assert set(record) == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
    assert record["layer_updates_per_iter"] == 0
    rows = record["initial_global_assignments"]
    assert all(len(row) == record["num_slots"] for row in rows.values())
    return {layer: _ranks(row, decision.ranks) for layer, row in rows.items()}


def _read_ascend(folder: Path, decision: PlaceDecision) -> Rows:
    record = json.loads((folder / "expert_map.json").read_text())
    assert record["moe_layer_count"] == len(record["layer_list"]) == len(decision.layer_ids)
    rows: Rows = {}
    for place, layer in enumerate(record["layer_list"]):
        assert layer["layer_id"] == place
        assert layer["device_count"] == len(layer["device_list"]) == decision.ranks
        assert [device["device_id"] for device in layer["device_list"]] == list(
            range(decision.ranks)
        )
        rows[decision.layer_ids[place]] = [
            device["device_expert"] for device in layer["device_list"]
        ]
    return rows


def _read_eplb(folder: Path, decision: PlaceDecision) -> Rows:
    names = ("physical_to_logical_map", "logical_to_physical_map", "expert_count")
    slots, where, count = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in names)
    assert {array.dtype for array in (slots, where, count)} == {np.dtype(np.int64)}
    assert count.shape == (len(slots), decision.num_experts)
    assert where.shape == (*count.shape, count.max())
    for layer, row in enumerate(slots):
        for expert in range(decision.num_experts):
            result = np.flatnonzero(row == expert).tolist()
            assert count[layer, expert] == len(result)
            padded = result + [-1] * (where.shape[2] - len(result))
            assert where[layer, expert].tolist() == padded
    return {
        layer: _ranks(row, decision.ranks)
        for layer, row in zip(decision.layer_ids, slots.tolist(), strict=True)
    }


def _read_megatron(folder: Path, decision: PlaceDecision) -> Rows:
    record = json.loads((folder / "expert_permutation.json").read_text())
    # Local expert i of rank r is expert r * E / EP + i of the new checkpoint.
    each = record["num_experts"] // decision.ranks
    return {
        layer: [[row[rank * each + i] for i in range(each)] for rank in range(decision.ranks)]
        for layer, row in zip(record["layer_ids"], record["permutation"], strict=True)
    }


def _load_module(path: Path) -> ModuleType:
    spec = present(importlib.util.spec_from_file_location("moetune_placement_under_test", path))
    module = importlib.util.module_from_spec(spec)
    present(spec.loader).exec_module(module)
    return module


def _read_vllm(folder: Path, decision: PlaceDecision) -> Rows:
    table = [list(row) for row in _load_module(folder / "moetune_placement.py").PHYSICAL_TO_LOGICAL]
    return {
        layer: _ranks(row, decision.ranks)
        for layer, row in zip(decision.layer_ids, table, strict=True)
    }


READERS: dict[str, Callable[[Path, PlaceDecision], Rows]] = {
    "sglang": _read_sglang,
    "trtllm": _read_trtllm,
    "vllm": _read_vllm,
    "vllm-ascend": _read_ascend,
    "eplb": _read_eplb,
    "megatron": _read_megatron,
}


@each_row("target", PLACE_TARGETS)
def test_an_independent_reader_finds_the_planned_experts_on_every_rank(
    tmp_path: Path, target: Any
) -> None:
    decision, folder = _decision(target), tmp_path / target
    write_emitted(folder, emit_placement(target, sample_placement(decision)))
    assert READERS[target](folder, decision) == _planned(decision)


@pytest.fixture
def launched(tmp_path: Path, start: Start) -> Start:
    """Emit a placement into a folder of its own, and start its script."""

    def run(
        target: str,
        *arguments: str,
        of: VerifiedPlacement | None = None,
        name: str = "it's a folder",
        **environment: str,
    ) -> tuple[list[str], Path]:
        verified = of or sample_placement(sample_decision())
        write_emitted(tmp_path / name, emit_placement(target, verified))
        return start(tmp_path / name, *arguments, **environment)

    return run


ON_TWO = sample_placement(sample_decision(ranks_per_node=2))


def _after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def _flag(words: list[str], name: str) -> int:
    return int(_after(words, name))


def _devices(target: str, words: list[str]) -> int:
    """Return the devices that the engine's flags ask for over all nodes."""
    if target == "sglang":
        # Its world is the tensor-parallel size; experts are spread over all of it.
        assert _flag(words, "--ep-size") == _flag(words, "--tp-size")
        return _flag(words, "--tp-size")
    if target == "trtllm":
        assert _flag(words, "--ep_size") == _flag(words, "--tp_size")
        return _flag(words, "--tp_size")
    assert "--enable-expert-parallel" in words
    return _flag(words, "--tensor-parallel-size") * _flag(words, "--data-parallel-size")


@each_row(("target", "per_node"), product(("sglang", "trtllm", "vllm", "vllm-ascend"), (4, 2)))
def test_the_script_asks_for_the_devices_of_the_plan(
    launched: Start, target: Any, per_node: Any
) -> None:
    decision = sample_decision(ranks_per_node=per_node)
    of, name = sample_placement(decision), f"{target} on {per_node}"
    words, _ = launched(
        target, "MODEL", "--more", "x y", of=of, name=name, NODE_RANK="1", MASTER_ADDR="node0"
    )
    assert _devices(target, words) == decision.num_devices == 4
    place = words.index("MODEL")
    assert words[place : place + 3] == ["MODEL", "--more", "x y"]


def test_a_script_for_several_nodes_wants_to_know_which_it_is(launched: Start) -> None:
    for rank in ("0", "1"):
        words, _ = launched("vllm", "MODEL", of=ON_TWO, NODE_RANK=rank, MASTER_ADDR="node0")
        assert ("--headless" in words) == (rank == "1")
        assert _flag(words, "--data-parallel-start-rank") == 2 * int(rank)
        assert _flag(words, "--data-parallel-size-local") == 2
    with pytest.raises(AssertionError, match="set NODE_RANK and MASTER_ADDR"):
        launched("vllm", "MODEL", of=ON_TWO)


@each_row(
    ("dispatch", "algorithm", "backend"),
    (
        (None, "static", "deepep"),
        (Dispatch.STATIC, "static", "deepep"),
        (Dispatch.LP, "lp", "deepep"),
        (Dispatch.EVEN, "dynamic", "none"),
        (Dispatch.DYNAMIC, "dynamic", "none"),
    ),
)
def test_sglang_dispatches_as_the_plan_was_evaluated(
    launched: Start, dispatch: Dispatch | None, algorithm: str, backend: str
) -> None:
    of = sample_placement(sample_decision(), dispatch=dispatch)
    words, _ = launched("sglang", "--model-path", "MODEL", of=of, name=f"{dispatch}")
    assert _after(words, "--ep-dispatch-algorithm") == algorithm
    # The engine refuses static and lp without an all-to-all backend.
    assert _after(words, "--moe-a2a-backend") == backend
    assert _flag(words, "--ep-num-redundant-experts") == 2
    location = Path(_after(words, "--init-expert-location"))
    assert json.loads(location.read_text())["physical_to_logical_map"]


def test_vllm_ascend_finds_its_map_from_where_it_is_started(launched: Start) -> None:
    words, cwd = launched("vllm-ascend", "MODEL")
    config = json.loads(_after(words, "--additional-config"))
    assert set(config) == {"eplb_config"}
    assert json.loads((cwd / config["eplb_config"]["expert_map_path"]).read_text())["layer_list"]


def test_trtllm_has_a_launcher_of_its_own_for_several_nodes(
    launched: Start, tmp_path: Path
) -> None:
    words, _ = launched("trtllm", "MODEL", of=ON_TWO, name="two")
    # Options before the subcommand would be taken as the group's own.
    assert words[:4] == ["trtllm-llmapi-launch", "trtllm-serve", "serve", "MODEL"]
    text = (tmp_path / "two" / "run.sh").read_text()
    assert "srun --mpi=pmix --nodes=2 --ntasks=4 --ntasks-per-node=2" in text


def test_trtllm_finds_its_balancer_from_where_it_is_started(launched: Start) -> None:
    words, cwd = launched("trtllm", "MODEL")
    options = yaml.safe_load((cwd / _after(words, "--extra_llm_api_options")).read_text())
    assert options["tensor_parallel_size"] == options["moe_expert_parallel_size"] == 4
    balancer = cwd / options["moe_config"]["load_balancer"]
    assert yaml.safe_load(balancer.read_text())["num_slots"] == 8


class _FakeDefaultPolicy:
    """Stands in for vLLM's own rule."""

    @classmethod
    def rebalance_experts(cls, weight: torch.Tensor, *numbers: Any) -> str:
        return "vLLM's own"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table of vLLM's policies, without vLLM."""
    table: dict[str, Any] = {"default": _FakeDefaultPolicy}
    module = ModuleType("vllm.distributed.eplb.policy")
    module.__dict__.update(EPLB_POLICIES=table, DefaultEplbPolicy=_FakeDefaultPolicy)
    for name in ("vllm", "vllm.distributed", "vllm.distributed.eplb"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return table


def test_the_vllm_policy_returns_the_table_for_any_loads(
    tmp_path: Path, policies: dict[str, Any]
) -> None:
    decision = sample_decision()
    write_emitted(tmp_path, emit_placement("vllm", sample_placement(decision)))
    module = _load_module(tmp_path / "moetune_placement.py")
    module.register()
    module.register()
    policy = policies["default"]
    table = policy.rebalance_experts(torch.rand(2, 6), 8, 1, 1, 4, torch.zeros(2, 8))
    assert table.dtype is torch.int64
    assert table.device.type == "cpu"
    assert table.tolist() == [list(row) for row in decision.physical_to_logical]
    # A draft model of one layer keeps vLLM's own rule.
    assert policy.rebalance_experts(torch.rand(1, 6), 8, 1, 1, 4) == "vLLM's own"
    with pytest.raises(
        ValueError, match="8 slots on 2 ranks, the placement was planned for 8 on 4"
    ):
        policy.rebalance_experts(torch.rand(2, 6), 8, 1, 1, 2)


def test_the_vllm_plugin_installs_under_the_group_that_vllm_looks_in(tmp_path: Path) -> None:
    write_emitted(tmp_path, emit_placement("vllm", sample_placement(sample_decision())))
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    (target,) = project["project"]["entry-points"]["vllm.general_plugins"].values()
    module, _, function = target.partition(":")
    assert callable(getattr(_load_module(tmp_path / f"{module}.py"), function))
    assert project["tool"]["setuptools"]["py-modules"] == [module]


def test_the_vllm_flags_match_the_plugin(launched: Start) -> None:
    words, _ = launched("vllm", "MODEL")
    config = json.loads(_after(words, "--eplb-config"))
    assert config["num_redundant_experts"] == 2
    assert "--enable-eplb" in words
    # vLLM accepts only these keys.
    assert set(config) <= {"num_redundant_experts", "step_interval", "window_size"}


UNEQUAL = sample_decision(
    physical_to_logical=((0, 1, 2, 3, 4, 5, 0), (0, 1, 2, 3, 4, 5, 1)),
    ranks=3,
    ranks_per_node=3,
    slots_per_rank=(3, 2, 2),
)
TWINS = sample_decision(physical_to_logical=((0, 1, 2, 3, 4, 4, 5, 2), (5, 4, 3, 2, 1, 0, 4, 1)))


@each_row(
    ("target", "decision", "said"),
    (
        *(
            (target, UNEQUAL, r"ranks hold 2 to 3 slots.*say one slots_per_rank, at least 2")
            for target in PLACE_TARGETS
            if target != "megatron"
        ),
        ("sglang", sample_decision(num_layers=None), "name `model` in the spec"),
        ("vllm-ascend", TWINS, r"layer 1 holds expert 4 twice on rank 2.*fewer redundant"),
        ("sglang", TWINS, ""),
        (
            "megatron",
            sample_decision(),
            r"8 slots for 6 experts.*say redundant_experts 0, and ranks that divide 6",
        ),
        ("torchtitan", sample_decision(), r"'torchtitan' takes no.*sglang, trtllm"),
    ),
)
def test_placements_that_an_engine_cannot_hold_are_refused(
    target: str, decision: PlaceDecision, said: str
) -> None:
    error = UnknownTargetError if target == "torchtitan" else UnsuitedPlacementError
    with pytest.raises(error, match=said) if said else nullcontext():
        emit_placement(target, sample_placement(decision))


def _text(files: tuple[EmittedFile, ...]) -> str:
    return "\n".join(file.text for file in files)


@each_row("target", PLACE_TARGETS)
def test_what_was_not_measured_is_said_in_or_beside_the_files(target: Any) -> None:
    verified = sample_placement(_decision(target), waived="no cluster at hand")
    text = _text(emit_placement(target, verified))
    assert "NOT VERIFIED: no cluster at hand" in text
    assert "worth it" in text


@pytest.mark.parametrize("target", PLACE_TARGETS)
def test_nothing_in_a_name_becomes_code(
    target: str, tmp_path: Path, start: Start, failures: Failures
) -> None:
    decision = _decision(target)
    for number, name in enumerate(HOSTILE):
        files = emit_placement(target, sample_placement(decision, workload=name, waived=name))
        folder = tmp_path / f"files {number}"
        write_emitted(folder, files)
        with failures.of(name):
            assert READERS[target](folder, decision) == _planned(decision)
            if (folder / "run.sh").exists():
                start(folder, "MODEL")
            assert not list(tmp_path.rglob("injected"))


def test_layers_are_named_in_spans() -> None:
    assert spans((0, 3, 4, 5, 7)) == "0, 3-5, 7"
    assert spans(range(3, 61)) == "3-60"


@each_row("target", ("vllm", "vllm-ascend"))
def test_engines_that_count_moe_layers_say_which_model_they_fit(target: str) -> None:
    text = _text(emit_placement(target, sample_placement(sample_decision())))
    assert "MODEL must have MoE layers 1, 3 and no others, one per row" in text
