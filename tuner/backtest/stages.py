"""Divides a model's layers into the stages that a published run most likely had.

Three rules, in this order, for L layers on n = PP * VPP stages:

- L divides by n: every stage gets L / n layers; embedding and head come on top.
- L + 2 divides by n: embedding and loss count as a layer each, as Llama 3.1 405B and Qwen3-235B
  are trained with Megatron's `account_for_embedding_in_pipeline_split` and `..._loss_...`.
- else: stages are filled with ceil((L + mtp + 1) / n) layers from the front, and the last one,
  which also holds multi-token prediction and loss, gets what is left, as in Megatron-Bridge's
  layouts of DeepSeek-V3; where that would leave a stage empty, layers are spread evenly, more to
  the front.

Layers without experts come first. Letters: S stages in execution order, stage s on pipeline rank
s mod PP.
"""

import math

import numpy as np

from tuner.config.shapes import Grid, ModelShape, Stages


def divide_layers(
    layers: int, *, mtp_layers: int = 0, num_stages: int
) -> tuple[tuple[int, ...], bool]:
    """Return layers per stage, and whether embedding and loss count as layers.

    Raises:
        ValueError: there are more stages than layers.
    """
    if num_stages > layers + 2:
        raise ValueError(f"{num_stages} stages (pp * vpp) exceed {layers} layers")
    if layers % num_stages == 0:
        return (layers // num_stages,) * num_stages, False
    if (layers + 2) % num_stages == 0 and num_stages > 1:
        share = (layers + 2) // num_stages
        return (share - 1, *(share,) * (num_stages - 2), share - 1), True
    share = math.ceil((layers + mtp_layers + 1) / num_stages)
    left = layers - share * (num_stages - 1)
    if left > 0:
        return (*(share,) * (num_stages - 1), left), True
    base, more = divmod(layers, num_stages)
    return tuple(base + (stage < more) for stage in range(num_stages)), False


def stage_columns(shape: ModelShape, counts: tuple[int, ...]) -> Stages:
    """Return the contents of each stage of one model, as columns [S, 1].

    Dense layers come first; those of a hybrid are spread evenly.
    """
    count_S = np.array(counts, dtype=np.float64)
    before_S = np.cumsum(count_S) - count_S
    dense_S = np.clip(float(shape.dense_layers) - before_S, 0.0, count_S)
    if shape.has_linear:
        dense_S = count_S * float(shape.dense_layers) / count_S.sum()
    first_S, last_S = np.zeros_like(count_S), np.zeros_like(count_S)
    first_S[0] = last_S[-1] = 1.0
    return Stages(
        dense_SC=dense_S[:, None],
        moe_SC=(count_S - dense_S)[:, None],
        embedding_SC=first_S[:, None],
        head_SC=last_S[:, None],
        mtp_SC=last_S[:, None] * float(shape.mtp_layers),
    )


def stack_stages(parts: list[Stages]) -> Stages:
    """Join columns of stages, padding with empty ones."""
    num_stages = max(part.dense_SC.shape[0] for part in parts)
    return Stages(
        dense_SC=_padded([part.dense_SC for part in parts], num_stages),
        moe_SC=_padded([part.moe_SC for part in parts], num_stages),
        embedding_SC=_padded([part.embedding_SC for part in parts], num_stages),
        head_SC=_padded([part.head_SC for part in parts], num_stages),
        mtp_SC=_padded([part.mtp_SC for part in parts], num_stages),
    )


def _padded(parts: list[Grid], num_stages: int) -> Grid:
    return np.concatenate(
        [np.pad(part, ((0, num_stages - part.shape[0]), (0, 0))) for part in parts], axis=1
    )
