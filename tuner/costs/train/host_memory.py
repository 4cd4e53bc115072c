"""Bytes that offloading takes of the memory of a node.

    optimizer      fp32 weights and moments, and gradients in fp32: 16 bytes a parameter. So have it
                   Megatron-Core 0.16 (cpu_offloading/hybrid_optimizer.py: pinned copies of weights
                   and gradients beside Adam's states) and DeepSpeed 0.19 (the memory estimates of
                   runtime/zero/stage_1_and_2.py and stage3.py)
    parameters     shards of ZeRO 3, as they are stored
    activations    what is saved for backward, of all micro-batches in flight

A node holds consecutive ranks. Letters: P devices of a pipeline, C columns.
Not covered: staging buffers of an engine, DeepSpeed's of one layer or bucket; pinned blocks that
PyTorch rounds up to powers of two.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats, Ints
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.costs.train.parts import is_any

GRADIENT_BYTES: Final = 4.0
"""Bytes of a gradient whose optimizer is on the host, beside the optimizer's state."""


def pipeline_inside(rank_order: str) -> bool:
    """Return whether the next ranks after a tensor group's are a pipeline's (`tp-cp-ep-pp-dp`)."""
    return rank_order.index("pp") < rank_order.index("dp")


def offloaded_bytes(
    model: ModelShape,
    strategies: Strategies,
    hardware: Hardware,
    stages: Stages,
    *,
    constants: MemoryConstants,
    devices_per_node: int,
    inside_C: npt.NDArray[np.bool_],
) -> Mapping[str, Floats]:
    """Bytes of a node's memory by what is offloaded there, of every column.

    Args:
        model: that is trained.
        strategies: of the columns, with the same devices.
        hardware: that runs it.
        stages: of every column.
        constants: of the engine's memory.
        devices_per_node: consecutive ranks of a node.
        inside_C: whether neighbouring ranks are a pipeline's, and data parallelism is outside.
    """
    s = strategies
    if not any(map(is_any, (s.optimizer_offload, s.activation_offload, s.parameter_offload))):
        return {}
    kept = replace(s, optimizer_offload=0.0, activation_offload=0.0, parameter_offload=0.0)
    moments = np.where(np.greater(s.moments_bytes, 0.0), s.moments_bytes, constants.moments_bytes)
    updated = replace(kept, moments_bytes=moments + GRADIENT_BYTES)
    whole, now, of_host = (
        price_memory(model, variant, hardware, stages, constants=constants)
        for variant in (kept, s, updated)
    )
    inner_C = np.where(inside_C, s.tensor * s.context, s.stage_ranks).astype(np.int64)
    parts = {
        "optimizer state and gradients": s.optimizer_offload * of_host.optimizer_PC,
        "parameters": whole.weights_PC - now.weights_PC,
        "activations": whole.activations_PC - now.activations_PC,
    }
    pipeline_C = np.broadcast_to(np.asarray(s.pipeline, dtype=np.float64), inner_C.shape)
    devices = min(devices_per_node, int(np.max(s.world)))
    return {what: _of_node(grid, pipeline_C, inner_C, devices) for what, grid in parts.items()}


def _of_node(bytes_PC: Floats, pipeline_C: Floats, inner_C: Ints, devices: int) -> Floats:
    """Bytes of the node of most bytes: of as many neighbouring stages as its devices reach."""
    most_C = np.zeros(len(inner_C))
    bytes_PC = np.broadcast_to(bytes_PC, (len(bytes_PC), len(inner_C)))
    for pipeline, inner in np.unique(np.stack((pipeline_C, inner_C)), axis=1).T.astype(int):
        same = (pipeline_C == pipeline) & (inner_C == inner)
        stages = min(pipeline, max(1, devices // inner))
        of_ranks = bytes_PC[:pipeline, same]
        windows = np.lib.stride_tricks.sliding_window_view(of_ranks, stages, axis=0)
        most_C[same] = windows.sum(axis=-1).max(axis=0) * devices / stages
    return most_C
