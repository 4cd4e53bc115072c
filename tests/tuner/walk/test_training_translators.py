"""Every field of a training decision through the translators into columns, and the builders.

    config/candidates         a decision -> columns
    search/train/candidates   degrees and options of a search -> columns
    estimate/prices           a launch -> columns
    backtest/strategy         a published row -> columns

Where two of them speak of the same launch they must say the same; a field that moves no column
stands in `UNPRICED` with the reason.
"""

import ast
import csv
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.expect import present
from tests.tuner.engines.testing import sample_verified, write_emitted
from tuner.backtest.columns import build_run
from tuner.backtest.rows import read_rows
from tuner.config.candidates import strategies_of as strategies_of_decision
from tuner.config.columns import Strategies
from tuner.config.knobs import COLUMN_OF_MODULE, FIELD_OF_DEGREE, searched
from tuner.config.train import TrainDecision
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.engines.targets import programs
from tuner.engines.writers import emit
from tuner.estimate import decision as estimated
from tuner.estimate.configuration import Configuration, build_configuration
from tuner.estimate.estimate import pricing_setup
from tuner.estimate.prices import to_strategies
from tuner.estimate.registry import read_launch
from tuner.search.reference import decisions as of_the_reference_step
from tuner.search.train import search_result
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.refusals import refusals
from tuner.spec.spec import Spec

UNPRICED: Final[Mapping[str, str]] = {
    "pipeline_layout": "stages are no column: their layers go beside the columns",
    "mtp_num_layers": "a part of the shape that the columns are priced with",
    "fp8_recipe": "element sizes come with the question, which has one precision",
    "rank_order": "orders the groups of all columns, beside them",
}
"""Fields that no column of a decision holds."""
UNMENTIONED: Final[Mapping[str, frozenset[str]]] = {
    "the reference step": frozenset(
        {
            # Nothing of its kind can be launched there (tuner/engines/reference/capabilities.py).
            "a2a_overlap",
            "activation_offload",
            "cuda_graph",
            "ddp_bucket_size",
            "ends_as_layers",
            "fp8_recipe",
            "gradient_bytes",
            "mtp_num_layers",
            "optimizer_offload",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "rank_order",
            "recompute_num_layers",
            "schedule",
            "shard_ranks",
        }
    ),
    "estimate": frozenset(),
    # Buckets are chosen for what the search found (search/train/gradient_buckets.py).
    "the search": frozenset({"ddp_bucket_size", "ends_as_layers"}),
}
"""By builder: fields that it leaves at their defaults."""


