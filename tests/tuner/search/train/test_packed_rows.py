"""Problems whose documents are packed into rows."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.models import MODELS
from tests.tuner.search.train.testing import planned
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.problem import TrainProblem
from tuner.spec.search import Search

LAW = "sequence_lengths: {kind: lognormal, mean: 480, cv: 1.5}"
SPEC = f"""\
schema_version: 1
model: {MODELS}/MODEL
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8, nic: 400Gbit/s}}]
goal:
  kind: train
  sequence_length: 4096
  global_batch_size: 64
  GOAL
emit: [TARGET]
"""
LORA = "tune: {method: lora, rank: 16, targets: [attention]}"


def problem(
    folder: Path,
    goal: str,
    *,
    emit: str = "megatron-bridge",
    model: str = "qwen3-30b-a3b",
    **limits: Any,
) -> TrainProblem:
    path = folder / "spec.yaml"
    path.write_text(SPEC.replace("GOAL", goal).replace("TARGET", emit).replace("MODEL", model))
    spec = read_spec(path).model_copy(
        update={"search": Search(**limits), "programs": programs((emit,))}
    )
    return build_problem(spec, price_pool(spec.cluster.pools[0], residuals=None))


def test_recipes_of_adapters_pack_their_samples(tmp_path: Path) -> None:
    packed = problem(tmp_path, LORA)
    # Samples of some 180 tokens, each of which attends to half of its own on average.
    assert present(packed.rows).documents_per_row == pytest.approx(4096 / 180, rel=0.02)
    assert 90 < packed.packed["attended"] < 120
    assert packed.limits.micro_batch_size == (1,)
    assert packed.limits.cuda_graph == ("none",)
    columns = packed.packed_columns(micro_batch=np.array([1.0, 2.0]), has_graphs=0.0)
    assert np.all(columns["attended"] == [packed.packed["attended"], 0.0])
    # Padded samples, if asked for; no recipe of adapters; all weights.
    assert problem(tmp_path, LORA, micro_batch_size=(2,)).limits.micro_batch_size == (2,)
    assert problem(tmp_path, LORA, model="deepseek-v2-lite").rows is None
    assert problem(tmp_path, "tune: full").packed == {}


def test_stated_documents_are_packed_by_the_engine_s_rule(tmp_path: Path) -> None:
    bridge, torchtitan = (
        problem(tmp_path, f"{LORA}\n  {LAW}"),
        problem(tmp_path, LAW, emit="torchtitan"),
    )
    assert present(bridge.rows).rule == "first_fit_shuffle"
    assert present(torchtitan.rows).rule == "wrapped"
    # A document that goes on in the next row is two there.
    assert torchtitan.packed["attended"] < bridge.packed["attended"] < 4097 / 2
    assert bridge.flop_per_token < problem(tmp_path, "tune: full").flop_per_token


def test_targets_that_cannot_keep_documents_apart_are_refused(tmp_path: Path) -> None:
    for emit, goal, limits, words in (
        ("megatron-lm", LAW, {}, "megatron-lm lets documents of a row attend to each other"),
        ("megatron-bridge", LAW, {}, "megatron-bridge lets documents"),
        ("megatron-bridge", f"{LORA}\n  {LAW}", {"micro_batch_size": (2, 4)}, "need 1 in"),
        ("megatron-bridge", f"{LORA}\n  {LAW}", {"cuda_graph": ("partial",)}, "need none in"),
        ("torchtitan", f"{LAW}\n  too_long: refuse", {}, "longer than sequence_length 4096"),
    ):
        with pytest.raises(SpecError, match=re.escape(words)):
            problem(tmp_path, goal, emit=emit, **limits)


def test_a_plan_says_what_its_rows_lose(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    law = LAW.replace("mean: 480", "mean: 2000").replace("cv: 1.5", "cv: 3")
    text = SPEC.replace("GOAL", law).replace("TARGET", "torchtitan").replace("MODEL", "olmoe-1b-7b")
    path.write_text(text + "search: {pipeline_model_parallel_size: 2, data_parallel_size: 8}\n")
    plan = planned(read_spec(path))
    predicted = present(plan.predicted)
    rows = present(predicted.rows)
    assert rows.rule == "wrapped"
    assert rows.fill_ratio > 0.99
    assert rows.step_time_s_p10 < predicted.step_time_s < rows.step_time_s_p90
    # Ranks that share experts wait in every micro-batch, and sorted rows do less.
    assert rows.waiting_s > 0.0
    assert rows.sorted_step_time_s < predicted.step_time_s
    assert sum(predicted.breakdown_s.values()) == pytest.approx(predicted.step_time_s)
    lost_s = rows.waiting_s + rows.order_s
    assert predicted.breakdown_s["rows"] == pytest.approx(lost_s)
    assert predicted.mfu_ratio is not None


def test_a_plan_names_longer_rows_that_take_less_time(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    text = SPEC.replace("GOAL", f"{LORA}\n  {LAW}").replace("TARGET", "megatron-bridge")
    path.write_text(text.replace("MODEL", "qwen3-30b-a3b"))
    predicted = present(planned(read_spec(path)).predicted)
    # Micro-batches of one row of 4,096 tokens wait for the host.
    wider = present(present(predicted.rows).wider)
    assert wider.tokens in (8192, 16384, 32768)
    assert wider.step_time_s < 0.8 * predicted.step_time_s
    assert max(predicted.peak_memory_bytes) < wider.peak_memory_bytes
    assert wider.peak_memory_bytes <= present(predicted.memory_limit_bytes)
