"""Activation bytes by number of MemFine chunks, measured on the reference step in one process.

    python tests/benchmarks/memfine_activation.py

Fits A + B / c to the measured bytes at c = 1, 2, 4, 8. Exit code 1: one deviates by more than 3 %
from the fit. Then the same for the active memory that the paper publishes (arXiv 2511.21431).
"""

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from profilers.steps.config import (
    LayerKind,
    Parallelism,
    Recompute,
    Stage,
    StepConfig,
    TransformerShape,
)
from profilers.steps.layout import ParallelState
from profilers.steps.run import start
from profilers.steps.training import Training
from tests.benchmarks.memfine import LayerShape, active_bytes, fit_active, stored_bytes

CHUNKS = (1, 2, 4, 8)
LARGEST_ERROR = 0.03
# Wide experts and few words, so that experts and not the head are the peak even in 8 chunks.
MODEL = TransformerShape(
    hidden_size=128,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=64,
    layers=(LayerKind.MOE, LayerKind.MOE),
    num_experts=8,
    top_k=2,
    moe_ffn_size=512,
)
# DeepSeek-V3 with 16 (I) and 8 (II) layers: model, method, chunks, active GB as published.
PUBLISHED = (
    ("I", "no chunks", 1, 22.9),
    ("I", "always 8", 8, 3.7),
    ("I", "chosen", 2, 11.9),
    ("II", "no chunks", 1, 22.9),
    ("II", "always 8", 8, 3.7),
    ("II", "chosen", 2, 11.9),
)
GB = 1e9


def config(recompute: Recompute, chunks: int) -> StepConfig:
    """Two MoE layers on micro-batches of 4 sequences of 512 tokens, bf16."""
    return StepConfig(
        model=MODEL,
        parallelism=Parallelism(),
        stages=(Stage(num_layers=2, recompute=recompute, chunks=chunks),),
        sequence_length=512,
        global_batch_size=4,
        micro_batch_size=4,
        device="cpu",
    )


def measured_bytes(step: StepConfig, layout: ParallelState) -> int:
    """Peak of what one step saves for backward."""
    return Training(step, layout).metered(0).peak_bytes


def largest_error(rows: Sequence[tuple[int, float]]) -> float:
    """Largest relative deviation of a row from the fit."""
    constant, divided = fit_active(*zip(*rows, strict=True))
    return max(
        abs(active_bytes(constant, divided, chunks=count) / seen - 1.0) for count, seen in rows
    )


def fitted_lines(rows: Sequence[tuple[int, float]]) -> Iterator[str]:
    """One line a chunk count: measured, fitted, error."""
    constant, divided = fit_active(*zip(*rows, strict=True))
    yield f"A = {constant / 1e6:.3f} MB, B = {divided / 1e6:.3f} MB"
    yield f"{'chunks':>8} {'measured MB':>12} {'A + B/c MB':>12} {'error':>8}"
    for count, seen in rows:
        fitted = active_bytes(constant, divided, chunks=count)
        yield f"{count:>8} {seen / 1e6:>12.3f} {fitted / 1e6:>12.3f} {fitted / seen - 1:>+8.2%}"


def published_lines() -> Iterator[str]:
    """The paper's rows from the two that fix A and B, and its own equation's A beside."""
    known = [(count, active) for name, _, count, active in PUBLISHED if name == "I" and count != 2]
    constant, divided = fit_active(*zip(*known, strict=True))
    yield f"arXiv 2511.21431: A = {constant:.3f} GB, B = {divided:.3f} GB from I at 1 and 8 chunks"
    for head_dim in (128, 192):
        shape = LayerShape(
            hidden=7168,
            query_heads=128,
            kv_heads=128,
            head_dim=head_dim,
            experts=256,
            expert_ffn=2048,
            sequence_tokens=4096,
        )
        own = stored_bytes(shape, received=0.0, in_flight=1) / GB
        yield f"  its Eq. 2 gives A = {own:.2f} GB with h_d = {head_dim}"
    yield f"{'model':>6} {'method':>10} {'chunks':>7} {'published GB':>13} {'A + B/c GB':>11}"
    for name, method, count, active in PUBLISHED:
        predicted = active_bytes(constant, divided, chunks=count)
        yield f"{name:>6} {method:>10} {count:>7} {active:>13.1f} {predicted:>11.2f}"


def main() -> int:
    """Measure, fit, print; 1 when the fit is off."""
    torch.set_num_threads(1)
    layout = start(config(Recompute.FULL, 1), device=torch.device("cpu"))
    worst = 0.0
    lines: list[str] = []
    for recompute in (Recompute.SELECTIVE, Recompute.FULL):
        rows = [
            (count, float(measured_bytes(config(recompute, count), layout))) for count in CHUNKS
        ]
        worst = max(worst, largest_error(rows))
        lines += [f"recompute {recompute.value}", *fitted_lines(rows), ""]
    dist.destroy_process_group()
    lines += [f"largest fit error {worst:.2%}, allowed {LARGEST_ERROR:.0%}", "", *published_lines()]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(worst > LARGEST_ERROR)


if __name__ == "__main__":
    sys.exit(main())
