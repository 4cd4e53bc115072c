"""Efficiency constants of the analytic model: what decides a step's time and no datasheet states.

Each is one physical residual: the share of a peak that a kernel reaches, the host's cost per
launch, the exposed share of a collective. A set belongs to a device generation, a precision and a
generation of training software, never to one run. `uncalibrated` gives generic values;
`tuner/calibrate` replaces some by fitted values inside the bounds of `FITTED`.

Origins of the defaults: [P] public measurements of the kernel or link named; [M] Megatron-LM's and
PyTorch's source, counted by hand; [T] typical of published training runs, i.e. a prior that a
calibration should replace. Where a value is [T], its spread in `FITTED` is wide.

Not covered: what differs between two runs of the same software on the same device.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Final, NamedTuple

from tuner.config.columns import Numbers
from tuner.devices.datasheet import Generation
from tuner.units import parse_whole


class GemmPrecision(StrEnum):
    """Number format that the linear layers compute in."""

    BF16 = "bf16"
    """bf16 or fp16."""
    FP8 = "fp8"
    """One scale per tensor."""
    MXFP8 = "mxfp8"
    """One scale per 32 elements."""
    NVFP4 = "nvfp4"
    FP32 = "fp32"
    """GEMMs on vector units: PyTorch allows no TF32 for GEMMs unless a program asks for it
    (torch.backends.cuda.matmul.allow_tf32), and Megatron-LM does not."""

    @property
    def is_narrow(self) -> bool:
        """Return whether it is narrower than bf16."""
        return self not in (GemmPrecision.BF16, GemmPrecision.FP32)


class Software(StrEnum):
    """Generations of training software with the same host and kernel behaviour."""

    MEGATRON_2021 = "megatron-2021"
    """Megatron-LM and Megatron-DeepSpeed of 2021 and 2022: own fused kernels, no flash attention,
    no transformer engine."""
    MEGATRON_2025 = "megatron-2025"
    """Megatron-Core with the transformer engine, up to NeMo containers 26.02."""
    MEGATRON_2026 = "megatron-2026"
    """Megatron-Core with the transformer engine, from NeMo containers 26.04 on."""
    TORCH_FSDP = "torch-fsdp"
    """Plain PyTorch modules under FSDP: llm-foundry, torchtitan, DeepSpeed ZeRO-3."""
    TORCH_EAGER = "torch-eager"
    """Plain PyTorch modules under FSDP that are not compiled: torchtitan by default."""
    TRANSFORMERS = "transformers"
    """Transformers' modules in eager mode, one kernel an operation (eager_blocks.py)."""


FIRST_OF_2026: Final = (26, 4)
"""NeMo containers from here on behave as `Software.MEGATRON_2026`."""


def version_of(release: str) -> tuple[int, ...]:
    """Return a release's numbers, to be compared."""
    numbers = map(parse_whole, release.split("."))
    return tuple(number for number in numbers if number is not None)


