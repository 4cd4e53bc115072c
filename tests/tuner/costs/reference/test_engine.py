"""The cost model against the reference step itself: bytes it keeps and GEMMs it computes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from profilers.records import Case
from profilers.steps.config import Parallelism, Recompute, Stage, StepConfig, TokenRouting
from profilers.steps.layout import ParallelState
from profilers.steps.run import start
from profilers.steps.training import Training
from profilers.work import work as work_of
from tests.patience import patient_s
from tests.rows import each_row
from tuner.costs.reference.layer_time import layer_time, pass_time
from tuner.costs.reference.operations import embedding_ops, head_ops
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.engines.reference.step_config import model_shape
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.decisions import RecomputeOption, decision
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]

NONE = RecomputeOption(recompute=Recompute.NONE, chunks=1)
SELECTIVE_2 = RecomputeOption(recompute=Recompute.SELECTIVE, chunks=2)
FULL_1 = RecomputeOption(recompute=Recompute.FULL, chunks=1)
FULL_4 = RecomputeOption(recompute=Recompute.FULL, chunks=4)

SKEWED = (0.4, 0.2, 0.1, 0.1, 0.1, 0.05, 0.05, 0.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One configuration, as the planner and as the engine see it."""

    predicted: tuple[int, ...]
    """Activation bytes per pipeline rank."""
    crossing: float | None
    """Bytes between nodes of two ranks."""
    config: StepConfig


