"""The commands that state an error band state the same one for the same facts."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.expect import present
from tests.tuner.estimate.conftest import predict
from tests.tuner.estimate.serving.conftest import no_changes
from tuner.backtest.columns import build_run
from tuner.backtest.prediction import ResidualSet, predictions
from tuner.backtest.rows import Row, read_rows
from tuner.backtest.serving.backtest import backtest_serving
from tuner.config.serve import Role
from tuner.costs.train.calibration import shipped
from tuner.engines.megatron_lm import read as megatron
from tuner.estimate.serving.estimate import estimate_serving, pool_named, surroundings
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.plan_ratios import serve_ratio_band, train_ratio_band
from tuner.goals.serve_plan import deploy, price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_plan import plan_training
from tuner.goals.train_spec import read_spec
from tuner.plans.serve import VerifiedServing
from tuner.search.ratios import ties_ratio
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.verify.budget.prices import production_prices

Band = tuple[float, float]

ROWS: Final = Path(__file__).parents[1] / "backtest" / "runs.csv"
MODELS: Final = Path(__file__).parents[3] / "examples" / "models"
LAUNCH: Final = (
    "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --bf16 --micro-batch-size 1 "
    "--global-batch-size 64 --seq-length 4096 --hidden-dropout 0 --attention-dropout 0 "
    "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 "
)
EXPERTS: Final = (
    "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm "
)


def over(band: Band, value: float) -> Band:
    return band[0] / value, band[1] / value


def both_as_independent(band: Band) -> float:
    """Band of the ratio of two plans that share no errors, each of this band."""
    return math.exp(math.sqrt(2.0) * math.log1p(ties_ratio(band)))


def published_row(model: str, gpu: str) -> Row:
    rows = {row.id: row for row in read_rows(ROWS)}
    row = rows["moe-a" if model == "qwen3-30b-a3b" else "dense-a"]
    named = {"source": "megatron-bridge", "gpu": gpu, "precision": "BF16", "release": ""}
    return replace(row, texts={**row.texts, **named})


def training_bands(folder: Path, model: str, device: str, gpu: str) -> dict[str, Band]:
    path = folder / f"{model}-{device}.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        f"cluster: {{pools: [{{name: pool, device: {device}, nodes: 1, devices_per_node: 8,"
        " nic: 200Gbit/s}]}\n"
        "goal: {kind: train, sequence_length: 4096, global_batch_size: 64}\n"
        "search: {tensor_model_parallel_size: [1, 2], pipeline_model_parallel_size: [1],"
        " context_parallel_size: [1], micro_batch_size: [1]}\n"
        "emit: [megatron-lm]\n"
    )
    spec = read_spec(path)
    plan = plan_training(path, with_unlaunchable=False).plan
    flags = EXPERTS if model == "qwen3-30b-a3b" else "--tensor-model-parallel-size 2 "
    told = predict(spec, megatron.read(LAUNCH + flags, source="run.sh"), residuals=shipped())
    (row,) = predictions(
        [build_run(published_row(model, gpu))], residual_set=ResidualSet(default=shipped())
    )
    problem = build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped()))
    trial = production_prices(problem, present(plan.predicted))(plan, present(plan.decision))
    stated = over(present(plan.predicted).step_time_s_band, present(plan.predicted).step_time_s)
    elsewhere = plan.model_copy(update={"model": plan.model.model_copy(update={"vocab_size": 9})})
    compared = present(train_ratio_band(plan, elsewhere, "step_time_s"))
    assert compared.band[1] == pytest.approx(both_as_independent(stated))
    says = {
        "plan": any("no published run of nemo" in note for note in plan.provenance.notes),
        "estimate": any("no published run of nemo" in note for note in told.notes),
    }
    assert set(says.values()) == {device == "a100-80gb-sxm" and model == "qwen3-30b-a3b"}
    return {
        "plan": stated,
        "estimate": over(told.step_time_s_band, told.step_time_s),
        "backtest": row.band,
        "verify": over(trial.step_time_s_band, trial.step_time_s),
    }


def test_training_commands_state_one_band_and_widen_it_where_no_run_is_published(
    tmp_path: Path,
) -> None:
    width = {}
    for model, device, gpu in (
        ("qwen3-30b-a3b", "h100-sxm", "DGX-H100"),
        ("llama-3.1-8b", "h100-sxm", "DGX-H100"),
        ("qwen3-30b-a3b", "a100-80gb-sxm", "A100"),
    ):
        bands = training_bands(tmp_path, model, device, gpu)
        for name, band in bands.items():
            assert band == pytest.approx(bands["plan"], rel=1e-6), (model, device, name)
        width[model, device] = bands["plan"][1] / bands["plan"][0]
    known, dense, unknown = width.values()
    assert dense < known < unknown


def serving_bands(
    folder: Path, *, model: str, device: str, cells: dict[str, str]
) -> dict[str, Band]:
    path = folder / f"{model}-{device}.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {MODELS / model}\n"
        f"cluster: {{pools: [{{name: gpus, device: {device}, nodes: 1, devices_per_node: 8}}]}}\n"
        "goal:\n"
        "  kind: serve\n"
        "  engine: {name: vllm}\n"
        "  traffic: {rate: 1/s, input_tokens: 1000, output_tokens: 100}\n"
        "  slo: {ttft: {p90: 5s}, tpot: {p90: 200ms}}\n"
        "  objective: devices\n"
        "  modes: [aggregated]\n"
    )
    spec = read_serve_spec(path)
    pool = pool_named(spec, None)
    launch = read_serving_text(
        "vllm serve m -tp 8 --max-num-seqs 64",
        surroundings(spec, pool),
        engine="vllm",
        source="launch.sh",
    )
    assert launch.role is Role.AGGREGATED
    told = estimate_serving(
        spec, launch, serving_pool=price_serving_pool(pool, ()), advise=no_changes
    )
    plan = deploy(path, time_limit_s=20.0).plan
    (row,) = backtest_serving([cells | {"backend_version": told.release}]).rows
    stated = over(present(plan.predicted).tpot_s_band, present(plan.predicted).tpot_s.mean)
    # What verification launches: the plan's choice, and its alternatives.
    tried = VerifiedServing(
        plan=plan,
        decision=present(plan.decision),
        predicted=present(plan.predicted),
        waived="a test",
    ).predicted
    for other in plan.alternatives:
        own = other.predicted
        assert over(own.tpot_s_band, own.tpot_s.mean) == pytest.approx(stated)
    elsewhere = plan.model_copy(update={"model": plan.model.model_copy(update={"vocab_size": 9})})
    compared = present(serve_ratio_band(plan, elsewhere, "tpot_mean_s"))
    assert compared.band[1] == pytest.approx(both_as_independent(stated))
    for notes in (plan.provenance.notes, told.notes):
        assert any(f"no published run of vllm {told.release}" in note for note in notes) or any(
            f"of vllm {told.release}" in note and "this model on vllm" in note for note in notes
        )
    return {
        "plan": stated,
        "estimate": over(present(told.tpot_s_band), present(present(told.load).tpot_s).mean),
        "backtest": over(present(row.tpot_band), present(row.predicted_tpot_s)),
        "verify": over(tried.tpot_s_band, tried.tpot_s.mean),
    }


def test_serving_commands_state_one_band_and_widen_it_where_no_run_is_published(
    tmp_path: Path,
) -> None:
    cells = {
        "id": "one",
        "silicon_data_source": "db-dump/2026-04-27; config_id=1; silicon_concurrency=8; image",
        "backend": "vllm",
        "precision": "bf16",
        "mode": "agg",
        "isl": "1024",
        "osl": "128",
        "tp_size": "8",
        "moe_tp_size": "8",
        "silicon_ttft_ms": "80.5",
        "silicon_tpot_ms": "11.25",
    }
    width = {}
    for model, device, named in (
        ("llama-3.1-70b", "h100-sxm", ("meta-llama/Llama-3.1-70B", "h100_sxm")),
        ("mixtral-8x7b", "h100-sxm", ("mistralai/Mixtral-8x7B-Instruct-v0.1", "h100_sxm")),
        ("mixtral-8x7b", "a100-80gb-sxm", ("mistralai/Mixtral-8x7B-Instruct-v0.1", "a100_sxm")),
    ):
        row = cells | {"model_path": named[0], "system": named[1]}
        bands = serving_bands(tmp_path, model=model, device=device, cells=row)
        for name, band in bands.items():
            assert band == pytest.approx(bands["plan"], rel=1e-6), (model, device, name)
        width[model, device] = bands["plan"][1] / bands["plan"][0]
    known, new_pair, new_generation = width.values()
    assert known < new_pair < new_generation