def software_of_container(release: str) -> Software:
    """Return the generation of a NeMo container."""
    is_new = version_of(release) >= FIRST_OF_2026
    return Software.MEGATRON_2026 if is_new else Software.MEGATRON_2025


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Constants:
    """Residuals of one device, precision and software, or one set per column."""

    matmul_ratio: Numbers = 1.0
    """Share of their rate alone that GEMMs of the linear layers sustain in a step."""
    head_ratio: Numbers = 1.0
    """Share of its rate alone that the head's GEMM sustains in a step, which stays in bf16."""
    grouped_ratio: Numbers = 0.90
    """Share of `matmul_ratio` that grouped GEMMs reach. [T]"""
    extra_depth: Numbers = 1.0
    """Time of the prologue and epilogue of a tile in a step over that of a GEMM alone. [T]"""
    attention_ratio: Numbers = 0.40
    """Share of the bf16 peak that causal flash attention reaches in the forward pass."""
    attention_backward_ratio: Numbers = 0.80
    """Share of `attention_ratio` that the backward pass reaches. [P] FlashAttention-2, fig. 4 to
    6."""
    extra_keys: Numbers = 200.0
    """Keys more per query that the prologue and epilogue of a tile of queries cost. [P] H100,
    causal, width 128, 1,024 to 16,384 tokens, figure 5 of FlashAttention-3 (arXiv:2407.08608): 230
    of its kernel, 130 to 170 of cuDNN's and of FlashAttention-2's."""
    softmax_width: Numbers = 48.0
    """Head width at which the GEMMs take as long as the exponentials; the two do not overlap.
    [P] FlashAttention-2 and 3 at widths 64 and 128: 16 on A100, 64 on H100."""
    sink_ratio: Numbers = 0.4
    """Share of `attention_ratio` that attention with sinks reaches. [T]"""
    memory_factor: Numbers = 1.2
    """Time of memory-bound kernels over their bytes at the datasheet's bandwidth. [T]"""
    score_factor: Numbers = 1.2
    """Time of kernels over attention scores, where flash attention is missing, over their bytes at
    the datasheet's bandwidth. [T]"""
    batch_s: Numbers = 0.3e-3
    """Seconds per micro-batch on the stage with the loss: fetching data, building masks, reducing
    and reading the loss. [T]"""
    loss_bytes: Numbers = 10.0
    """Memory traffic of the cross entropy per logit and pass: bf16 logits written to fp32, maximum,
    exponential and sum, gradient in place. [M] Megatron-Core's fused cross entropy."""
    moe_memory_factor: Numbers = 2.5
    """Time of permutation and activation of routed tokens over their bytes at the datasheet's
    bandwidth. [T]"""
    fused_moe_factor: Numbers = 1.1
    """`moe_memory_factor` with the fused grouped network; part of the traffic is gone. [T]"""
    launch_s: Numbers = 8e-6
    """Seconds that the host takes to launch one kernel."""
    dense_launches: Numbers = 34.0
    """Kernels of one dense layer's forward pass. [M]"""
    moe_launches: Numbers = 70.0
    """Kernels of one MoE layer's forward pass, without those per expert. [T]"""
    expert_launches: Numbers = 9.0
    """Kernels of a local expert on top, where GEMMs are narrower than bf16 or not grouped. [T]"""
    single_step_launches: Numbers = 8.0
    """Additional launches where attention's softmax runs step by step. [M]"""
    backward_launches: Numbers = 2.2
    """Launches of a backward pass over those of its forward pass. [M]"""
    partial_graph_ratio: Numbers = 0.5
    """Launches that partial CUDA graphs leave. [T]"""
    full_graph_ratio: Numbers = 0.01
    """Launches that a graph of the whole step leaves. [T]"""
    scale_up_ratio: Numbers = 0.75
    """Share of the scale-up bandwidth that a ring reaches. [P] NCCL tests, 8 A100: 227 of 300."""
    scale_out_ratio: Numbers = 0.85
    """Share of the NICs' bandwidth that a ring reaches. [P] NCCL tests between nodes"""
    all_to_all_ratio: Numbers = 0.89
    """Share of a ring's bandwidth that NCCL's all-to-all reaches inside a domain. [P] 8 B200, see
    `_COLLECTIVE`: 0.60 against 0.67 of the link."""
    merged_all_to_all_ratio: Numbers = 1.0
    """Share of a ring's bandwidth that DeepEP and HybridEP reach inside a domain. [T]"""
    far_all_to_all_ratio: Numbers = 0.6
    """Share of a ring's bandwidth that a plain all-to-all reaches between domains: many small
    messages. [T] DeepEP and HybridEP reach all of it. [P] DeepEP's README: 43 to 58 of 50 GB/s."""
    collective_s: Numbers = 15e-6
    """Fixed seconds of one collective. [P] NCCL's small messages"""
    hop_s: Numbers = 3e-6
    """Additional seconds per further rank inside a domain. [P] NCCL's small messages"""
    far_hop_s: Numbers = 20e-6
    """Additional seconds per doubling of the domains. [P] NCCL's small messages"""
    tensor_exposed_ratio: Numbers = 1.0
    """Exposed share of tensor-parallel collectives without overlap."""
    tensor_overlapped_ratio: Numbers = 0.5
    """Exposed share of tensor-parallel collectives with `overlap_tensor`. [T]"""
    context_exposed_ratio: Numbers = 0.3
    """Exposed share of the smaller of ring transfer and attention. [T]"""
    expert_overlapped_ratio: Numbers = 0.5
    """Exposed share of dispatch and combine with `a2a_overlap`; 1 without. [T]"""
    gradient_exposed_ratio: Numbers = 0.6
    """Exposed share of gradient reduction with `overlap_gradients`; 1 without. [T]"""
    parameter_exposed_ratio: Numbers = 0.4
    """Exposed share of parameter all-gather with `overlap_parameters`; 1 without. [T]"""
    fsdp_exposed_ratio: Numbers = 0.4
    """Exposed share of FSDP's all-gathers and reduce-scatters, by interference. [T]"""
    boundary_exposed_ratio: Numbers = 1.0
    """Exposed share of sending activations between stages."""
    optimizer_bytes: Numbers = 45.0
    """Bytes of memory traffic per local parameter: fp32 moments and weight read and written (24),
    gradient read twice for norm and update, low-precision copy, casts. [M]"""
    step_fixed_s: Numbers = 4e-3
    """Seconds once a step: gradient norm, loss reduction, data, synchronisation. [T]"""
    unhidden_launch_ratio: Numbers = 0.0
    """Share of a layer's launches that its kernels wait for where its dispatch reads counts of
    tokens back to the host. [T]"""
    repeated_experts_ratio: Numbers = 0.5
    """Share of routed experts' kernels that checkpointing by operation repeats: half, as of other
    GEMMs, where what compiled code returns is kept; all in eager mode. [M] torchtitan 0.2.1,
    `_op_sac_save_list`, which has `inductor_compiled_code` and no grouped GEMM."""
    straggler_factor: Numbers = 1.0
    """The slowest device's compute time over the typical one's."""


