"""Common pieces of a transformer's blocks: the cost record, GEMMs, norms and collectives.

    T          tokens of one tensor-parallel group, b s / CP   t   tensor-parallel degree
    h          hidden size                                     f   width of a network
    e          bytes of an element

A block is a piece of a layer whose kernels and collectives run one after the other. Its costs are
kept by kind, because they follow different rules: kernels, exposed collectives of each dimension,
recomputation in the backward pass, and launches by the host.

GEMMs: forward [T, k] x [k, n]; backward one for the input, [T, n] x [n, k], and one for the
weights, [n, T] x [T, k], which adds to the main gradient. Memory-bound bytes are counted kernel by
kernel as Megatron-Core fuses them: norm 2 e h, residual addition 3 e h, gate and activation 3 e f.
A hyper-connection of S streams reads them for its weights and again for the block's input, then
reads them and the block's output and writes them: (4 S + 2) e h (vLLM 0.33.0,
kernels/mhc/tilelang_kernels.py). Its projection has 2 (2 + S) S FLOPs per element read, so that
memory binds it. Backward passes of memory-bound kernels move 1.6 times their forward bytes (5
against 3 vectors for a gated activation, 3 against 2 for a norm).

Tensor parallelism has two collectives per block and pass: all-gather and reduce-scatter with
sequence parallelism, which together move what one all-reduce moves without it (Korthikanti et al.,
arXiv:2205.05198, section 4.2.2).

Not covered: quantising weights once a step, the separate maxima of scales per tensor, biases.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware, ModelShape
from tuner.prices.datasheet import streamed_s
from tuner.prices.ops import Op, Prices, TrainedOp, memory_bound, trained_gemm
from tuner.prices.train.collectives import Groups, all_gather_s, all_reduce_s
from tuner.prices.train.constants import Constants

BACKWARD_BYTES = 1.6
"""Bytes of memory-bound kernels in the backward pass over those in the forward pass."""
QUANTISED_BYTES = 4.0
"""Moved per element that is quantised: 2 read and 1 written by rows, 1 by columns, as fp8."""
ACCUMULATION = 1.4
"""Exponent p of (c^p + b^p)^(1/p), with c the seconds of a weight gradient's GEMM and b those of
the main gradient's bytes: they overlap in part. [P] Gradients of weights and of inputs in 262 pairs
of bf16 kernels of B200, dense and grouped, main gradients of 2 and 4 bytes: mean error 9.4 %, 13.3
% without b; 1.85 times as long at 512 tokens an expert, 2.9 at 128 (MooreThreads/SimuMax, v1.2,
configs/system/b200_bf16_ceperm)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One pass of one micro-batch through a block."""

    forward_s: Numbers = 0.0
    """Seconds of the forward pass's kernels."""
    backward_s: Numbers = 0.0
    """Seconds of the backward pass's kernels, those of weight gradients included."""
    weight_s: Numbers = 0.0
    """Part of `backward_s`: kernels for weight gradients, without `accumulation_s`."""
    accumulation_s: Numbers = 0.0
    """Part of `backward_s`: kernels that add to main gradients, whatever the tokens."""
    recomputed_s: Numbers = 0.0
    """Seconds of kernels and collectives of recomputed modules, unless the whole layer is
    recomputed."""
    recomputed_expert_s: Numbers = 0.0
    """Part of `recomputed_s`: exposed dispatch and combine."""
    tensor_s: Numbers = 0.0
    """Seconds of exposed collectives of tensor parallelism in a forward pass."""
    tensor_backward_s: Numbers = 0.0
    context_s: Numbers = 0.0
    context_backward_s: Numbers = 0.0
    expert_s: Numbers = 0.0
    """Seconds of exposed dispatch and combine in a forward pass; the backward pass has the same."""
    launches: Numbers = 0.0
    """Kernel launches of a forward pass."""
    expert_launches: Numbers = 0.0
    """Additional launches by local experts; partial graphs do not cover them."""

    def __add__(self, block: "Block") -> "Block":
        return Block(
            **{name: getattr(self, name) + getattr(block, name) for name in Block.__slots__}
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockInputs:
    """Inputs that every block of one pricing shares."""

    model: ModelShape
    strategies: Strategies
    hardware: Hardware
    constants: Constants
    prices: Prices
    groups: Groups

    @property
    def norm_share(self) -> Numbers:
        """Return the share of a tensor-parallel group's tokens whose norms one rank computes."""
        s = self.strategies
        return np.where(np.greater(s.sequence_parallel, 0.0), 1.0 / s.tensor, 1.0)

    @property
    def is_narrow(self) -> Numbers:
        """Return where the linear layers compute in a type narrower than bf16."""
        machine = self.hardware
        return np.greater(machine.matmul_flop_per_s, machine.attention_flop_per_s)

    def memory_bound_s(self, moved_bytes: Numbers) -> Numbers:
        """Seconds of element-wise kernels that read and write so many bytes."""
        return self.prices.seconds(memory_bound(moved_bytes))

    def hidden_bytes(self, vectors: Numbers) -> Numbers:
        """Bytes of so many passes over the hidden state outside the tensor-parallel region."""
        s = self.strategies
        return vectors * s.element_bytes * s.tokens * self.model.hidden * self.norm_share


def trained(
    setting: BlockInputs, op: TrainedOp, *, pieces: Numbers = 1.0, trains: Numbers | None = None
) -> Block:
    """An operation with its gradients, in so many pieces; frozen weights have none.

    `trains` is 1 where the weights' gradient is computed; None: where all weights are trained.
    """
    forward_s, inputs_s, weights_s = map(setting.prices.seconds, op)
    has_gradient = setting.strategies.is_full if trains is None else trains
    added_s = has_gradient * _accumulation_s(setting, op.weights, weights_s)
    weights_s = has_gradient * weights_s
    return Block(
        forward_s=pieces * forward_s,
        backward_s=pieces * (inputs_s + weights_s + added_s),
        weight_s=pieces * weights_s,
        accumulation_s=pieces * added_s,
    )


def _accumulation_s(setting: BlockInputs, op: Op, kernel_s: Numbers) -> Numbers:
    """Seconds that a weights' gradient takes longer for its addition to the main gradient.

    The main gradient is read and written, by the GEMM itself (Megatron) or by copies behind it.
    Transformers' modules keep what the GEMM wrote.
    """
    s, axes = setting.strategies, op.axes
    if op.operation == "gemm":
        elements = axes["m"] * axes["n"]
    else:
        elements = axes["experts"] * axes["hidden"] * (axes["inner"] + axes["ffn"])
    moved_bytes = np.where(np.greater(s.eager_modules, 0.0), 0.0, 2.0 * s.gradient_bytes) * elements
    moved_s = streamed_s(moved_bytes, setting.hardware)
    both_s = (kernel_s**ACCUMULATION + moved_s**ACCUMULATION) ** (1.0 / ACCUMULATION)
    return np.where(np.greater(moved_s, 0.0), both_s - kernel_s, 0.0)


def gemm(
    setting: BlockInputs,
    rows: Numbers,
    n: Numbers,
    k: Numbers,
    *,
    dtype: str = "",
    follows_norm: bool = False,
    is_scattered: bool = False,
) -> Block:
    """[rows, k] x [k, n], and both GEMMs of its backward pass.

    Args:
        setting: of the block.
        rows: tokens.
        n: width of the output on this rank.
        k: width of the input on this rank.
        dtype: in which it is computed; empty: that of the linear layers.
        follows_norm: its input is quantised by the kernel of a norm, not by one of its own.
        is_scattered: sequence parallelism scatters its output: each rank quantises the gradient of
            its own tokens before all gather it (Transformer Engine, pytorch/module/base.py,
            `grad_output_preprocess`).
    """
    gemms = trained(setting, trained_gemm(rows, n, k, dtype=dtype))
    if dtype:
        return gemms
    inputs = 0.0 if follows_norm else rows * k
    gradients = rows * n * (setting.norm_share if is_scattered else 1.0)
    return gemms + quantisation(setting, inputs=inputs, gradients=gradients)


def quantisation(setting: BlockInputs, *, inputs: Numbers, gradients: Numbers) -> Block:
    """Kernels that write so many elements in the GEMMs' narrow type, where it is one.

    Each element is read in bf16 and written twice, by rows and by columns: once for the GEMM that
    reads it now, once for the weight gradient.
    """
    if not np.any(setting.is_narrow):
        return Block()
    per_element = np.where(setting.is_narrow, QUANTISED_BYTES, 0.0)
    return Block(
        forward_s=setting.memory_bound_s(per_element * inputs),
        backward_s=setting.memory_bound_s(per_element * gradients),
    )


def feed_forward(setting: BlockInputs, *, rows: Numbers, width: Numbers) -> Block:
    """Feed-forward network of one rank: two or three GEMMs and the activation."""
    m, s = setting.model, setting.strategies
    inner = np.where(np.greater(m.is_gated, 0.0), 2.0, 1.0)
    up = gemm(setting, rows, inner * width, m.hidden, follows_norm=True)
    down = gemm(setting, rows, m.hidden, width, is_scattered=True)
    act_s = setting.memory_bound_s((inner + 1.0) * s.element_bytes * rows * width)
    block = up + down + Block(forward_s=act_s, backward_s=BACKWARD_BYTES * act_s)
    return replace(block, launches=setting.constants.dense_launches * 0.5)


def norm_and_residual(setting: BlockInputs, *, overlapped: bool) -> Block:
    """Norm before a block, residual addition after it, and its tensor-parallel collectives."""
    s = setting.strategies
    norm_s = setting.memory_bound_s(setting.hidden_bytes(2.0))
    m = setting.model
    vectors = np.where(np.greater(m.streams, 1.0), 4.0 * m.streams + 2.0, 3.0)
    add_bytes = setting.hidden_bytes(vectors + np.greater(s.dropout, 0.0) / s.element_bytes)
    add_s = setting.memory_bound_s(add_bytes)
    pass_s: Numbers = tensor_pass_s(setting) if overlapped else 0.0
    return Block(
        forward_s=norm_s + add_s,
        backward_s=BACKWARD_BYTES * (norm_s + add_s),
        recomputed_s=s.recompute_layernorm * norm_s,
        tensor_s=pass_s,
        tensor_backward_s=pass_s,
    )


def tensor_pass_s(setting: BlockInputs) -> Numbers:
    """Exposed collectives of one block and pass over the tensor-parallel group."""
    m, s, constants = setting.model, setting.strategies, setting.constants
    total = s.element_bytes * s.tokens * m.hidden
    group, machine = setting.groups.tensor, setting.hardware
    scattered = 2.0 * all_gather_s(total, group, machine, constants)
    reduced = all_reduce_s(total, group, machine, constants)
    whole_s = np.where(np.greater(s.sequence_parallel, 0.0), scattered, reduced)
    exposed = np.where(
        s.overlap_tensor > 0.0, constants.tensor_overlapped_ratio, constants.tensor_exposed_ratio
    )
    return exposed * whole_s


def select_block(condition: bool | npt.NDArray[np.bool_], yes: Block, no: Block) -> Block:
    """Pick a block per column."""
    return Block(
        **{
            field.name: np.where(condition, getattr(yes, field.name), getattr(no, field.name))
            for field in fields(Block)
        }
    )


def scale_block(ratio: Numbers, block: Block) -> Block:
    """A block that only a share of the layers has."""
    return Block(**{field.name: ratio * getattr(block, field.name) for field in fields(Block)})


def is_any(values: Numbers) -> bool:
    """Return whether any column has more than 0."""
    return bool(np.any(np.asarray(values) > 0.0))