@pytest.fixture(scope="module")
def setting(formula_machine: Callable[..., PricedMachine]) -> Callable[..., Setting]:
    """Cut a workload by degrees, every stage under one option."""

    def make(work: Workload, degrees: StepDegrees, option: RecomputeOption) -> Setting:
        layers = (work.model.num_layers // degrees.num_stages,) * degrees.num_stages
        chosen = decision(degrees, layers=layers, options=[option] * degrees.num_stages)
        machine = formula_machine(num_devices=degrees.world, ranks_per_node=2)
        predicted = predict(CandidateCosts(work=work, degrees=degrees, machine=machine), chosen)
        config = StepConfig(
            model=model_shape(work.model),
            parallelism=Parallelism.model_validate(
                {
                    "dispatcher": "flat" if degrees.ranks_per_node is None else "hierarchical",
                    **{
                        name: getattr(degrees, name)
                        for name in Parallelism.model_fields
                        if name != "dispatcher"
                    },
                }
            ),
            stages=tuple(
                Stage(num_layers=count, recompute=option.recompute, chunks=option.chunks)
                for count in layers
            ),
            sequence_length=work.sequence_length,
            global_batch_size=work.global_batch_size,
            micro_batch_size=degrees.micro_batch_size,
            precision="fp32" if work.precision == "fp32" else "bf16",
            routing=TokenRouting(mode="forced", load_ratio=work.load_ratio, balancing="none"),
            steps=1,
            warmup_steps=1,
            device="cpu",
        )
        return Setting(
            predicted=predicted.activation_bytes,
            crossing=predicted.inter_node_bytes,
            config=config,
        )

    return make


def _small(tiny_work: Make, *, precision: str = "bf16", load: tuple[float, ...] = ()) -> Workload:
    return tiny_work(
        layers="dmm" if not load else "mm",
        hidden_size=32,
        vocab_size=16,  # or the head would be the peak, whatever is recomputed
        dense_ffn_size=80,
        moe={"expert_ffn_size": 48, "shared_ffn_size": 40},
        batch={"precision": precision, "load_ratio": (load,) * 2 if load else ()},
    )


def _observed(folder: Path, settings: Mapping[str, Setting], *, ranks: int) -> dict[str, Any]:
    """What every rank saw, by one job for all settings."""
    cases, results = folder / "cases.json", folder / "results.pt"
    fields = {name: json.loads(one.config.model_dump_json()) for name, one in settings.items()}
    cases.write_text(json.dumps(fields), encoding="utf-8")
    starter = ["-m", "profilers.local_ranks", "--ranks", str(ranks)]
    done = subprocess.run(
        [sys.executable, "-P", *starter, "tests.profilers.steps.testing", str(cases), str(results)],
        capture_output=True,
        text=True,
        timeout=patient_s(200),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    observed: dict[str, Any] = torch.load(results, weights_only=True)
    return observed


def _measured(folder: Path, settings: Mapping[str, Setting], *, ranks: int) -> dict[str, list[int]]:
    """Activation bytes of every rank."""
    observed = _observed(folder, settings, ranks=ranks)
    return {name: observed[name]["activation_bytes"] for name in settings}


def _most_loaded(bytes_by_rank: list[int], *, stages: int) -> list[int]:
    per_stage = len(bytes_by_rank) // stages
    return [
        max(bytes_by_rank[first : first + per_stage])
        for first in range(0, len(bytes_by_rank), per_stage)
    ]


def test_one_process_keeps_the_bytes_that_are_predicted(
    alone: ParallelState, tiny_work: Make, cut: Cut, setting: Callable[..., Setting]
) -> None:
    """By default nothing else compares the bytes of all weights with what the engine allocates."""
    settings = {
        f"{precision} {option.name}": setting(
            _small(tiny_work, precision=precision), cut(zero_stage=1), option
        )
        for option, precision in (
            (NONE, "bf16"),
            (SELECTIVE_2, "bf16"),
            (SELECTIVE_2, "fp32"),
            (FULL_1, "bf16"),
            (FULL_4, "fp32"),
        )
    }
    settings["skewed"] = setting(_small(tiny_work, load=SKEWED), cut(), NONE)
    errors = {}
    for name, one in settings.items():
        training = Training(one.config, alone)
        training.prepare(0)
        training.compute_gradients()
        training.update()
        errors[name] = one.predicted[0] / training.metered(1).peak_bytes - 1.0
    # Everything is counted; what is left is the loss's own weight of 4 bytes.
    assert max(map(abs, errors.values())) < 1e-4, errors


@pytest.mark.slow
def test_two_ranks_keep_the_bytes_that_are_predicted(
    tmp_path: Path, tiny_work: Make, cut: Cut, setting: Callable[..., Setting]
) -> None:
    even = tiny_work(hidden_size=32, moe={"expert_ffn_size": 48, "shared_ffn_size": 40})
    skewed = tiny_work(hidden_size=32, batch={"load_ratio": (SKEWED,) * 4})
    cuts = {
        "dp2 ep2": (skewed, cut(data=2, expert=2)),
        "dp2 zero 3": (even, cut(data=2, zero_stage=3)),
        "tp2": (even, cut(tensor=2)),
        "tp2 ep2": (skewed, cut(tensor=2, expert=2)),
        "pp2": (even, cut(pipeline=2)),
        "pp2, one micro-batch": (even, cut(pipeline=2, micro_batch_size=8)),
        "pp2 vp2": (even, cut(pipeline=2, virtual_pipeline=2)),
    }
    settings = {
        f"{name}, {option.name}": setting(work, degrees, option)
        for name, (work, degrees) in cuts.items()
        for option in (NONE, SELECTIVE_2, FULL_1)
    }
    measured = _measured(tmp_path, settings, ranks=2)
    for name, one in settings.items():
        seen = _most_loaded(measured[name], stages=len(one.predicted))
        assert one.predicted == pytest.approx(seen, rel=1e-3), name


@pytest.mark.slow
def test_four_ranks_on_two_nodes_keep_and_send_what_is_predicted(
    tmp_path: Path, tiny_work: Make, cut: Cut, setting: Callable[..., Setting]
) -> None:
    even = tiny_work(hidden_size=32, moe={"expert_ffn_size": 48})
    skewed = tiny_work(hidden_size=32, batch={"load_ratio": (SKEWED,) * 4})
    single = tiny_work(hidden_size=32, batch={"precision": "fp32"})
    inside = tiny_work(hidden_size=32, moe={"num_experts": 4})
    cuts = {
        "flat": (skewed, cut(data=4, expert=4)),
        "hierarchical": (skewed, cut(data=4, expert=4, ranks_per_node=2)),
        "fp32": (single, cut(data=4, expert=4, ranks_per_node=2)),
        "one expert a rank": (inside, cut(data=4, expert=4, ranks_per_node=2)),
        "one rank a node": (even, cut(data=4, expert=4, ranks_per_node=1)),
        "tp2": (even, cut(tensor=2, data=2, expert=4, ranks_per_node=2)),
        "pp2": (even, cut(pipeline=2, data=2, expert=2)),
    }
    settings = {
        f"{name}, {option.name}": setting(work, degrees, option)
        for name, (work, degrees) in cuts.items()
        for option in (NONE, SELECTIVE_2, FULL_1)
    }
    observed = _observed(tmp_path, settings, ranks=4)
    kept, sent = {}, {}
    for name, one in settings.items():
        seen = _most_loaded(observed[name]["activation_bytes"], stages=len(one.predicted))
        kept[name] = [round(a / b - 1.0, 4) for a, b in zip(one.predicted, seen, strict=True)]
        # Only nodes of two ranks were counted.
        if one.config.parallelism.ranks_per_node == 2:
            sent[name] = (one.crossing, float(observed[name]["inter_node_bytes"][0]))
    assert max(abs(error) for errors in kept.values() for error in errors) < 1e-3, kept
    assert sent
    assert all(predicted == counted for predicted, counted in sent.values()), sent


@pytest.fixture(scope="module")
def alone() -> Iterator[ParallelState]:
    """A job of this process only, ended afterwards."""
    config = {"parallelism": Parallelism()}
    layout = start(StepConfig.model_construct(**config), device=torch.device("cpu"))  # type: ignore[arg-type]  # only the degrees are read
    yield layout
    dist.destroy_process_group()


def _attention_flop(query: Any, _: Any, value: Any, *__: Any, **___: Any) -> int:
    """Count causal attention on a CPU, which the counter leaves out: half of both GEMMs."""
    batch, heads, sequence, head_dim = query
    return int(batch * heads * sequence**2 * (head_dim + value[-1]))


def _attention_backward_flop(_: Any, *arguments: Any, **named: Any) -> int:
    return _attention_flop(*arguments, **named) * 5 // 2


def _flop(case: Case) -> float:
    axes = {name: np.array([float(size)]) for name, size in case.axes.items()}
    needed = work_of(
        case.operation, kind=case.kind, dtype=case.dtype, direction=case.direction, axes=axes
    )
    return float(needed.flop[0])


@each_row(
    ("option", "precision"),
    [(NONE, "bf16"), (SELECTIVE_2, "fp32"), (FULL_1, "bf16"), (FULL_4, "fp32")],
)
def test_the_step_computes_the_gemms_that_are_priced(
    alone: ParallelState,
    tiny_work: Make,
    cut: Cut,
    setting: Callable[..., Setting],
    table_of: Callable[[Callable[[Case], float]], ProfilePrices],
    option: RecomputeOption,
    precision: str,
) -> None:
    work, degrees = _small(tiny_work, precision=precision), cut()
    training = Training(setting(work, degrees, option).config, alone)
    training.prepare(0)
    aten = torch.ops.aten
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flop,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flop,
        },
    )
    with counter:
        training.compute_gradients()
    table = table_of(_flop)
    layers = sum(
        layer_time(
            work, degrees, table, layer=layer, recompute=option.recompute, chunks=option.chunks
        ).total_s
        for layer in range(work.model.num_layers)
    )
    ends = pass_time([*embedding_ops(work, degrees), *head_ops(work, degrees)], table).total_s
    priced = work.num_microbatches(degrees) * (layers + ends)
    assert priced == pytest.approx(counter.get_total_flops(), rel=1e-2)