class Prior(NamedTuple):
    """Default of a constant and the range in which it may be fitted."""

    default: float
    spread: float
    """Standard deviation of its natural logarithm before data."""
    low: float
    high: float


FITTED: Final = {
    "matmul_ratio": Prior(1.0, 0.25, 0.2, 1.5),
    "head_ratio": Prior(1.0, 0.25, 0.2, 1.5),
    "grouped_ratio": Prior(0.90, 0.3, 0.2, 1.2),
    "extra_depth": Prior(1.0, 1.0, 0.06, 24.0),
    "attention_ratio": Prior(0.40, 0.4, 0.05, 0.9),
    "attention_backward_ratio": Prior(0.80, 0.2, 0.4, 1.1),
    "extra_keys": Prior(200.0, 0.5, 1.0, 2000.0),
    "softmax_width": Prior(48.0, 0.5, 2.0, 300.0),
    "sink_ratio": Prior(0.4, 0.5, 0.05, 1.0),
    "memory_factor": Prior(1.2, 0.3, 0.6, 5.0),
    "score_factor": Prior(1.2, 0.3, 0.6, 5.0),
    "batch_s": Prior(0.3e-3, 0.8, 1e-5, 20e-3),
    "loss_bytes": Prior(10.0, 0.3, 4.0, 80.0),
    "moe_memory_factor": Prior(2.5, 0.5, 0.4, 10.0),
    "fused_moe_factor": Prior(1.1, 0.5, 0.2, 5.0),
    "launch_s": Prior(8e-6, 0.7, 1e-6, 60e-6),
    "dense_launches": Prior(34.0, 0.5, 5.0, 200.0),
    "moe_launches": Prior(70.0, 0.5, 10.0, 500.0),
    "expert_launches": Prior(9.0, 0.5, 1.0, 60.0),
    "single_step_launches": Prior(8.0, 0.5, 1.0, 40.0),
    "backward_launches": Prior(2.2, 0.2, 1.0, 4.0),
    "partial_graph_ratio": Prior(0.5, 0.5, 0.05, 1.0),
    "full_graph_ratio": Prior(0.01, 0.5, 0.001, 0.3),
    "scale_up_ratio": Prior(0.75, 0.2, 0.2, 1.0),
    "scale_out_ratio": Prior(0.85, 0.3, 0.1, 1.0),
    "all_to_all_ratio": Prior(0.89, 0.3, 0.1, 1.3),
    "merged_all_to_all_ratio": Prior(1.0, 0.3, 0.1, 1.3),
    "far_all_to_all_ratio": Prior(0.6, 0.3, 0.1, 1.2),
    "collective_s": Prior(15e-6, 0.7, 1e-6, 200e-6),
    "hop_s": Prior(3e-6, 0.7, 0.2e-6, 30e-6),
    "far_hop_s": Prior(20e-6, 0.7, 1e-6, 200e-6),
    "tensor_exposed_ratio": Prior(1.0, 0.2, 0.3, 1.5),
    "tensor_overlapped_ratio": Prior(0.5, 0.4, 0.05, 1.0),
    "context_exposed_ratio": Prior(0.3, 0.7, 0.02, 1.0),
    "expert_overlapped_ratio": Prior(0.5, 0.4, 0.05, 1.0),
    "gradient_exposed_ratio": Prior(0.6, 0.6, 0.02, 1.0),
    "parameter_exposed_ratio": Prior(0.4, 0.6, 0.02, 1.0),
    "fsdp_exposed_ratio": Prior(0.4, 0.7, 0.01, 1.0),
    "boundary_exposed_ratio": Prior(1.0, 0.3, 0.1, 2.0),
    "optimizer_bytes": Prior(45.0, 0.3, 12.0, 200.0),
    "step_fixed_s": Prior(4e-3, 0.7, 0.1e-3, 0.2),
    "unhidden_launch_ratio": Prior(0.0, 0.3, 0.0, 1.0),
    "repeated_experts_ratio": Prior(0.5, 0.3, 0.5, 1.0),
    "straggler_factor": Prior(1.0, 0.05, 1.0, 1.5),
}
"""Name to default, spread of its logarithm, bounds. The default of a device, precision and
software (`uncalibrated`) takes precedence over the one here; spread and bounds hold for all."""

