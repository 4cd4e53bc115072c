"""Time the expert networks of one rank at exactly the rows that routing gave them.

The layer of a placement takes as long as its slowest rank. One device stands for all ranks in turn:
what it takes for the experts and rows of a rank is what that rank would take.

Letters: N loads to time, S experts of a rank.
"""

from collections.abc import Callable, Sequence

import torch

from profilers.clock import Clock
from profilers.devices import (
    DTYPES,
    clock_of,
    free_bytes,
    is_out_of_memory,
    pick_device,
)
from profilers.errors import RankError
from profilers.kernels.autograd import random
from profilers.steps.experts import expert_ffn
from profilers.steps.functional import swiglu
from profilers.timing import measure

CPU_FLOP_PER_S = 2e10
"""Rate, in flop/s, of fp32 GEMMs on one thread of a server's processor."""
LEAST_RUNS = 8
"""Runs of every load, warm-ups and repeats together."""


def time_expert_loads(
    rows_NS: Sequence[Sequence[int]],
    *,
    hidden: int,
    ffn: int,
    budget_s: float,
    device_kind: str = "auto",
    is_gated: bool = True,
    dtype: str = "bf16",
    clock: Clock | None = None,
) -> tuple[str, tuple[tuple[float, ...], ...]]:
    """Run the expert networks of every load and return the device's name and seconds of repeats.

    Args:
        rows_NS: rows of each expert of a rank, a load a rank; zeros are fine.
        hidden: width that experts read.
        ffn: width of an expert.
        budget_s: for all loads together, warm-up included as far as five repeats allow.
        device_kind: auto, cpu or cuda.
        is_gated: SwiGLU's three matrices, or two and a squared ReLU.
        dtype: of weights and activations; a processor takes fp32 instead of bf16.
        clock: None: the device's own.

    Raises:
        RankError: no room for the weights, or more work than a processor does in the time.
    """
    device = pick_device(device_kind, local_rank=0)
    up_matrices = 2 if is_gated else 1
    kind = DTYPES["fp32" if device.type == "cpu" else dtype]
    most_rows = max(sum(rows) for rows in rows_NS)
    experts = max(len(rows) for rows in rows_NS)
    weight_bytes = (up_matrices + 1) * experts * hidden * ffn * kind.itemsize
    live_bytes = weight_bytes + 8 * most_rows * (hidden + ffn) * kind.itemsize
    room = free_bytes(device, local_world=1)
    if live_bytes > room:
        raise RankError(
            f"{experts} experts and {most_rows} rows need about {live_bytes:.3g} bytes,"
            f" {room:.3g} are free on {device}"
        )
    if device.type == "cpu":
        all_rows = sum(sum(rows) for rows in rows_NS)
        needed_s = LEAST_RUNS * 2.0 * (up_matrices + 1) * all_rows * hidden * ffn / CPU_FLOP_PER_S
        if needed_s > 2.0 * budget_s:
            raise RankError(
                f"{all_rows} rows through experts of {hidden} x {ffn} take this processor about"
                f" {needed_s:.0f} s, {budget_s:.0f} are planned; measure with an accelerator"
            )
    try:
        return _name(device), _timed(
            rows_NS,
            rows=random(most_rows, hidden, dtype=kind, device=device, grad=False),
            gate_up=random(
                experts, up_matrices * ffn, hidden, dtype=kind, device=device, grad=False
            ),
            down=random(experts, hidden, ffn, dtype=kind, device=device, grad=False),
            activation=swiglu if is_gated else _squared_relu,
            clock=clock or clock_of(device),
            budget_s=budget_s,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RankError(f"{device} ran out of memory with {most_rows} rows") from error


def _timed(
    rows_NS: Sequence[Sequence[int]],
    *,
    rows: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    clock: Clock,
    budget_s: float,
) -> tuple[tuple[float, ...], ...]:
    share_s = budget_s / len(rows_NS)
    times = []
    for counts in rows_NS:
        num_experts = len(counts)
        inputs = rows[: sum(counts)]

        def run(
            counts: Sequence[int] = counts,
            inputs: torch.Tensor = inputs,
            num_experts: int = num_experts,
        ) -> object:
            weights = gate_up[:num_experts], down[:num_experts]
            return expert_ffn(inputs, counts, *weights, activation=activation)

        with torch.no_grad():
            times.append(measure(run, clock=clock, budget_s=share_s))
    return tuple(times)


def _squared_relu(up: torch.Tensor) -> torch.Tensor:
    return up.relu().square()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