def _spec(pair: Any, decision: TrainDecision) -> Spec:
    goal = sample_verified(pair.model, decision).plan.goal
    pool = Pool(
        name="pool", device="h100-sxm", nodes=-(-decision.num_devices // 8), devices_per_node=8
    )
    return Spec(
        path=Path("spec.yaml"),
        model_path=Path("config.json"),
        model=pair.model,
        cluster=Cluster(pools=(pool,)),
        goal=goal,
        programs=programs(("megatron-lm",)),
    )


def _columns(strategies: Strategies) -> dict[str, tuple[float, ...]]:
    return {
        one.name: tuple(np.asarray(getattr(strategies, one.name), dtype=float).ravel())
        for one in fields(strategies)
    }


def _of_decision(pair: Any, decision: TrainDecision) -> dict[str, tuple[float, ...]]:
    goal = sample_verified(pair.model, decision).plan.goal
    return _columns(
        strategies_of_decision(
            decision,
            sequence_length=goal.sequence_length,
            global_batch_size=goal.global_batch_size,
        )
    )


def test_a_field_moves_a_column_of_its_decision(pairs: Any, none_of: Any) -> None:
    failures, moved = [], set[str]()
    for pair in pairs:
        before, after = _of_decision(pair, pair.before), _of_decision(pair, pair.after)
        if before != after:
            moved.add(pair.field)
    every = {pair.field for pair in pairs}
    failures += [f"{field} moves no column" for field in every - moved - set(UNPRICED)]
    failures += [f"stale: {field} moves a column" for field in moved & set(UNPRICED)]
    none_of(failures)


def _launched(folder: Path, pair: Any, decision: TrainDecision) -> Configuration:
    verified = sample_verified(pair.model, decision, emit=("megatron-lm",))
    write_emitted(folder, emit("megatron-lm", verified))
    return build_configuration(read_launch(str(folder / "run.sh")), _spec(pair, decision))[0]


def test_a_launch_and_its_decision_are_the_same_columns(
    pairs: Any, none_of: Any, tmp_path: Path
) -> None:
    failures, compared = [], 0
    for number, (pair, name) in enumerate(
        (pair, name) for pair in pairs for name in ("before", "after")
    ):
        decision = getattr(pair, name)
        refused = refusals(
            programs(("megatron-lm",)).capabilities(), model=pair.model, decision=decision
        )
        if refused or decision.fp8_recipe:
            continue
        own = _launched(tmp_path / str(number), pair, decision)
        found = _columns(to_strategies(own, pricing_setup(_spec(pair, decision), None)))
        wanted = _of_decision(pair, estimated.to_decision(own, pair.model))
        direct = _of_decision(pair, decision)
        compared += 1
        for column, value in found.items():
            at = f"{pair.field} ({name}): {column}"
            # The launch says which cross entropy it runs; a decision has that of its software.
            is_software = column == "logit_bytes" and value == (MemoryConstants().logit_bytes,)
            if value != wanted[column] and not is_software:
                failures.append(f"{at} {value} of the launch, {wanted[column]} of its decision")
            # Megatron-FSDP overlaps whatever is asked; the layers are written out.
            is_forced = decision.zero_stage >= 2 and column.startswith("overlap_")
            if direct[column] != wanted[column] and not (
                is_forced or column == "embedding_loss_as_layers"
            ):
                failures.append(f"{at} {direct[column]} emitted, {wanted[column]} read back")
    assert compared > 40
    none_of(failures)


def _dict_keys(function: Any) -> Iterator[str]:
    """Yield the texts that are keys in the source of a function."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Dict):
            yield from (
                key.value
                for key in node.keys
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            )


def test_every_builder_of_decisions_says_every_field(
    pairs: Any, none_of: Any, tmp_path: Path
) -> None:
    pair = pairs[0]
    own = _launched(tmp_path, pair, pair.before)
    degrees = of_the_reference_step.degrees_of(pair.before)
    options = of_the_reference_step.options_of(pair.before)
    reference = of_the_reference_step.decision(
        degrees, layers=pair.before.pipeline_layout, options=options
    )
    said = {
        "estimate": estimated.to_decision(own, pair.model).model_fields_set,
        "the reference step": reference.model_fields_set,
        "the search": {
            *_dict_keys(search_result.decision_fields),
            *FIELD_OF_DEGREE.values(),
            *(knob.field for knob in searched()),
        },
    }
    assert set(said) == set(UNMENTIONED)
    every = set(TrainDecision.model_fields)
    none_of(
        [
            f"{builder}: {field} " + ("is left out" if field not in names else "is said: stale")
            for builder, names in said.items()
            for field in sorted((every - names) ^ UNMENTIONED[builder])
        ]
    )


_LEVELS: Final = {"none": "none", "full": "full"}
ROW: Final[Mapping[str, str]] = {
    "shard_ranks": "a copy within a replica is the only kind that tables print (FSDP=<ranks>)",
    "zero_stage": "Megatron sums gradients once a step, whatever stage a table prints",
    "sequence_parallel": "on wherever Megatron has tensor parallelism, unless a table says more",
    "optimizer_offload": "no column",
    "gradient_bytes": "a habit of the engine's release, no column",
    "ddp_bucket_size": "no column",
    "overlap_grad_reduce": "a habit of the engine's release, no column",
    "overlap_param_gather": "a habit of the engine's release, no column",
    "activation_offload": "as cpu_offload_layers, layer by layer",
    "chunks": "no column",
    "schedule": "no column",
    "cuda_graph": "a local graph of parts and one of the whole step have names of their own",
    "recompute_num_layers": "printed for a rank, not for a stage",
    "ends_as_layers": "follows from whether the layers of the row divide",
}
"""Fields of a decision that a table of published runs says otherwise or not at all."""
_CELLS: Final[Mapping[str, str]] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "data_parallel_size": "dp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "micro_batch_size": "mbs",
    "stage_recompute": "recompute",
    "recompute_modules": "recompute_modules",
    "dispatcher": "dispatcher",
    "a2a_overlap": "a2a_overlap",
}
"""Fields that have a column of their own."""
_COLUMNS: Final = (
    *("tensor", "context", "pipeline", "virtual_pipeline", "data", "expert", "expert_tensor"),
    *("micro_batch", "num_microbatches", "recompute_full", "a2a_overlap", "is_deepep"),
    *("is_hybridep", *COLUMN_OF_MODULE.values()),
)


def _row(pair: Any, decision: TrainDecision) -> dict[str, Any]:
    """Write a decision down as a published run would be."""
    model, goal = pair.model, sample_verified(pair.model, decision).plan.goal
    cells: dict[str, Any] = {column: getattr(decision, field) for field, column in _CELLS.items()}
    level = decision.stage_recompute[0].value
    cells["recompute"] = _LEVELS.get(level, "+".join(decision.recompute_modules))
    cells["recompute_modules"] = "+".join(decision.recompute_modules)
    cells["a2a_overlap"] = str(decision.a2a_overlap).lower()
    arch = {
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "heads": model.attention.num_heads,
        "kv_heads": model.attention.num_kv_heads,
        "head_dim": model.attention.head_dim,
        "ffn": model.dense_ffn_size or 1,
        "glu": True,
        "vocab": model.vocab_size,
        "experts": present(model.moe).num_experts,
        "topk": present(model.moe).top_k,
        "moe_ffn": present(model.moe).expert_ffn_size,
        "dense_layers": model.num_layers - model.num_moe_layers,
    }
    cells |= {
        "id": "walk",
        "source": "walk",
        "model": model.name,
        "arch_json": json.dumps(arch),
        "gpu": "H100-SXM",
        "num_gpus": decision.num_devices,
        "gbs": goal.global_batch_size,
        "seq": goal.sequence_length,
        "zero_or_fsdp": "ZeRO-1",
        "precision": "bf16",
        "step_time_s": 1.0,
        "release": "nemo-26.04",
        "recipe_match": "exact",
        "cuda_graph": "none",
    }
    return cells


def test_a_published_row_and_a_decision_are_the_same_columns(
    pairs: Any, follows: Any, none_of: Any, tmp_path: Path
) -> None:
    failures, compared = [], set[str]()
    for number, (pair, name) in enumerate(
        (pair, name) for pair in pairs for name in ("before", "after")
    ):
        decision = getattr(pair, name)
        beyond = {"hierarchical", "allgather"}
        is_mixed = len({*decision.stage_recompute}) > 1 or decision.recompute_num_layers
        if pair.model.name != "qwen3-30b-a3b" or decision.dispatcher in beyond or is_mixed:
            continue
        if decision.fp8_recipe or decision.mtp_num_layers or decision.zero_stage != 1:
            continue
        path = tmp_path / f"{number}.csv"
        cells = _row(pair, decision)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, cells)
            writer.writeheader()
            writer.writerow(cells)
        (row,) = read_rows(path)
        found = _columns(build_run(row).strategy)
        wanted = _of_decision(pair, decision)
        compared.add(pair.field)
        failures += [
            f"{pair.field} ({name}): {column} {found[column]} of the row, {wanted[column]}"
            for column in _COLUMNS
            if found[column] != wanted[column]
        ]
    # Of a level of recomputation the pairs print modules, which are a field of their own.
    assert set(_CELLS) - compared <= {"stage_recompute"}
    assert {*_CELLS, *ROW, *UNPRICED, *follows} == set(TrainDecision.model_fields)
    assert not set(_CELLS) & set(ROW)
    none_of(failures)