_SUSTAINED: Final = {
    Generation.AMPERE: {GemmPrecision.BF16: 0.932},
    Generation.HOPPER: {
        GemmPrecision.BF16: 0.806,
        GemmPrecision.FP8: 1.048,
        GemmPrecision.MXFP8: 1.048,
    },
    Generation.BLACKWELL: {
        GemmPrecision.BF16: 0.578,
        GemmPrecision.FP8: 1.111,
        GemmPrecision.MXFP8: 0.80,
        GemmPrecision.NVFP4: 1.0,
    },
}
"""Share of its rate alone that a GEMM sustains in a step (rated_gemm.py): a kernel measured alone
runs at the boost clock, a step of seconds under the power limit, which holds clocks lower with
every generation. fp8 of one scale is above 1, since what was measured alone holds more than the
GEMM. [P] B200 in bf16: 0.49 of the peak on average of GEMMs of Llama-3 and DeepSeek layers under
the power limit (MooreThreads/SimuMax, v1.2, configs/system/b200_bf16_ceperm), 0.8 alone; A100 and
H100: FlashAttention-3 (arXiv:2407.08608) and the Megatron-LM README; others [T]."""
_OTHERS: Final = 0.9
"""What other generations sustain, and vector units in fp32. [T]"""
_STEP_DEPTH: Final = 1.65
"""`extra_depth` of a step, whose kernels find caches cold: 256 elements of k at bf16. [T]"""
VECTOR_RATIO: Final = 15.0
"""Ratio of the bf16 peak to that of fp32 on vector units: 312 / 19.5 TFLOP/s on A100, 989 / 67 on
H100. The ends of a tile cost as many more elements of k at bf16."""

