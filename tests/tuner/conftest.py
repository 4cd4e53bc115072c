"""A tiny training spec on disk, and the profile of a machine whose every time is a short formula.

The machine: 5 us per call, 1e11 flop/s, 1e10 B/s; a collective over R ranks takes R - 1 latencies
of 20 us and moves its bytes at 1e9 B/s. Times at any size follow from profilers/work.py, so nothing
is timed and every predicted second can be worked out by hand.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from profilers.records import Case, Measurement, Profile
from profilers.store import write_header, write_table
from profilers.testing import fake_machine, fake_profile
from profilers.work import PASSES, work
from tuner.planner.shapes import cases_for
from tuner.spec.read import read_spec

Fields = dict[str, Any]

CALL_S, LATENCY_S = 5e-6, 20e-6
FLOP_PER_S, BYTES_PER_S, LINK_BYTES_PER_S = 1e11, 1e10, 1e9
WORLD = 4
FP32_ONLY = ("router", "cross_entropy")

MODEL: Fields = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 256,
}
POOL: Fields = {
    "name": "here",
    "profile": "profile",
    "nodes": 1,
    "devices_per_node": WORLD,
    "memory_per_device": "1GiB",
}
GOAL: Fields = {
    "kind": "train",
    "sequence_length": 64,
    "global_batch_size": 8,
    "precision": "bf16",
}


@pytest.fixture(scope="session")
def write_spec() -> Callable[..., Path]:
    """Write `spec.yaml`, `config.json` into a folder: write_spec(folder, model={...}, ...) -> path.

    `model`, `pool` and `goal` change single fields; `search` and `emit` are taken whole. The pool's
    profile is expected in the folder `profile` beside the spec.
    """
    return _write_spec


@pytest.fixture
def tiny_spec(tmp_path: Path) -> Callable[..., Path]:
    """The same in this test's folder: tiny_spec(**changes) -> path of spec.yaml."""

    def write(**changes: Any) -> Path:
        return _write_spec(tmp_path, **changes)

    return write


@pytest.fixture(scope="session")
def profile_for() -> Callable[[Path], Profile]:
    """What the formula machine would measure for a spec: profile_for(spec path) -> Profile."""
    return _profile_for


@pytest.fixture(scope="session")
def analytic_profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The profile for the tiny spec as it is."""
    return _profile_for(_write_spec(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def store_profile() -> Callable[[Path, Profile], Path]:
    """Write a profile as a stored one: store_profile(folder, profile) -> folder."""
    return _store_profile


@pytest.fixture(scope="session")
def formula_s() -> Callable[[Case], float]:
    """What the formula machine takes for a case: formula_s(case) -> seconds."""
    return _formula_s


def _write_spec(
    folder: Path,
    *,
    model: Mapping[str, Any] | None = None,
    pool: Mapping[str, Any] | None = None,
    goal: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    emit: Iterable[str] = ("reference",),
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | dict(model or {})), encoding="utf-8")
    spec: Fields = {
        "schema_version": 1,
        "model": "config.json",
        "cluster": {"pools": [POOL | dict(pool or {})]},
        "goal": GOAL | dict(goal or {}),
        "search": dict(search or {}),
        "emit": list(emit),
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
    return path


def _profile_for(path: Path) -> Profile:
    spec = read_spec(path)
    cases = {case.id: case for case in (*cases_for(spec), *_coarse_grid())}
    rows = [
        Measurement(case=cases[name], times_s=(_formula_s(cases[name]),)) for name in sorted(cases)
    ]
    return fake_profile(rows, machine=fake_machine(world=max(WORLD, spec.num_devices)))


def _store_profile(folder: Path, profile: Profile) -> Path:
    for operation in profile.header.tables:
        rows = [row for row in profile.measurements if row.case.operation == operation]
        write_table(folder, rows, operation=operation)
    write_header(folder, profile.header)
    return folder


def _formula_s(case: Case) -> float:
    axes = {name: np.array([float(size)]) for name, size in case.axes.items()}
    needed = work(
        case.operation, kind=case.kind, dtype=case.dtype, direction=case.direction, axes=axes
    )
    flop, moved = float(needed.flop[0]), float(needed.bytes[0])
    if case.operation == "collective":
        return LATENCY_S * max(1, case.axes["ranks"] - 1) + moved / LINK_BYTES_PER_S
    return CALL_S + flop / FLOP_PER_S + moved / BYTES_PER_S


def _coarse_grid() -> Iterator[Case]:
    """Three sizes an axis of what every model needs: what a first, generic profile would hold."""
    sizes = (16, 256, 4096)
    for dtype in ("bf16", "fp32"):
        for m, n, k in product(sizes, sizes, sizes):
            yield from _both("gemm", dtype=dtype, m=m, n=n, k=k)
        for tokens, width, experts in product(sizes, (64, 512), (2, 8)):
            yield from _both(
                "grouped_gemm",
                dtype=dtype,
                experts=experts,
                tokens=tokens,
                largest=-(-tokens // experts),
                hidden=width,
                ffn=2 * width,
            )
        for sequence, heads, head_dim in product((16, 256), (2, 8), (16, 64)):
            yield from _both(
                "attention",
                dtype=dtype,
                batch=1,
                sequence=sequence,
                heads=heads,
                kv_heads=heads // 2,
                head_dim=head_dim,
            )
        for kind, rows, width in product(PASSES, sizes, (16, 1024)):
            if dtype == "fp32" or kind not in FP32_ONLY:
                yield from _both("memory_bound", kind=kind, dtype=dtype, rows=rows, width=width)
    for parameters in (10**3, 10**6):
        axes = {"parameters": parameters}
        yield Case(operation="optimizer", kind="adamw", dtype="fp32", axes=axes)
    for num_bytes in (64, 2**24):
        yield Case(operation="copy", kind="device", axes={"bytes": num_bytes})
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    for kind, num_bytes in product(kinds, (64, 2**24)):
        axes = {"bytes": num_bytes, "ranks": 2, "stride": 1, "world": 2}
        yield Case(operation="collective", kind=kind, axes=axes)


def _both(operation: str, *, dtype: str, kind: str = "", **axes: int) -> Iterator[Case]:
    yield Case(operation=operation, kind=kind, dtype=dtype, direction="forward", axes=axes)
    yield Case(operation=operation, kind=kind, dtype=dtype, direction="backward", axes=axes)
