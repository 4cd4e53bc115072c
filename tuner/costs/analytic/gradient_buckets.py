"""How much of the gradient reduction stays visible, by the size of its buckets.

Megatron-Core sums gradients bucket by bucket while the backward pass of the last micro-batch still
runs. With P parameters in buckets of B there are n = ceil(P / B) of them; each takes t(B), its own
start-up included, and all take S = n t. Gradients become ready evenly over the T seconds of
that pass, so the last bucket is ready at its end and

    exposed(B) = max(t(B), S - T (1 - 1/n))      visible(B) = exposed + r (S - exposed)

with r what interference with the pass costs of the hidden rest. One bucket hides nothing; many
small ones pay many start-ups. Dense parameters and experts have buckets of the same size, on groups
and of counts of their own.

The engine's own size is B0 = max(40e6, 1e6 DP CP). What the model has for it, v, was fitted to
published runs and stands for more than this formula. A stated size therefore gains no more than the
formula's difference in seconds, and no larger share than the formula's:

    v(B) = max(v + visible(B) - visible(B0), v visible(B) / visible(B0))

and every price at the engine's own size stays what it was.

Sources: FSMoE, arXiv 2501.10714, section on gradient partitioning, for the choice of how many bytes
ride in which window; buckets, B0 and which of them are cut from core_v0.18.0 of
github.com/NVIDIA/Megatron-LM (distributed_data_parallel.py, training.py): only the first model
chunk of the first pipeline rank has buckets, because no other chunk's reduction ends the step.

Not covered: padding of buckets to equal shards, gathers of parameters (which use the same buckets).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.costs.analytic.shapes import Numbers

LEAST_DEFAULT: Final = 40e6
"""Parameters of one bucket on few ranks."""
DEFAULT_PER_RANK: Final = 1e6
"""On many ranks, per data-parallel one."""


INTERFERENCE_RATIO: Final = 0.3
"""Of reductions that are hidden, what they cost the pass beside them: the exposure that 159
published steps of Megatron-Bridge show when it is the constant that is fitted. An upper bound,
since it holds the last bucket as well."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reduced:
    """Gradients of one kind that one device reduces."""

    parameters: Numbers
    reduce_s: Callable[[Numbers], Numbers]
    """Seconds of one collective, by its parameters."""


def default_bucket(shared_ranks: Numbers) -> Numbers:
    """Parameters of one bucket where the launch states none, by data times context ranks."""
    return np.maximum(LEAST_DEFAULT, DEFAULT_PER_RANK * shared_ranks)


def resized_s(
    usual_s: Numbers,
    kinds: tuple[Reduced, ...],
    *,
    bucket: Numbers,
    default: Numbers,
    backward_s: Numbers,
) -> Numbers:
    """Return v(B), the visible seconds of a reduction in buckets of a stated size.

    Args:
        usual_s: v, with the engine's own size.
        kinds: dense parameters, and experts where there are any.
        bucket: B, in parameters.
        default: B0.
        backward_s: T.
    """
    own_s = visible_s(kinds, bucket=bucket, backward_s=backward_s)
    other_s = visible_s(kinds, bucket=default, backward_s=backward_s)
    ratio = np.where(np.greater(other_s, 0.0), own_s / np.maximum(other_s, 1e-30), 1.0)
    return np.maximum(usual_s + (own_s - other_s), usual_s * ratio)


def visible_s(
    kinds: tuple[Reduced, ...],
    *,
    bucket: Numbers,
    backward_s: Numbers,
    interference: float = INTERFERENCE_RATIO,
) -> Numbers:
    """Seconds that a reduction in such buckets adds to the step by the formula alone."""
    last_s: Numbers = 0.0
    total_s: Numbers = 0.0
    most: Numbers = 1.0
    for kind in kinds:
        count = np.maximum(np.ceil(kind.parameters / bucket), 1.0)
        each_s = kind.reduce_s(kind.parameters / count)
        last_s, total_s = last_s + each_s, total_s + count * each_s
        most = np.maximum(most, count)
    exposed_s = np.maximum(last_s, total_s - backward_s * (1.0 - 1.0 / most))
    visible: Numbers = exposed_s + interference * (total_s - exposed_s)
    return visible