_ATTENTION: Final = {
    Generation.AMPERE: 0.45,
    Generation.ADA: 0.50,
    Generation.HOPPER: 0.45,
    Generation.BLACKWELL: 0.42,
    Generation.BLACKWELL_RTX: 0.50,
    Generation.CDNA3: 0.30,
    Generation.CDNA4: 0.30,
    Generation.ASCEND: 0.35,
    Generation.PROCESSOR: 0.50,
}
"""[P] FlashAttention-2 (arXiv:2307.08691) 0.45 to 0.6 on A100, FlashAttention-3 0.45 to 0.65 on
H100 for causal attention of width 128, less in training's mixed shapes; others [T]."""

_SOFTMAX_WIDTH: Final = {
    Generation.AMPERE: 16.0,
    Generation.ADA: 32.0,
    Generation.HOPPER: 64.0,
    Generation.BLACKWELL: 96.0,
    Generation.BLACKWELL_RTX: 32.0,
    Generation.CDNA3: 48.0,
    Generation.CDNA4: 48.0,
    Generation.ASCEND: 48.0,
    Generation.PROCESSOR: 16.0,
}
"""Matrix units double with every generation, units for exponentials do not. [P] A100 and H100:
figures of FlashAttention-2 and 3 at head widths 64 and 128; others [T]."""

_EXTRA_KEYS: Final = {Generation.PROCESSOR: 1.0}
"""Attention of a processor begins no tiles on units of its own. [T]"""

_MEMORY: Final = {
    Generation.AMPERE: 1.2,
    Generation.ADA: 1.2,
    Generation.HOPPER: 1.4,
    Generation.BLACKWELL: 1.5,
    Generation.BLACKWELL_RTX: 1.2,
    Generation.CDNA3: 1.5,
    Generation.CDNA4: 1.5,
    Generation.ASCEND: 1.4,
    Generation.PROCESSOR: 1.2,
}
"""Streams reach 0.85 to 0.92 of the datasheet; fused element-wise kernels less, the more so the
faster the memory, since their inner dimension stays. [T]"""

_COLLECTIVE: Final = {Generation.BLACKWELL: 23e-6}
"""[P] 8 B200 under NCCL: 23 us, and 9 us per further rank, beside 0.67 of the link's bandwidth for
all-gathers; reduce-scatters 26 and 8 (MooreThreads/SimuMax, v1.2,
configs/system/b200_bf16_ceperm)."""
_HOP: Final = {Generation.BLACKWELL: 9e-6}
"""See `_COLLECTIVE`."""

_OLDER_ATTENTION: Final = {Generation.HOPPER: 0.65, Generation.BLACKWELL: 0.65}
"""FlashAttention-2, as plain PyTorch used it, over the kernels made for a generation. [P] H100:
abstract of FlashAttention-3, 1.5 to 2 times faster in the forward pass."""
UNFUSED: Final = 1.4
"""Bytes of plain PyTorch's element-wise kernels over those counted, which are of fused ones. [T]"""

_EAGER: Final = 1.74
"""Bytes of element-wise kernels of layers that are not compiled over those of compiled ones: 80
against 46 bytes per token and element of the hidden state in Llama 3 8B (rotary embedding in fp32
and complex numbers: 25 against 5, activation and product apart: 35 against 21). [M] torchtitan
0.2.2, models/llama3; 2.5 by its runs of December 2024, whose norms were five kernels."""
_TORCH_GROUPED: Final = {Generation.BLACKWELL: 0.73}
"""`grouped_ratio` of torch._grouped_mm, before `residuals.json` scales it by 1.23 for kernels
of Megatron's runs. [P] B200 in bf16, forward and backward pass, 1 to 8 experts, 128,000 rows of
5,120 x 8,192 and 7,168 x 2,048: 33 to 38 % of the peak (torchao 0.14, prototype/moe_training);
other GEMMs reach 44 %."""

