"""A process that is started as a rank of a training job is, and says when each phase was over.

    python -P -m profilers.restart_rank DEVICE RANK RANKS RENDEZVOUS LIMIT_S

It writes one line, a JSON list: when each of `PHASES` (profilers/restart.py) was over, in seconds
of the host's monotonic clock, which all processes of a host share. The kernels of the first step
are run twice; what the first run takes beyond the second ends the last phase. A process that takes
longer than its limit is killed by SIGALRM, should nobody be left to end it.
"""

import time

BEGUN_S = time.monotonic()
"""Python runs; the imports below are the next phase's."""

# What is imported from here on is timed.
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # stub
from torch.nn import functional

from profilers.steps.experts import expert_ffn
from profilers.steps.run import run

IMPORTED_S = time.monotonic()
PROGRAM: Final = run
"""Imported as a training program imports its model, optimizer and parallelism; not called."""

EXPERTS, ROWS, HIDDEN, FFN = 4, 256, 256, 512
"""Experts, rows of each, and sizes: small, so that what only a first call does is most of it."""
HEADS = 4


def main(arguments: list[str]) -> int:
    """Start as one rank of a job and write when each phase was over."""
    device_name, rank, ranks, rendezvous, limit_s = arguments
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))
    device = torch.device(device_name)
    torch.set_num_threads(1)
    _use(device)
    over_s = [BEGUN_S, IMPORTED_S, time.monotonic()]
    _join(rendezvous, device=device, rank=int(rank), ranks=int(ranks), limit_s=float(limit_s))
    over_s.append(time.monotonic())
    dist.all_reduce(torch.ones(1, device=device))
    _synchronize(device)
    over_s.append(time.monotonic())
    first_s, second_s = (_seconds_of(lambda: _kernels(device), device) for _ in range(2))
    over_s.append(over_s[-1] + max(0.0, first_s - second_s))
    sys.stdout.write(json.dumps(over_s) + "\n")
    return 0


def _use(device: torch.device) -> None:
    """Create the device's context."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.ones(1, device=device)
    _synchronize(device)


def _join(rendezvous: str, *, device: torch.device, rank: int, ranks: int, limit_s: float) -> None:
    """Connect to the other ranks at `file:PATH:NAME` or `tcp:HOST:PORT:NAME`."""
    kind, _, place = rendezvous.partition(":")
    place, _, name = place.rpartition(":")
    timeout = timedelta(seconds=limit_s)
    store: FileStore | TCPStore
    if kind == "file":
        store = FileStore(str(Path(place).with_name(name)), ranks)
    else:
        host, _, port = place.rpartition(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(name, store),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )


def _kernels(device: torch.device) -> None:
    """Run what a step consists of, once: attention, experts, their backward and an update."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def operand(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    counts = (ROWS,) * EXPERTS
    x, gate_up = operand(sum(counts), HIDDEN), operand(EXPERTS, 2 * FFN, HIDDEN)
    down, square = operand(EXPERTS, HIDDEN, FFN), operand(HIDDEN, HIDDEN)
    heads = (x @ square).view(1, sum(counts), HEADS, -1).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    rows = attended.transpose(1, 2).reshape(x.shape)
    out = expert_ffn(functional.rms_norm(rows, (HIDDEN,)), counts, gate_up, down)
    torch.autograd.backward(out, torch.ones_like(out))
    torch.optim.AdamW([gate_up, down, square], fused=True).step()


def _seconds_of(run: Callable[[], None], device: torch.device) -> float:
    begin_s = time.monotonic()
    run()
    _synchronize(device)
    return time.monotonic() - begin_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # Peers may still be in their last phase; nobody waits for the group to be closed.
    os._exit(code)
