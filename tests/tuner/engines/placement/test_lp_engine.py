"""SGLang's own functions on what `lp` needs, where its package is installed (`--no-deps`)."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.sglang_expert_location import expert_location_file
from tests.expect import present
from tuner.catalog.place_rules import dispatch_offers
from tuner.devices.datasheet import Generation
from tuner.engines.placement.targets import PLACE_TARGETS
from tuner.spec.lp_memory import BUDGET_BYTES, checked_bytes, launched_bytes, program_shape

SHAPES = ((6, 11), (64, 98), (111, 177), (196, 326))


@pytest.fixture
def package() -> Path:
    file = expert_location_file()
    if file is None:
        pytest.skip("sglang is not installed")
    return file.parents[2]


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = present(importlib.util.spec_from_file_location(name, path))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    present(spec.loader).exec_module(module)
    return module


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch, **members: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(members, __path__=[])
    monkeypatch.setitem(sys.modules, name, module)


def stand_in_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.lplb"):
        stand_in(name, monkeypatch)


def test_the_check_counts_as_we_do(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = load("shmem_budget", package / "kernels/ops/lplb/shmem_budget.py", monkeypatch)
    assert budget.gpu_budget_bytes("h100") == BUDGET_BYTES
    assert [budget.shmem_bytes(*shape) for shape in SHAPES] == [
        checked_bytes(*shape) for shape in SHAPES
    ]


def test_the_kernel_s_struct_is_as_large_as_we_say(package: Path) -> None:
    text = (package / "kernels/jit/csrc/lplb/ipm.cuh").read_text()
    result = present(re.search(r"struct ipm_smem \{(.*?)\};", text, re.DOTALL))
    members = re.findall(r"(float|bool) \w+((?:\[N[CV]\])*);", result[1])
    assert len(members) == result[1].count(";")
    for shape in SHAPES:
        size = dict(zip(("NC", "NV"), shape, strict=True))
        floats = [
            int(np.prod([size[name] for name in re.findall(r"N[CV]", axes)]))
            for kind, axes in members
            if kind == "float"
        ]
        # The flag is padded to the alignment of the floats.
        assert 4 * (sum(floats) + 1) == launched_bytes(*shape)


def test_its_solver_builds_the_program_that_we_size(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[tuple[int, int]] = []
    stand_in_packages(monkeypatch)
    stand_in("sglang.srt", monkeypatch)
    stand_in("sglang.srt.runtime_context", monkeypatch, get_resources=None)
    stand_in(
        "sglang.kernels.ops.lplb.torch_solver",
        monkeypatch,
        warmup=lambda nc, nv, **_: built.append((nc, nv)),
    )
    solver = load("lplb_solver", package / "srt/eplb/lplb_solver.py", monkeypatch)
    rng = np.random.default_rng(1)
    sized = []
    for ranks, slots, experts in ((4, 3, 8), (32, 9, 256), (8, 4, 32)):
        row = [*range(experts), *rng.integers(0, experts, ranks * slots - experts).tolist()]
        slots_of = [[slot for slot, one in enumerate(row) if one == e] for e in range(experts)]
        most = max(map(len, slots_of))
        table = [resident + [-1] * (most - len(resident)) for resident in slots_of]
        solver.LPLBSolver(torch.tensor(row), torch.tensor(table), ranks)
        sized.append(program_shape(row, ranks=ranks))
    assert built == sized


def test_it_refuses_the_devices_that_we_refuse(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lp,) = dispatch_offers(PLACE_TARGETS["sglang"], "lp", "deepep")
    assert lp.generations is not None
    capability = {
        Generation.AMPERE: (8, 0),
        Generation.ADA: (8, 9),
        Generation.HOPPER: (9, 0),
        Generation.BLACKWELL: (10, 0),
    }
    wrong = []
    for generation, version in capability.items():
        stand_in_packages(monkeypatch)
        stand_in("sglang.kernels.ops.lplb.cuda_solver", monkeypatch, solve_ipm=1, warmup=1)
        stand_in("sglang.kernels.ops.lplb.shmem_budget", monkeypatch, assert_fits=1)
        cuda = SimpleNamespace(
            is_available=lambda: True, get_device_capability=lambda version=version: version
        )
        solver = load("torch_solver", package / "kernels/ops/lplb/torch_solver.py", monkeypatch)
        monkeypatch.setattr(solver, "torch", SimpleNamespace(cuda=cuda))
        solver._init_fused_backend()
        if bool(solver._FUSED_AVAILABLE) != (generation in lp.generations):
            wrong.append(generation)
    assert not wrong
    # Without CUDA there is nothing to ask.
    assert not lp.generations & {Generation.CDNA3, Generation.ASCEND}
