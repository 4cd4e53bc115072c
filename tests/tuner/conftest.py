"""A tiny training spec on disk, and the profile of a machine whose every time is a short formula.

The machine: 15 us per call, 1e11 flop/s, 1e10 B/s; a collective over R ranks takes R - 1 latencies
of 20 us and moves its bytes at 1e9 B/s, and its ranks lose 2 % of the work since they last met.
Times at any size follow from profilers/work.py, so nothing is timed and every predicted second can
be worked out by hand.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from profilers.links.groups import shapes
from profilers.records import Case, Measurement, Profile
from profilers.steps.config import LayerKind
from profilers.store import write_header, write_table
from profilers.work import PASSES, work
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile
from tests.tuner.formulas import Formulas
from tests.tuner.verify.testing import FakeLauncher
from tuner import api
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.costs.residuals import Residual
from tuner.goals.train_folder import read_plan, read_used_profile, write_plan
from tuner.goals.train_spec import read_spec
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.layer_costs import PricedMachine
from tuner.search.reference.shapes import cases_for
from tuner.spec.model import Attention, ModelSpec, Moe

Fields = dict[str, Any]

CALL_S, LATENCY_S = 15e-6, 20e-6
FLOP_PER_S, BYTES_PER_S, LINK_BYTES_PER_S = 1e11, 1e10, 1e9
MEETING_RATIO = 0.02
WORLD = 4
USABLE_RATIO = 0.95
"""Of a pool's memory, see tuner/spec/cluster.py."""

BOUND_SEARCH: Mapping[str, Any] = {
    "tensor_model_parallel_size": [1],
    "virtual_pipeline_model_parallel_size": [1],
    "micro_batch_size": [2, 4],
    "zero_stage": [0, 1],
}
"""Few enough candidates to plan within a second."""

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


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., ModelSpec]:
    """The tiny spec's model: tiny_model(layers="dmm", moe={...}, hidden_size=32) -> ModelSpec.

    `layers` spells the kinds, d for dense and m for MoE.
    """
    return _tiny_model


@pytest.fixture(scope="session")
def tiny_work() -> Callable[..., Workload]:
    """The tiny spec's batch: tiny_work(layers="dmm", ..., batch={"precision": "fp32"}) -> Workload.

    `batch` changes fields of the workload, all others those of the model.
    """
    return _tiny_work


@pytest.fixture(scope="session")
def cut() -> Callable[..., StepDegrees]:
    """Degrees of one device, micro-batches of 2 sequences: cut(data=2, expert=2) -> Degrees."""
    return _cut


@pytest.fixture(scope="session")
def table_of() -> Callable[[Callable[[Case], float]], ProfilePrices]:
    """Prices of every operation by a function: table_of(seconds of a case)."""
    return lambda seconds: ProfilePrices(curves=Formulas(seconds))


@pytest.fixture(scope="session")
def formula_machine() -> Callable[..., PricedMachine]:
    """Devices of the formula machine: formula_machine(num_devices=4, band_ratio=0.1) -> Machine."""
    return _formula_machine


def _tiny_model(
    *, layers: str = "mmmm", moe: Mapping[str, Any] | None = None, **changes: Any
) -> ModelSpec:
    kinds = tuple(LayerKind.DENSE if kind == "d" else LayerKind.MOE for kind in layers)
    fields: Fields = {
        "name": "tiny",
        "architecture": "MixtralForCausalLM",
        "hidden_size": 64,
        "num_layers": len(kinds),
        "vocab_size": 256,
        "tie_word_embeddings": False,
        "norm_epsilon": 1e-5,
        "rope_theta": 1e4,
        "max_position": 256,
        "attention": Attention(kind="gqa", num_heads=4, num_kv_heads=2, head_dim=16),
        "dense_ffn_size": 96 if "d" in layers else 0,
        "layers": kinds,
        "windowed": (False,) * len(kinds),
        "moe": None,
    }
    if "m" in layers:
        experts = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 128}
        fields["moe"] = Moe.model_validate(experts | dict(moe or {}))
    return ModelSpec.model_validate(fields | changes)


def _tiny_work(*, batch: Mapping[str, Any] | None = None, **model: Any) -> Workload:
    fields: Fields = {"sequence_length": 64, "global_batch_size": 8, "precision": "bf16"}
    return Workload(model=_tiny_model(**model), **(fields | dict(batch or {})))


def _cut(**changes: Any) -> StepDegrees:
    alone: Fields = dict.fromkeys(("tensor", "pipeline", "virtual_pipeline", "data", "expert"), 1)
    return StepDegrees(**(alone | {"micro_batch_size": 2, "zero_stage": 0} | changes))