_SOFTWARE: Final[dict[Software, dict[str, float]]] = {
    # One kernel per operation from Python under autograd, with gradient hooks and timers, on hosts
    # of 2021: 20 to 25 us per launch. [T] Its cross entropy takes single steps in fp32: cast 6,
    # maximum 4, difference 8, exponential 8, sum 4, quotient 8; back product 8, cast 6; of two
    # passes half each (megatron/mpu/cross_entropy.py). [M]
    Software.MEGATRON_2021: {
        "launch_s": 22e-6,
        "collective_s": 35e-6,
        "hop_s": 5.5e-6,
        "loss_bytes": 26.0,
        # Broadcasts of the batch, masks of s x s, loss averaged over replicas and read back.
        "batch_s": 2e-3,
    },
    Software.MEGATRON_2025: {"launch_s": 14e-6},
    Software.MEGATRON_2026: {"launch_s": 13e-6},
    Software.TORCH_FSDP: {"launch_s": 8e-6},
    # The launches of Transformers' modules, which are Python's and autograd's, too. Grouped GEMMs
    # are one kernel whatever the experts. [M]
    Software.TORCH_EAGER: {
        "launch_s": 30e-6,
        "backward_launches": 1.25,
        "expert_launches": 1.0,
        "unhidden_launch_ratio": 1.0,
        "repeated_experts_ratio": 1.0,
    },
    # Modules in Python, one operation a kernel: 30 us a launch in the forward pass of two tiny
    # models on a host of 2025, 23 us in the backward pass, which launches 1.6 times as many. [T]
    # AdamW's fused kernel on bf16 weights and moments moves 14 bytes a parameter. [M]
    Software.TRANSFORMERS: {
        "launch_s": 30e-6,
        "backward_launches": 1.25,
        "optimizer_bytes": 20.0,
        "step_fixed_s": 1e-3,
    },
}


def uncalibrated(
    generation: Generation, *, precision: GemmPrecision, software: Software
) -> Constants:
    """Generic values for a device generation, precision and software; see the module's origins."""
    of_type = _SUSTAINED.get(generation, {GemmPrecision.BF16: _OTHERS})
    of_type = of_type | {GemmPrecision.FP32: _OTHERS}
    is_wide = precision is GemmPrecision.FP32
    bf16 = of_type[precision if is_wide else GemmPrecision.BF16]
    generic = Constants(
        matmul_ratio=of_type.get(precision, min(of_type.values())),
        head_ratio=bf16,
        attention_ratio=_ATTENTION[generation],
        memory_factor=_MEMORY[generation],
        softmax_width=_SOFTMAX_WIDTH[generation],
        extra_depth=_STEP_DEPTH / (VECTOR_RATIO if is_wide else 1.0),
        extra_keys=_EXTRA_KEYS.get(generation, FITTED["extra_keys"].default),
        collective_s=_COLLECTIVE.get(generation, FITTED["collective_s"].default),
        hop_s=_HOP.get(generation, FITTED["hop_s"].default),
    )
    if software in (Software.TORCH_FSDP, Software.TORCH_EAGER):
        eager = _EAGER if software is Software.TORCH_EAGER else 1.0
        generic = replace(
            generic,
            grouped_ratio=_TORCH_GROUPED.get(generation, generic.grouped_ratio),
            attention_ratio=_ATTENTION[generation] * _OLDER_ATTENTION.get(generation, 1.0),
            memory_factor=_MEMORY[generation] * UNFUSED * eager,
        )
    return replace(generic, **_SOFTWARE[software])


NAMES: Final = tuple(field.name for field in fields(Constants))
