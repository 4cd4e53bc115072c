"""Seconds that FSDP2 adds to its collectives on a CPU, layer by layer.

A gather copies a rank's shards into one buffer, and the whole buffer into the layer's tensors: with
W bytes over n ranks it reads and writes W / n + W. Each tensor has two such kernels, launched from
Python, and each gradient as many in a reduction. AdamW runs 11 operations a tensor, which Python
dispatches one by one where parameters are sharded tensors.

On accelerators the copies are few kernels at the memory's bandwidth, beside the layer before, and
the optimizer is fused: there nothing is added.

Source: PyTorch 2.11, torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (all_gather_copy_in,
split_with_sizes_copy, chunk_cat), torch/optim/adamw.py.
Not covered: memory that malloc gives back and maps again, which examples/finetuning/finetune.py
prevents.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.costs.train.adapters import AdaptedMatrix, attention_matrices, network_matrices
from tuner.costs.train.parts import BlockInputs, is_any

KERNELS = 2.0
"""Kernels of a tensor in a gather, or of a gradient in a reduction: copy in, copy out."""
UPDATE_LAUNCHES = 11.0
"""Launches of AdamW per tensor: two of either moment, six of the update, the count of steps."""

_NORMS = 2.0
_HEAD_NORMS = 2.0
_ROUTER = 1.0
_STACKS = 2.0
"""Tensors of a layer's experts: gate and up together, down."""
_PAIR = 2.0
"""Tensors of an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatheredLayer:
    """One layer; all 0 on accelerators, and with engines that launch otherwise."""

    copied_s: Numbers
    """Seconds of reading and writing all its parameters once."""
    gather_launch_s: Numbers
    """Seconds of launches of one gather."""
    reduce_launch_s: Numbers
    """Seconds of launches of one reduction of its gradients."""
    update_launch_s: Numbers
    """Seconds of launches of the optimizer."""


class _Tensors(NamedTuple):
    present: Numbers
    adapters: Numbers


def gathered_bytes(s: Strategies, parameters: Numbers, trained: Numbers) -> Numbers:
    """Bytes of some parameters in a gather, and of Transformers' adapters beside them."""
    beside = s.eager_modules * (1.0 - s.is_full) * s.adapter_bytes
    return parameters * s.weight_bytes + beside * trained


def gathered_layer(setting: BlockInputs, kind: str, *, layer_bytes: Numbers) -> GatheredLayer:
    """Price one kind of layer (tuner/costs/train/units.py, `KINDS`) of so many bytes in all."""
    s, constants = setting.strategies, setting.constants
    is_processor = np.greater(setting.hardware.is_processor, 0.0)
    applies = np.where(is_processor & np.greater(s.eager_modules, 0.0), 1.0, 0.0)
    if not is_any(applies):
        return GatheredLayer(
            copied_s=0.0, gather_launch_s=0.0, reduce_launch_s=0.0, update_launch_s=0.0
        )
    launch_s: Numbers = applies * constants.launch_s
    tensors = _tensors(setting, kind)
    adapters = _PAIR * tensors.adapters
    trained = np.where(np.greater(s.is_full, 0.0), tensors.present, adapters)
    return GatheredLayer(
        copied_s=applies * setting.memory_bound_s(2.0 * layer_bytes),
        gather_launch_s=launch_s * KERNELS * (tensors.present + adapters),
        reduce_launch_s=launch_s * KERNELS * trained,
        update_launch_s=launch_s * UPDATE_LAUNCHES * trained,
    )


def _tensors(setting: BlockInputs, kind: str) -> _Tensors:
    m, s = setting.model, setting.strategies
    if kind not in ("dense", "moe"):
        return _Tensors(present=1.0, adapters=0.0)
    attention = _counted(attention_matrices(m, s))
    around = attention.present + _NORMS + _HEAD_NORMS * m.has_qk_norm
    if kind == "dense":
        network = _counted(network_matrices(m, s, m.dense_ffn))
        return _Tensors(
            present=around + network.present, adapters=attention.adapters + network.adapters
        )
    shared = _counted(network_matrices(m, s, m.shared_ffn))
    has_shared = np.where(np.greater(m.shared_ffn, 0.0), 1.0, 0.0)
    return _Tensors(
        present=around + has_shared * shared.present + _ROUTER + _STACKS,
        adapters=attention.adapters + has_shared * shared.adapters + _STACKS * s.adapts_experts,
    )


def _counted(matrices: Iterable[AdaptedMatrix]) -> _Tensors:
    present: Numbers = 0.0
    adapters: Numbers = 0.0
    for matrix in matrices:
        present, adapters = present + matrix.present, adapters + matrix.ratio * matrix.present
    return _Tensors(present=present, adapters=adapters)