def _formula_machine(
    *,
    num_devices: int = WORLD,
    memory_limit_bytes: int = 2**40,
    ranks_per_node: int | None = None,
    cores_per_rank: float = 1.0,
    band_ratio: float = 0.1,
    computation: float = 1.0,
    communication: float = 1.0,
    seconds: Callable[[Case], float] | None = None,
    measured_ranks: int | None = None,
    measured_nodes: int | None = None,
) -> PricedMachine:
    return PricedMachine(
        num_devices=num_devices,
        memory_limit_bytes=memory_limit_bytes,
        ranks_per_node=ranks_per_node,
        cores_per_rank=cores_per_rank,
        measured_ranks=measured_ranks,
        measured_nodes=measured_nodes,
        prices=ProfilePrices(curves=Formulas(seconds or _formula_s)),
        residual=Residual(
            engine="reference",
            release="",
            device_kind="cpu",
            computation=computation,
            communication=communication,
            band_ratio=band_ratio,
            origin="made up",
            num_runs=1,
        ),
    )


@pytest.fixture(scope="session")
def bound_spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A spec of two devices, its profile beside it, whose plan is bound by memory."""
    folder = tmp_path_factory.mktemp("bound")
    # Long enough that activations, which can be traded for time, outweigh the state.
    changes: Fields = {
        "search": BOUND_SEARCH,
        "emit": ("reference", "megatron-lm", "slurm"),
        "goal": {"sequence_length": 256},
    }
    roomy = _write_spec(folder, pool={"devices_per_node": 2}, **changes)
    _store_profile(folder / "profile", _profile_for(roomy))
    unbound = api.plan(roomy).plan.predicted
    memory_bytes = int(0.9 * max(present(unbound).peak_memory_bytes) / USABLE_RATIO)
    pool = {"devices_per_node": 2, "memory_per_device": f"{memory_bytes}B"}
    return _write_spec(folder, pool=pool, **changes)


@pytest.fixture(scope="session")
def bound_plan(bound_spec: Path) -> Path:
    """The folder of its plan; read only, see `planned`."""
    made = api.plan(bound_spec)
    folder = bound_spec.parent / "plan"
    write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    return folder


@pytest.fixture
def planned(bound_plan: Path, tmp_path: Path) -> Path:
    """A copy of that plan's folder for one test."""
    return Path(shutil.copytree(bound_plan, tmp_path / "plan"))


@pytest.fixture(scope="session")
def hidden_launcher() -> Callable[..., FakeLauncher]:
    """Answer for a plan's folder: hidden_launcher(folder, computation=1.3, ...) -> a launcher."""
    machines: dict[str, PricedMachine] = {}

    def launcher(
        folder: Path, *, computation: float = 1.3, communication: float = 0.7, **options: Any
    ) -> FakeLauncher:
        plan = read_plan(folder)
        machine = machines.get(plan.provenance.spec_sha256)
        if machine is None:
            machine = api.machine_of(plan.cluster.pools[0], read_used_profile(folder))
            machines[plan.provenance.spec_sha256] = machine
        truth = {"computation": computation, "communication": communication}
        hidden = dataclasses.replace(machine, residual=machine.residual.model_copy(update=truth))
        return FakeLauncher(api.work_of(plan), hidden, **options)

    return launcher


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
    listed = (*cases_for(spec), *_coarse_grid(), *_meetings(spec.num_devices))
    cases = {case.id: case for case in listed}
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
    if case.operation == "rendezvous":
        return MEETING_RATIO * case.axes["work_us"] * 1e-6
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
    updates = [("adamw", "fp32"), *product(("accumulate", "convert"), ("bf16", "fp32"))]
    for (kind, dtype), parameters in product(updates, (10**3, 10**6)):
        axes = {"parameters": parameters}
        yield Case(operation="optimizer", kind=kind, dtype=dtype, axes=axes)
    for num_bytes in (64, 2**24):
        yield Case(operation="copy", kind="device", axes={"bytes": num_bytes})
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    for kind, num_bytes in product(kinds, (64, 2**24)):
        axes = {"bytes": num_bytes, "ranks": 2, "stride": 1, "world": 2}
        yield Case(operation="collective", kind=kind, axes=axes)


def _meetings(world: int) -> Iterator[Case]:
    """The ends of a line: work from a microsecond to ten seconds, for every group of a world."""
    for shape, work_us in product(shapes(world), (1, 10**7)):
        axes = {"work_us": work_us, "ranks": shape.ranks, "stride": shape.stride, "world": world}
        yield Case(operation="rendezvous", axes=axes)


def _both(operation: str, *, dtype: str, kind: str = "", **axes: int) -> Iterator[Case]:
    yield Case(operation=operation, kind=kind, dtype=dtype, direction="forward", axes=axes)
    yield Case(operation=operation, kind=kind, dtype=dtype, direction="backward", axes=axes)
