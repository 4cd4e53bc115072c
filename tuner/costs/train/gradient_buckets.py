"""Exposed part of the gradient reduction, by bucket size.

Megatron-Core reduces gradients bucket by bucket during the backward pass of the last micro-batch.
P parameters in buckets of B make n = ceil(P / B) buckets; each takes t(B), start-up included, and
all take S = n t. Gradients become ready evenly over the T seconds of that pass, so the last bucket
is ready at its end and

    exposed(B) = max(t(B), S - T (1 - 1/n))      visible(B) = exposed + r (S - exposed)

with r the share of the hidden rest that interference costs. One bucket hides nothing; many small
ones pay many start-ups. Dense parameters and experts have buckets of the same size, but their own
groups and counts.

The engine's default size is B0 = max(40e6, 1e6 DP CP). Its exposed time v was fitted to published
runs and covers more than this formula. A stated size therefore gains at most the formula's
difference in seconds, and at most the formula's share:

    v(B) = max(v + visible(B) - visible(B0), v visible(B) / visible(B0))

and the price at the default size does not change.

Sources: FSMoE, arXiv 2501.10714, section on gradient partitioning; buckets and B0 from core_v0.18.0
of github.com/NVIDIA/Megatron-LM (distributed_data_parallel.py, training.py): only the first model
chunk of the first pipeline rank has buckets, because no other chunk's reduction ends the step.

Not covered: padding of buckets to equal shards, the parameter all-gather (in the same buckets).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.config.columns import Numbers

MIN_DEFAULT_BUCKET: Final = 40e6
"""Parameters of one bucket on few ranks."""
DEFAULT_BUCKET_PER_RANK: Final = 1e6
"""Parameters of one bucket per data-parallel rank, on many ranks."""


INTERFERENCE_RATIO: Final = 0.3
"""Share of hidden reductions that slows the overlapping pass: the exposure fitted to 159 published
steps of Megatron-Bridge. An upper bound, since the last bucket is included."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReducedGradients:
    """Gradients of one kind that one device reduces."""

    parameters: Numbers
    reduce_s: Callable[[Numbers], Numbers]
    """Seconds of one collective, by its parameters."""


def default_bucket(shared_ranks: Numbers) -> Numbers:
    """Parameters of one bucket where the launch states none, by data times context ranks."""
    return np.maximum(MIN_DEFAULT_BUCKET, DEFAULT_BUCKET_PER_RANK * shared_ranks)


def bucketed_reduction_s(
    default_s: Numbers,
    kinds: tuple[ReducedGradients, ...],
    *,
    bucket: Numbers,
    default: Numbers,
    backward_s: Numbers,
) -> Numbers:
    """Return v(B), the visible seconds of a reduction in buckets of a stated size.

    Args:
        default_s: v, at the engine's default size.
        kinds: dense parameters, and experts where there are any.
        bucket: B, in parameters.
        default: B0.
        backward_s: T.
    """
    stated_size_s = visible_s(kinds, bucket=bucket, backward_s=backward_s)
    default_size_s = visible_s(kinds, bucket=default, backward_s=backward_s)
    ratio = np.where(
        np.greater(default_size_s, 0.0), stated_size_s / np.maximum(default_size_s, 1e-30), 1.0
    )
    return np.maximum(default_s + (stated_size_s - default_size_s), default_s * ratio)


def visible_s(
    kinds: tuple[ReducedGradients, ...],
    *,
    bucket: Numbers,
    backward_s: Numbers,
    interference: float = INTERFERENCE_RATIO,
) -> Numbers:
    """Exposed seconds of a reduction in such buckets, by the formula alone."""
    last_s: Numbers = 0.0
    total_s: Numbers = 0.0
    max_buckets: Numbers = 1.0
    for kind in kinds:
        count = np.maximum(np.ceil(kind.parameters / bucket), 1.0)
        each_s = kind.reduce_s(kind.parameters / count)
        last_s, total_s = last_s + each_s, total_s + count * each_s
        max_buckets = np.maximum(max_buckets, count)
    exposed_s = np.maximum(last_s, total_s - backward_s * (1.0 - 1.0 / max_buckets))
    visible: Numbers = exposed_s + interference * (total_s - exposed_s)
    return visible
