"""Memory constants of a training software, which no tensor shape gives.

The defaults are those of Megatron-Core with the transformer engine. A calibration may move those in
`FITTED`, for all runs of one software together, never for one run.

Not covered: what differs between two runs of the same software.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.prices.train.constants import Software

GIB: Final = float(2**30)

WORKSPACE_BYTES: Final = 32.0 * 2**20
"""One cuBLAS workspace on Hopper and later, of PyTorch and of the transformer engine each
(transformer_engine/pytorch/module/base.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryConstants:
    """Residuals of one training software, or one set per column."""

    master_bytes: Numbers = 4.0
    """Bytes of a parameter's master copy, which the optimizer updates."""
    moments_bytes: Numbers = 8.0
    """Bytes of Adam's two moments of a parameter."""
    gathers_master: Numbers = 0.0
    """1 where ZeRO-3 shards the master alone, and layers gather casts of it: PyTorch's FSDP2; 0
    where 16-bit shards lie beside it (state.py)."""
    logit_bytes: Numbers = 2.0
    """Bytes per logit at the head's backward pass; 2 where the fused loss writes gradients over
    bf16 logits, and 4 more for each fp32 copy of them."""
    split_logit_bytes: Numbers = 0.0
    """Additional bytes per logit where the vocabulary is split over tensor ranks."""
    activation_ratio: Numbers = 1.0
    """Saved activations over those that activations.py counts."""
    weight_gradient_ratio: Numbers = 1.0
    """Temporary weight gradients over one per shape of weight."""
    cp_output_copy_ratio: Numbers = 1.0
    """Share of attention's output under context parallelism that is kept twice, also before tokens
    are redistributed."""
    last_gemm_ratio: Numbers = 1.0
    """Share of the output of a dense network's last GEMM that is kept under checkpointing by
    operation; 0 where layers are compiled (activations.py)."""
    keeps_exchanged: Numbers = 1.0
    """1 where checkpointing by operation keeps what all-to-alls return (activations.py)."""
    scored_bytes: Numbers = 0.0
    """Bytes of an element of the routed copies that are kept to multiply them by their scores; 0
    where the experts multiply by them (activations.py)."""
    keeps_activations: Numbers = 0.0
    """1 where an activation's output is kept beside its product with up: layers in eager mode."""
    gathers_inputs: Numbers = 0.0
    """1 for PyTorch's tensor parallelism: gathered inputs are saved for the backward pass
    (activations.py)."""
    flattens_gradients: Numbers = 0.0
    """1 where the optimizer's step copies the rank's gradients twice, under ZeRO 1 and 2
    (state.py)."""
    has_gather_buffer: Numbers = 0.0
    """1 where a layer is all-gathered into a separate buffer before its parameters are copied out,
    and its gradients exist beside the fp32 accumulators: PyTorch's FSDP2
    (torch/distributed/fsdp/_fully_shard: foreach_all_gather, to_accumulated_grad_if_needed)."""
    receives_ahead: Numbers = 0.0
    """1 where every micro-batch of a step has buffers of its own for what a stage receives, and
    keeps them from step to step: torch.distributed.pipelining (PipelineStage, args_recv_info and
    grad_recv_info)."""
    keeps_outputs: Numbers = 0.0
    """1 where a stage keeps the outputs of every micro-batch until the step ends."""
    keeps_input_gradients: Numbers = 0.0
    """1 where a stage keeps the input gradients of every micro-batch until the step ends."""
    keeps_logits: Numbers = 0.0
    """1 where the last stage keeps the logits of every micro-batch until the step ends."""
    live_bytes: Numbers = 2.0 * WORKSPACE_BYTES
    """Bytes in the allocator, whatever the model."""
    unused_ratio: Numbers = 0.03
    """Fragmentation of the allocator, as a share of activations and buffers. Prior; sizes that
    repeat from step to step leave little."""
    recompute_unused_ratio: Numbers = 0.0
    """Additional `unused_ratio` under full recomputation, whose large temporaries leave holes
    around the inputs of layers that stay."""
    context_bytes: Numbers = 2.0 * GIB
    """Bytes outside the allocator: the device's context, loaded kernels, collectives' buffers.
    Prior: half a GiB for context and kernels, the rest for a few communicators; no run states
    it."""
    communicator_bytes: Numbers = 0.0
    """Bytes outside the allocator for every group of more than one rank beyond the first."""
    peer_bytes: Numbers = 0.0
    """Bytes outside the allocator for every rank of the server that an all-to-all of tokens
    exchanges with."""
    copies_weights: Numbers = 0.0
    """1 where the start holds weights twice beside their gradients: the distributed optimizer
    copies what was loaded into its buffers, dense parameters first, then experts
    (megatron/core/distributed/distributed_data_parallel.py, param_and_grad_buffer.py)."""
    graph_ratio: Numbers = 0.1
    """Private pools of partial graphs, as a share of the activations. Prior; Megatron-Bridge's
    guide to CUDA graphs says a few GB, and more than 10 in a pipeline."""


IN_SEGMENTS_RATIO: Final = 0.06
"""Unused without expandable segments: what is free in two segments does not add up to one tensor. A
step of Llama 8B with selective recomputation wastes 5.8 % so and 0.5 % with them; other models and
full recomputation 5 to 20 % (tests/tuner/costs/train/test_segments.py)."""

_EAGER_LOSS: Final = MemoryConstants(
    gathers_master=1.0,
    logit_bytes=14.0,
    split_logit_bytes=4.0,
    cp_output_copy_ratio=0.0,
    has_gather_buffer=1.0,
    unused_ratio=0.02,
)
"""PyTorch's cross entropy of logits cast to fp32: its output, the gradient of that and of its
input, 12 bytes a logit; where the vocabulary is split also a product of them
(torch/distributed/tensor/parallel/loss.py). 2 more for the bf16 logits: until the loss is computed
they exist beside their fp32 copy, and then stay alive or leave a hole that is too small for the
last fp32 tensor, so that the allocator grows (tests/tuner/costs/train/test_memory.py).
Expandable segments leave little unused (torchtitan's run_train.sh)."""

_FUSED_LOSS: Final = replace(_EAGER_LOSS, logit_bytes=4.0, split_logit_bytes=0.0)
"""One kernel for loss and gradient: bf16 logits, bf16 gradients."""

_TRANSFORMERS: Final = replace(
    _EAGER_LOSS,
    logit_bytes=12.0,
    split_logit_bytes=0.0,
    master_bytes=2.0,
    moments_bytes=4.0,
    weight_gradient_ratio=0.0,
    unused_ratio=IN_SEGMENTS_RATIO,
    recompute_unused_ratio=0.065,
    context_bytes=0.5 * GIB,
)
"""Transformers' loss: fp32 log-probabilities, and their gradient twice (eager_activations.py). Full
recomputation: 12.5 %, the middle of what `IN_SEGMENTS_RATIO` says of it."""

_TITAN: Final = replace(_FUSED_LOSS, gathers_inputs=1.0, receives_ahead=1.0, scored_bytes=4.0)
"""torchtitan from 0.2.1 on with a loss that is compiled or cut into chunks."""
_TITAN_EAGER_LOSS: Final = replace(
    _TITAN,
    logit_bytes=_EAGER_LOSS.logit_bytes,
    split_logit_bytes=_EAGER_LOSS.split_logit_bytes,
)
"""torchtitan where [compile] is off, as by default, or leaves "loss" out of its components."""
_TITAN_2025: Final = replace(_TITAN, keeps_input_gradients=1.0, keeps_logits=1.0)
"""torchtitan of June to October 2025 (0.1.0 and 0.2.0): PyTorch keeps gradients of inputs, which
are released since October 2025 (pytorch#164329: `stage_backward` clears `grad`), and logits, until
torchtitan says `return_outputs=False` (torchtitan#1922 of 22 October 2025, after 0.2.0)."""
_TITAN_2024: Final = replace(
    _EAGER_LOSS,
    gathers_inputs=1.0,
    receives_ahead=1.0,
    keeps_outputs=1.0,
    keeps_input_gradients=1.0,
    keeps_logits=1.0,
)
"""torchtitan before: PyTorch keeps outputs of every stage too, until May 2025 (pytorch#153383), and
the loss is not compiled, from 18 December 2024 (torchtitan e8977b0) to 2 April 2025 (#1033)."""

FITTED: Final[Mapping[str, float]] = {
    "live_bytes": 0.25 * GIB,
    "activation_ratio": 0.05,
    "weight_gradient_ratio": 0.25,
}
"""Constants that a calibration may move, and how far they may plausibly be from what is known."""

_EVERY_COMMUNICATOR: Final = MemoryConstants(
    context_bytes=1.0 * GIB,
    communicator_bytes=0.625 * GIB,
    peer_bytes=0.375 * GIB,
    copies_weights=1.0,
)
"""NCCL's buffers by what is launched. A process of 8 H100 holds 1.06 GB beside PyTorch's before its
first all-to-all and 4.34 GB after it, with 32 channels of 10 + 2 MiB to each of 7 peers
(NVIDIA/nccl#1685); a group of two A100 takes 544 MB, one of more 688 MB (NVIDIA/nccl#964).
Megatron's communicators of TP 2, PP 2, DP 2 on eight H100 held 7 GB, 9.5 GB with experts
(verl-project/verl#6408), and of one launch of ms-swift those that its first step makes found no
room (modelscope/ms-swift#9602). Eight H200 under ms-swift were seen with 6.5 GiB beside what
PyTorch had reserved."""

OF_SOFTWARE: Final[Mapping[Software, MemoryConstants]] = {
    # Logits in bf16 and a copy in fp32 that becomes the gradient in place
    # (megatron/core/tensor_parallel/cross_entropy.py).
    Software.MEGATRON_2021: MemoryConstants(logit_bytes=6.0),
    Software.MEGATRON_2025: MemoryConstants(),
    Software.MEGATRON_2026: MemoryConstants(),
    Software.TORCH_FSDP: _EAGER_LOSS,
    Software.TORCH_EAGER: _EAGER_LOSS,
}
"""Memory constants by generation of software."""

_AUTOMODEL: Final = replace(
    _EAGER_LOSS, logit_bytes=6.0, split_logit_bytes=2.0, master_bytes=2.0, moments_bytes=4.0
)
"""bf16 parameters and moments under torch.optim.Adam, loss in bf16 (NeMo AutoModel,
examples/llm_benchmark)."""

OF_FAMILY: Final[Mapping[str, MemoryConstants]] = {
    # bf16 parameters and moments under torch.optim.AdamW. Its allocator is the usual one, without
    # expandable segments; no communicator on one device (tests/benchmarks/lora_trials.py).
    "transformers": _TRANSFORMERS,
    # Parameters that are trained are fp32 (tuner/engines/peft/read.py).
    "transformers-fp32": replace(_TRANSFORMERS, master_bytes=4.0, moments_bytes=8.0),
    # FlashAttention's cross entropy (llmfoundry/models/mpt/modeling_mpt.py, `fused_crossentropy`).
    "llm-foundry": _FUSED_LOSS,
    "deepspeed": replace(_FUSED_LOSS, gathers_master=0.0, flattens_gradients=1.0),
    # Around Transformers' own model and loss, in the allocator that its Trainer leaves as it is.
    "deepspeed-transformers": replace(
        _EAGER_LOSS,
        gathers_master=0.0,
        flattens_gradients=1.0,
        split_logit_bytes=0.0,
        unused_ratio=_TRANSFORMERS.unused_ratio,
        recompute_unused_ratio=_TRANSFORMERS.recompute_unused_ratio,
    ),
    "torchtitan": _TITAN,
    "torchtitan-2025": _TITAN_2025,
    "torchtitan-2024": _TITAN_2024,
    # Runs that say that their layers were compiled.
    "torchtitan-compiled": replace(_TITAN, last_gemm_ratio=0.0),
    "torchtitan-2025-compiled": replace(_TITAN_2025, last_gemm_ratio=0.0),
    "torchtitan-2024-compiled": replace(_TITAN_2024, last_gemm_ratio=0.0),
    # Launches that say what they compile, all of it excepted.
    "torchtitan-loss-compiled": replace(_TITAN, keeps_activations=1.0),
    "torchtitan-layers-compiled": replace(_TITAN_EAGER_LOSS, last_gemm_ratio=0.0),
    "torchtitan-eager": replace(_TITAN_EAGER_LOSS, keeps_activations=1.0),
    # Runs whose launch leaves the allocator as it is.
    "torchtitan-2025-compiled-segments": replace(
        _TITAN_2025, last_gemm_ratio=0.0, unused_ratio=IN_SEGMENTS_RATIO
    ),
    "automodel": _AUTOMODEL,
    "ms-swift": _EVERY_COMMUNICATOR,
    "automodel-linear-loss": replace(_AUTOMODEL, logit_bytes=0.0, split_logit_bytes=0.0),
}
"""Memory constants by family of software, where that says more than its generation."""

BY_GENERATION: Final = frozenset(
    {
        "deepseek-v3",
        "llama3",
        "megascale",
        "megatron-2022",
        "megatron-2023",
        "megatron-deepspeed",
        "megatron-lm",
        "nemo",
        "unstated",
        "vtrain",
    }
)
"""Families whose generation of software says all that is known of their memory."""


def constants_of_family(software: Software, family: str) -> MemoryConstants:
    """Return what is known of one family; an empty name returns the generation's.

    Raises:
        ValueError: the family is in neither table.
    """
    if family in OF_FAMILY:
        return OF_FAMILY[family]
    if family and family not in BY_GENERATION:
        known = ", ".join(sorted({*OF_FAMILY, *BY_GENERATION}))
        raise ValueError(f"no memory constants are known of {family!r}; those known: {known}")
    return OF_SOFTWARE[software]


def memory_constants(
    software: Sequence[Software], families: Sequence[str] | None = None
) -> MemoryConstants:
    """One set per column, known before any run of the user's.

    Raises:
        ValueError: nothing is known of a family.
    """
    names = families if families is not None else [""] * len(software)
    sets = [
        constants_of_family(generation, name)
        for generation, name in zip(software, names, strict=True)
    ]
    return MemoryConstants(
        **{
            field.name: np.array([float(getattr(constants, field.name)) for constants in sets])
            for field in fields(MemoryConstants)
        }
    )
