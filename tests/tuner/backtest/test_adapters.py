"""Fine-tuning runs: the adapters that their rows state."""

from dataclasses import replace

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.backtest.columns import build_run
from tuner.backtest.prediction import ResidualSet, predictions
from tuner.backtest.rows import Row, parse_row
from tuner.calibrate.calibration import calibrate
from tuner.costs.train.calibration import shipped
from tuner.errors import SpecError

LLAMA_70B = (
    '{"ffn":28672,"glu":true,"heads":64,"hidden":8192,"kv_heads":8,"layers":80,"seq":4096,'
    '"vocab":128256}'
)
BRIDGE = {
    "id": "gb200",
    "source": "megatron-bridge",
    "model": "LLAMA3_70B",
    "arch_json": LLAMA_70B,
    "gpu": "DGX-GB200",
    "num_gpus": "8",
    "gbs": "32",
    "mbs": "1",
    "seq": "4096",
    "pp": "2",
    "vpp": "20",
    "precision": "FP8",
    "tokens_per_sec_per_gpu": "6206",
    "workload": "lora",
    "release": "nemo-26.06",
    "recipe_match": "exact",
    "cuda_graph": "transformer_engine",
    "cuda_graph_scope": "mlp",
    "lora_rank": "16",
    "lora_targets": "qkv",
}
"""Megatron-Bridge's performance-summary-archive.md, NeMo container 26.06."""
AUTOMODEL = {
    "id": "h100",
    "source": "nemo-automodel",
    "release": "automodel",
    "model": "LLAMA3_70B",
    "arch_json": LLAMA_70B,
    "gpu": "DGX-H100",
    "num_gpus": "8",
    "gbs": "32",
    "mbs": "2",
    "seq": "4096",
    "tp": "2",
    "zero_or_fsdp": "FSDP=4",
    "precision": "bf16",
    "step_time_s": "15.00",
    "workload": "lora",
    "lora_rank": "16",
    "lora_targets": "q+k+v+o+gate+up+down",
}
"""NeMo AutoModel's performance-summary.mdx."""


def row_of(cells: dict[str, str], **changes: str) -> Row:
    merged = {**cells, **changes}
    return parse_row(list(merged), list(merged.values()), number=1)


def test_stated_targets_have_adapters() -> None:
    own = build_run(row_of(BRIDGE)).strategy
    assert (own.adapter_rank, own.fused_qkv_adapters, own.adapts_q, own.adapts_v) == (16, 1, 1, 1)
    assert (own.adapts_o, own.adapts_up) == (0, 0)
    own = build_run(row_of(AUTOMODEL)).strategy
    assert (own.adapter_rank, own.fused_qkv_adapters, own.adapts_o, own.adapts_up) == (16, 0, 1, 1)
    assert own.recompute_full == 1.0


@each_row(
    ("cells", "reason"),
    [
        ({"lora_rank": ""}, "lora_rank and lora_targets are needed"),
        ({"lora_targets": ""}, "lora_rank and lora_targets are needed"),
        ({"lora_targets": "q+linear"}, "lora_targets 'linear' is none of qkv, q, k"),
    ],
)
def test_adapters_that_a_row_does_not_state_are_refused(cells: dict[str, str], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_run(row_of(AUTOMODEL, **cells))


def test_both_are_predicted_within_a_tenth_though_nothing_was_fitted_to_them() -> None:
    runs = [build_run(row_of(cells)) for cells in (BRIDGE, AUTOMODEL)]
    for one in predictions(runs, residual_set=ResidualSet(default=shipped())):
        assert one.step_s == pytest.approx(present(one.run.measured_s), rel=0.1)


def test_calibration_leaves_adapters_out() -> None:
    rows = [row_of(BRIDGE), replace(row_of(AUTOMODEL), number=2)]
    with pytest.raises(SpecError, match="0 of 2 rows"):
        calibrate(rows, origin="here", data_sha256="")
