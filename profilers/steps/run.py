"""Run a step configuration on the ranks of this job and report times, losses and memory.

Warm-up steps, one metered step, then the timed steps. A step's time is that of the slowest rank,
from a barrier to the end of its optimizer update; text and forced routes are laid out before it.
Where memory is limited on a processor, the metered step comes first, under the limit, and warm-up
after it (profilers/steps/limit.py).
"""

import gc
import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from profilers.errors import RankError
from profilers.heap import keep_heap
from profilers.local_ranks import PARENT, RENDEZVOUS, leave_with
from profilers.machine import processor_name
from profilers.steps.config import RankMemory, StepConfig, StepReport
from profilers.steps.layout import ParallelState, join
from profilers.steps.limit import HostLimit, limit_device
from profilers.steps.memory import ActivationMeter, allocator_peak
from profilers.steps.training import Training

GROUP_TIMEOUT = timedelta(seconds=60)
"""A collective that takes longer has lost a peer; the job then ends instead of hanging."""


OnStep = Callable[[float], None]
"""Callback that gets the seconds of each timed step on this rank, as soon as it is done."""


class StepResult(NamedTuple):
    """Measurements of one rank after a step."""

    second: Tensor
    """Wall time of the step on this rank in seconds, fp64."""
    loss: Tensor
    """This rank's share."""
    load_LE: Tensor
    chunks_L: Tensor
    far_bytes: Tensor


def run(
    config: StepConfig, layout: ParallelState, *, on_step: OnStep = lambda _seconds: None
) -> StepReport:
    """Train for the configured steps; every rank returns the same report."""
    training, memory, first = _prepared(config, layout)
    results = []
    gc.collect()
    gc.disable()
    for step in range(first, first + config.steps):
        results.append(timed_step(training, layout, step))
        on_step(results[-1].second.item())
    gc.enable()
    losses = torch.stack([result.loss for result in results]).double()
    slowest_s = torch.stack([result.second for result in results])
    dist.all_reduce(losses)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    return StepReport(
        device=device_name(layout.device),
        libraries={"python": platform.python_version(), "torch": torch.__version__},
        step_s=tuple(slowest_s.tolist()),
        losses=tuple(losses.tolist()),
        tokens_per_step=config.global_batch_size * config.sequence_length,
        memory=memory,
        loads=tuple(tuple(tuple(row) for row in result.load_LE.tolist()) for result in results),
        chunks_used=tuple(tuple(result.chunks_L.tolist()) for result in results),
        inter_node_bytes=tuple(int(result.far_bytes) for result in results),
    )


def timed_step(training: Training, layout: ParallelState, step: int) -> StepResult:
    """Run an ordinary step together with all ranks."""
    training.prepare(step)
    dist.barrier()
    _synchronize(layout.device)
    begin = time.perf_counter()
    loss = training.compute_gradients()
    training.update()
    _synchronize(layout.device)
    second = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=layout.device)
    load_LE, chunks_L, far_bytes = training.settle()
    return StepResult(second, loss, load_LE, chunks_L, far_bytes)


def start(config: StepConfig, *, device: torch.device) -> ParallelState:
    """Join the ranks that profilers/local_ranks.py or torchrun started, or be the only one.

    Raises:
        RankError: the job has another number of ranks than the configuration, or the dispatcher
            cannot work on its nodes.
    """
    degrees = config.parallelism
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    rendezvous, parent = (os.environ.get(name, "") for name in (RENDEZVOUS, PARENT))
    if rendezvous and parent.isdecimal():
        leave_with(int(parent), folder=Path(rendezvous).parent)
        _meet(Path(rendezvous), backend=backend, bound=bound)
    elif dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT, device_id=bound)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # not in the stub
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    if dist.get_world_size() != degrees.world:
        raise RankError(
            f"{dist.get_world_size()} ranks were started, the configuration needs {degrees.world}"
            f" (tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}):"
            f" use python -P -m profilers.local_ranks --ranks {degrees.world} profilers.steps ..."
        )
    return join(degrees, device=device, timeout=GROUP_TIMEOUT)


def _meet(file: Path, *, backend: str, bound: torch.device | None) -> None:
    """Join the other ranks of this host through a file."""
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(file), world)  # type: ignore[attr-defined]  # not in the stub
    store.set_timeout(GROUP_TIMEOUT)
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=GROUP_TIMEOUT,
        device_id=bound,
    )


def refusal(config: StepConfig) -> str | None:
    """Say why the step cannot run although every field is legal by itself; None when it can."""
    model, degrees = config.model, config.parallelism
    if model.tie_embeddings and degrees.pipeline > 1:
        return "tie_embeddings needs pipeline 1: both ends share one table"
    for name in ("dense_ffn_size", "shared_ffn_size"):
        width = getattr(model, name)
        if width % degrees.tensor:
            return f"{name} {width} is not divisible by tensor {degrees.tensor}"
    return None


def device_name(device: torch.device) -> str:
    """Name the accelerator, or the processor when there is none, as a profile does."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def _prepared(
    config: StepConfig, layout: ParallelState
) -> tuple[Training, tuple[RankMemory, ...], int]:
    """Build the model, warm it up, meter a step: with the memory of ranks, and the next step."""
    limit_bytes, device = config.memory_limit_bytes, layout.device
    host = HostLimit(limit_bytes) if limit_bytes and device.type == "cpu" else None
    if limit_bytes and host is None:
        limit_device(limit_bytes, device=device)
    training = Training(config, layout)
    # Metered after the first update, so that gradients and moments exist as in any later step.
    if host is not None:
        memory = _limited(training, layout, host)
        keep_heap()
        first = 1 + config.warmup_steps
        for step in range(1, first):
            timed_step(training, layout, step)
        return training, memory, first
    for step in range(config.warmup_steps):
        timed_step(training, layout, step)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    meter = training.metered(config.warmup_steps)
    memory = _memory(training, layout, meter, allocator_peak(device))
    return training, memory, config.warmup_steps + 1


def _limited(training: Training, layout: ParallelState, host: HostLimit) -> tuple[RankMemory, ...]:
    """Run the first step, and meter it again under the limit."""
    timed_step(training, layout, 0)
    host.exempt_code()
    with host.enforced():
        meter = training.metered(0)
    return _memory(training, layout, meter, host.peak_bytes())


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(
    training: Training, layout: ParallelState, meter: ActivationMeter, peak: int | None
) -> tuple[RankMemory, ...]:
    local_bytes = (
        training.parameter_bytes(),
        meter.peak_gradient_bytes,
        training.optimizer_bytes(),
        meter.peak_bytes,
        -1 if peak is None else peak,
    )
    world = dist.get_world_size()
    table = torch.zeros(world, len(local_bytes), dtype=torch.int64, device=layout.device)
    table[layout.rank] = torch.tensor(local_bytes, device=layout.device)
    dist.all_reduce(table)
    return tuple(
        RankMemory(
            rank=rank,
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations,
            allocator_peak=None if reserved < 0 else reserved,
        )
        for rank, (parameters, gradients, optimizer, activations, reserved) in enumerate(
            table.tolist()
        )
    )
