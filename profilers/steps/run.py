"""Run a step configuration on the ranks of this job and report what was seen.

Warm-up steps, one metered step, then the timed steps. A step's time is that of the slowest rank,
from a barrier to the end of its optimizer update; text and forced routes are laid out before it.
"""

import gc
import platform
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from profilers.errors import RankError
from profilers.machine import processor_name
from profilers.steps.config import RankMemory, StepConfig, StepReport
from profilers.steps.layout import Layout, join
from profilers.steps.memory import ActivationMeter, allocator_peak
from profilers.steps.training import Training

GROUP_TIMEOUT = timedelta(seconds=60)
"""A collective that takes longer has lost a peer; the job then ends instead of hanging."""


def run(config: StepConfig, layout: Layout) -> StepReport:
    """Train for the configured steps; every rank returns the same report."""
    training = Training(config, layout)
    for step in range(config.warmup_steps):
        _timed_step(training, layout, step)
    if layout.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(layout.device)
    # Metered after the first update, so that gradients and moments exist as in any later step.
    meter = training.metered(config.warmup_steps)
    memory = _memory(training, layout, meter)
    seconds: list[Tensor] = []
    losses: list[Tensor] = []
    loads: list[Tensor] = []
    chunks: list[Tensor] = []
    crossed: list[Tensor] = []
    gc.collect()
    gc.disable()
    for step in range(config.warmup_steps + 1, config.warmup_steps + 1 + config.steps):
        second, loss, load_LE, chunks_L, far_bytes = _timed_step(training, layout, step)
        seconds.append(second)
        losses.append(loss)
        loads.append(load_LE)
        chunks.append(chunks_L)
        crossed.append(far_bytes)
    gc.enable()
    slowest_s = torch.stack(seconds)
    dist.all_reduce(slowest_s, op=dist.ReduceOp.MAX)
    total_losses = torch.stack(losses).double()
    dist.all_reduce(total_losses)
    return StepReport(
        device=device_name(layout.device),
        libraries={"python": platform.python_version(), "torch": torch.__version__},
        step_s=tuple(slowest_s.tolist()),
        losses=tuple(total_losses.tolist()),
        tokens_per_step=config.global_batch_size * config.sequence_length,
        memory=memory,
        loads=tuple(tuple(tuple(row) for row in load.tolist()) for load in loads),
        chunks_used=tuple(tuple(used.tolist()) for used in chunks),
        inter_node_bytes=tuple(int(far_bytes) for far_bytes in crossed),
    )


def start(config: StepConfig, *, device: torch.device) -> Layout:
    """Join the job that torchrun started, or make one of this single process.

    Raises:
        RankError: the job has another number of ranks than the configuration, or the dispatcher
            cannot work on its nodes.
    """
    degrees = config.parallelism
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT, device_id=bound)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # not in the stub
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=GROUP_TIMEOUT)
    if dist.get_world_size() != degrees.world:
        raise RankError(
            f"{dist.get_world_size()} ranks were started, the configuration needs {degrees.world}"
            f" (tensor {degrees.tensor} x pipeline {degrees.pipeline} x data {degrees.data}):"
            f" use torchrun --nproc-per-node {degrees.world}"
        )
    return join(degrees, device=device, timeout=GROUP_TIMEOUT)


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


def _timed_step(
    training: Training, layout: Layout, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    training.prepare(step)
    dist.barrier()
    _synchronize(layout.device)
    begin = time.perf_counter()
    loss = training.compute_gradients()
    training.update()
    _synchronize(layout.device)
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64, device=layout.device)
    return seconds, loss, *training.settle()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(training: Training, layout: Layout, meter: ActivationMeter) -> tuple[RankMemory, ...]:
    peak = allocator_peak(layout.device)
    own = (
        training.parameter_bytes(),
        meter.peak_gradient_bytes,
        training.optimizer_bytes(),
        meter.peak_bytes,
        -1 if peak is None else peak,
    )
    world = dist.get_world_size()
    table = torch.zeros(world, len(own), dtype=torch.int64, device=layout.device)
    table[layout.rank] = torch.tensor(own, device=layout.device)
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
