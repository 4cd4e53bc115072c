"""All micro-batches of one step through this rank's model chunks, forward and backward.

One pipeline rank accumulates over micro-batches in a plain loop; more run PyTorch's 1F1B,
interleaved where a rank holds several chunks. With fewer micro-batches than ranks 1F1B is GPipe.

Letters: B sequences of a micro-batch, N micro-batches, S' tokens of a sequence on this tensor rank.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import Schedule1F1B

from profilers.steps.config import StepConfig
from profilers.steps.instruments import Instruments
from profilers.steps.layout import ParallelState
from profilers.steps.model import StageModel, token_loss
from profilers.steps.weights import compute_type, trained_type

Pass = Callable[[Tensor, Tensor], Tensor]
"""(tokens, targets), each [N * B, S'] -> this rank's share of the loss; leaves gradients."""


def build_pass(
    config: StepConfig,
    layout: ParallelState,
    modules: Sequence[StageModel],
    instruments: Instruments,
) -> Pass:
    """Choose how this rank's chunks (in execution order) run the micro-batches."""
    loss = partial(token_loss, global_tokens=config.global_batch_size * config.sequence_length)
    if layout.degrees.pipeline == 1:
        sizes = _microbatch_sizes(config, layout)
        return partial(_accumulated, modules[0], config, instruments, loss, sizes)
    return _pipelined(config, layout, modules, instruments, loss)


def _microbatch_sizes(config: StepConfig, layout: ParallelState) -> list[int]:
    """List the sequences of this rank's micro-batches, with empty ones where others have more.

    Sharded weights are gathered, and experts called, as often on every rank.
    """
    counts = config.microbatches_by_rank
    count = counts[layout.data_rank]
    return [config.micro_batch_size] * count + [0] * (max(counts) - count)


def _accumulated(
    module: StageModel,
    config: StepConfig,
    instruments: Instruments,
    loss: Callable[[Tensor, Tensor], Tensor],
    sizes: Sequence[int],
    tokens: Tensor,
    targets: Tensor,
) -> Tensor:
    assert isinstance(module, FSDPModule)
    total = torch.zeros((), dtype=trained_type(config), device=tokens.device)
    batches = zip(
        torch.split_with_sizes(tokens, list(sizes)),
        torch.split_with_sizes(targets, list(sizes)),
        strict=True,
    )
    for microbatch, (inputs, wanted) in enumerate(batches):
        is_last = microbatch == len(sizes) - 1
        if config.parallelism.zero_stage != 3:
            module.set_requires_gradient_sync(is_last)
            module.set_reshard_after_backward(is_last)
        module.set_is_last_backward(is_last)
        with instruments.recording():
            share = loss(module(inputs), wanted)
        torch.autograd.backward(share)
        total += share.detach()
    return total


def _pipelined(
    config: StepConfig,
    layout: ParallelState,
    modules: Sequence[StageModel],
    instruments: Instruments,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Pass:
    degrees = layout.degrees
    total = degrees.pipeline * degrees.virtual_pipeline
    stages = [
        _stage(config, layout, module, index=chunk * degrees.pipeline + layout.pipeline_rank)
        for chunk, module in enumerate(modules)
    ]
    batches = config.microbatches_by_rank[layout.data_rank]
    schedule: ScheduleInterleaved1F1B | Schedule1F1B | ScheduleGPipe
    if len(stages) > 1:
        schedule = ScheduleInterleaved1F1B(stages, batches, loss_fn=loss, scale_grads=False)  # type: ignore[arg-type]  # invariant list
    elif batches < total:
        schedule = ScheduleGPipe(stages[0], batches, loss_fn=loss, scale_grads=False)
    else:
        schedule = Schedule1F1B(stages[0], batches, loss_fn=loss, scale_grads=False)

    def run(tokens: Tensor, targets: Tensor) -> Tensor:
        inputs = (tokens,) if stages[0].is_first else ()
        losses: list[Tensor] = []
        with instruments.recording():
            if stages[-1].is_last:
                schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
            else:
                schedule.step(*inputs, return_outputs=False)
        if not losses:
            return torch.zeros((), device=tokens.device)
        return torch.stack([share.detach() for share in losses]).sum()

    return run


def _stage(
    config: StepConfig, layout: ParallelState, module: StageModel, *, index: int
) -> PipelineStage:
    """Give the shapes on both sides, so that nothing is run to find them out."""
    dtype = compute_type(config)
    total = layout.degrees.pipeline * layout.degrees.virtual_pipeline
    shard = (config.micro_batch_size, config.sequence_length // layout.degrees.tensor)
    hidden = (*shard, config.model.hidden_size)
    is_first, is_last = index == 0, index == total - 1
    tokens = torch.empty(shard, dtype=torch.int64, device="meta")
    # Stages send back the gradients of tensors that require one here.
    passed = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
    logits = torch.empty((*shard, config.model.vocab_size), dtype=dtype, device="meta")
    return PipelineStage(
        module,
        index,
        total,
        layout.device,
        input_args=tokens if is_first else passed,
        output_args=logits.requires_grad_() if is_last else passed,
        group=layout.pipeline_group,
    )
