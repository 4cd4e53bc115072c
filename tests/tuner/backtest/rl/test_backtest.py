"""Backtests of steps of reinforcement learning."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuner.backtest.cells import MissingError
from tuner.backtest.rl.prediction import (
    PricedRun,
    backtest_steps,
    band_factor,
    fit_residuals,
)
from tuner.backtest.rl.runs import parse_run
from tuner.cli.app import app
from tuner.costs.rl.residuals import PLAIN, SHIPPED, RlResiduals
from tuner.simulate.rl.step import RlPlacement

BASE = {
    "id": "a",
    "system": "NeMo-RL",
    "model": "llama-3.1-8b",
    "device": "h100",
    "mode": "colocated-sync",
    "staleness": "0",
    "train_devices": "16",
    "rollout_devices": "16",
    "train_layout": "TP1 PP2",
    "rollout_layout": "TP1",
    "rollout_engine": "vllm",
    "train_engine": "megatron",
    "algorithm": "GRPO",
    "prompts_per_step": "32",
    "samples_per_prompt": "16",
    "train_batch": "256",
    "max_tokens": "4096",
    "mean_tokens": "1019",
    "step_s": "60",
    "other": "bf16",
    "source": "tables of v0.5",
}
DISAGGREGATED = {
    "id": "b",
    "mode": "disaggregated-async",
    "staleness": "1",
    "train_devices": "8",
    "rollout_devices": "8",
}
EXPERTS = {
    "id": "c",
    "model": "qwen3-30b-a3b",
    "train_devices": "32",
    "rollout_devices": "32",
    "train_layout": "TP1 CP1 EP8 PP1",
    "rollout_layout": "TP2, gpu_memory_utilization 0.70",
    "source": "tables of v0.6",
}


def cells(**changed: str) -> Mapping[str, str]:
    return {**BASE, **changed}


def priced(row: Mapping[str, str]) -> PricedRun:
    run = parse_run(row)
    return PricedRun(
        run=run,
        plain=run.step.phases(PLAIN),
        gapped=run.step.phases(replace(PLAIN, decode_gap_s=4e-3)),
    )


def test_a_row_becomes_a_described_step() -> None:
    run = parse_run(cells(**EXPERTS))
    step = run.step
    assert (run.source, step.placement) == ("NeMo-RL 0.6", RlPlacement.COLOCATED)
    assert (step.side.ranks, step.side.memory_ratio) == (16, 0.7)
    assert (step.trainer.data_ranks, step.updates.mini_batches) == (32, 2)
    assert len(step.batch.response_N) == 512
    assert step.batch.length_N.mean() == pytest.approx(1019, rel=0.01)
    assert step.batch.length_N.max() <= 4096
    assert step.offload_bytes > 0.0


def test_colocated_phases_add_up_and_disaggregated_ones_overlap() -> None:
    together = parse_run(cells()).step.phases(SHIPPED)
    assert together.step_s == pytest.approx(sum(together.seconds().values()))
    disaggregated = parse_run(cells(**DISAGGREGATED)).step.phases(SHIPPED)
    assert disaggregated.step_s == pytest.approx(
        max(disaggregated.rollout_s, disaggregated.trainer_s) + disaggregated.sync_s
    )
    assert not disaggregated.offload_s


def test_what_a_row_does_not_say_is_its_reason() -> None:
    wrong = []
    for changed, reason in (
        ({"step_s": ""}, "step_s is blank"),
        ({"train_layout": "TP1 PP0"}, "names no degree, or one below 1"),
        ({"rollout_layout": "TP0"}, "names no degree, or one below 1"),
        ({"system": "AReaL"}, "AReaL"),
        ({"mode": "weight-sync only"}, "weight sync alone"),
        ({"mode": "hybrid"}, "mode 'hybrid' is none of"),
        ({"algorithm": "DAPO"}, "discards groups"),
        ({"algorithm": "SWE (agentic)"}, "turns and tools"),
        ({"model": "secret-1t"}, "none of examples/models"),
        ({"device": "abacus"}, "not known"),
        ({"mean_tokens": ""}, "mean_tokens is blank"),
        ({"mean_tokens": "150"}, "no length of a response"),
        ({"train_devices": "15"}, "15 devices are not divisible by"),
        ({"rollout_layout": "TP3"}, "3 does not divide 32 heads"),
        ({"train_engine": "fsdp2"}, "train_engine 'fsdp2' is not megatron"),
        ({**EXPERTS, "train_layout": "EP64"}, "expert 64"),
        ({"prompts_per_step": ""}, "prompts_per_step is blank"),
        ({"train_batch": "2.5"}, "not a whole number"),
        ({"prompts_per_step": "100000"}, "more than the 65536"),
    ):
        try:
            parse_run(cells(**changed))
            wrong.append((reason, "predicted"))
        except MissingError as error:
            if reason not in str(error):
                wrong.append((reason, str(error)))
    assert not wrong


def test_residuals_that_made_the_steps_are_found() -> None:
    truth = RlResiduals(
        decode_gap_s=5e-3, pass_factor=1.5, release_factors={"NeMo-RL 0.5": 1.1, "NeMo-RL 0.6": 1.0}
    )
    runs = []
    for changed in ({}, DISAGGREGATED, EXPERTS, {**DISAGGREGATED, **EXPERTS, "train_devices": "8"}):
        run = priced(cells(**changed))
        runs.append(replace(run, run=replace(run.run, measured_s=run.phases(truth).step_s)))
    fitted = fit_residuals(runs)
    for run in runs:
        found = run.phases(fitted).step_s / run.run.measured_s
        assert found == pytest.approx(1.0, abs=0.06)


def test_a_model_left_out_is_predicted_by_the_others() -> None:
    rows = [cells(), cells(**DISAGGREGATED), cells(**EXPERTS), cells(id="d", step_s="")]
    result = backtest_steps(rows)
    assert [row.reason for row in result.rows] == [None, None, None, "step_s is blank"]
    assert result.held_out is not None
    assert result.shipped.total.predicted == 3
    assert set(result.shipped.placements) == {"colocated", "disaggregated"}
    moved = [cells(), cells(**DISAGGREGATED), cells(**EXPERTS, step_s="600")]
    again = backtest_steps(moved)
    # The held-out prediction of a model does not see its own measurement.
    assert again.rows[2].held_out == result.rows[2].held_out
    assert again.rows[0].held_out != result.rows[0].held_out
    assert backtest_steps([cells()]).held_out is None


def test_a_band_holds_the_stated_share_of_errors() -> None:
    sizes = [0.1 * place for place in range(1, 10)]
    # The eighth of nine: ceil(10 x 0.8).
    assert band_factor(sizes) == pytest.approx(2.718281828**0.8)
    assert band_factor([]) == 1.0


def test_the_command_takes_the_table(tmp_path: Path) -> None:
    table = tmp_path / "rl.csv"
    names = list(BASE)
    lines = [",".join(names)]
    rows = (cells(), cells(**DISAGGREGATED), cells(**EXPERTS))
    lines += [",".join(f'"{row[name]}"' for name in names) for row in rows]
    table.write_text("\n".join(lines) + "\n")
    shown = CliRunner().invoke(app, ["backtest", str(table)])
    assert shown.exit_code == 0, shown.output
    for words in ("residuals that ship", "other models", "colocated", "disaggregated, NeMo-RL 0.5"):
        assert words in shown.output
