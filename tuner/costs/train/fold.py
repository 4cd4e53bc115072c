"""Sum layer counts times unit costs, by stage and by pipeline device.

Stage s runs on device s mod p. Most stages hold no embedding, head or multi-token prediction, so
rows without any are left out of the sums; stages are folded onto devices as counts, before they
are multiplied, since counts are often the same for all columns.

Letters: C columns, S stages in execution order, P devices of a pipeline.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Strategies
from tuner.config.shapes import Grid, Stages
from tuner.costs.train.parts import is_any
from tuner.costs.train.units import UnitCosts


class LayerCounts(NamedTuple):
    """Number of layers of one kind that each row (a stage or a device) holds."""

    rows: npt.NDArray[np.intp]
    """Rows with any, in any column."""
    count_RC: Grid
    """[len(rows), C], or [len(rows), 1] where all columns agree."""


def layers_by_stage(stages: Stages) -> Mapping[str, LayerCounts]:
    """Count layers by kind and stage."""
    return {kind: _nonempty_rows(count_SC) for kind, count_SC in _counts(stages).items()}


def layers_by_device(stages: Stages, strategies: Strategies) -> Mapping[str, LayerCounts]:
    """Count layers by kind and device."""
    counts = _counts(stages)
    return {kind: _nonempty_rows(per_device(count, strategies)) for kind, count in counts.items()}


def weighted_sum(
    layer_counts: Mapping[str, LayerCounts], units: UnitCosts, name: str, *, shape: tuple[int, int]
) -> Grid:
    """Sum count times a field of the unit costs over the kinds, per row."""
    total: Grid = np.zeros(shape)
    for kind, (rows, count_RC) in layer_counts.items():
        value = getattr(getattr(units, kind), name)
        if not len(rows) or not is_any(value):
            continue
        if len(rows) == shape[0]:
            total += count_RC * value
        else:
            total[rows] += count_RC * value
    return total


def per_device(stage_SC: Grid, strategies: Strategies) -> Grid:
    """Sum the stages of every pipeline device: [P, C], or [P, 1] where all columns agree."""
    pipeline = np.ravel(np.asarray(strategies.pipeline)).astype(np.int64)
    degrees = np.flatnonzero(np.bincount(pipeline))
    if len(degrees) == 1:
        return _folded(stage_SC, int(degrees[0]))
    num_stages = stage_SC.shape[0]
    wide_SC = np.broadcast_to(stage_SC, (num_stages, len(pipeline)))
    total_PC = np.zeros((int(degrees[-1]), len(pipeline)))
    if num_stages <= degrees[0]:
        total_PC[:num_stages] = wide_SC
        return total_PC
    for degree in degrees:
        here = np.flatnonzero(pipeline == degree)
        total_PC[: int(degree), here] = _folded(wide_SC[:, here], int(degree))
    return total_PC


def _folded(stage_SC: Grid, degree: int) -> Grid:
    num_stages, num_columns = stage_SC.shape
    if num_stages == degree:
        return stage_SC
    rounds = -(-num_stages // degree)
    padded = np.zeros((rounds * degree, num_columns))
    padded[:num_stages] = stage_SC
    folded: Grid = padded.reshape(rounds, degree, num_columns).sum(axis=0)
    return folded


def _nonempty_rows(count: Grid) -> LayerCounts:
    rows = np.flatnonzero(count.any(axis=1))
    return LayerCounts(rows=rows, count_RC=count if len(rows) == len(count) else count[rows])


def _counts(stages: Stages) -> dict[str, Grid]:
    return {
        "dense": stages.dense_SC,
        "moe": stages.moe_SC,
        "mtp": stages.mtp_SC,
        "embedding": stages.embedding_SC,
        "head": stages.head_SC,
    }
