"""Whether candidates can fit in any layout of layers, without drawing up the layout.

What a device holds grows by the same bytes with every further layer of a kind. One and two layers
of the common kind on every device of a plain pipeline give that slope; leading dense layers, which
are small, are left out. With several stages a device keeps more micro-batches of each layer:

    kept = min(m v, (v - 1) p + 2 (p - 1 - d) + 1) / v  on device d, where a plain one keeps
           min(m, p - d)

(tuner/costs/analytic/in_flight.py, layers spread evenly over the stages). Without any layer a
device would hold its bytes less one slope, and

    most = floor((limit - bytes without layers) / slope)

layers fit on it. Several stages hold as many layers each, and some one more, which is counted with
the slope of a plain pipeline, as no stage keeps fewer micro-batches. Where the devices together
cannot take all layers of that kind, no layout fits.

`is_idle` leaves out what only some ways need, the moments of a layer's backward pass and dispatch
buffers, so that the leanest way bounds all of them.

Letters: C candidates, P devices, d one of them, p their number, v stages of each, m micro-batches.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.memory import assemble_memory
from tuner.costs.analytic.memory_units import MemoryUnits
from tuner.costs.analytic.shapes import Stages, Strategies, taken
from tuner.planner.analytic.candidates import Candidates, strategies_of
from tuner.planner.analytic.memory import pieces_alike, taken_bytes, unit_memory
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints, Mask

Floats = npt.NDArray[np.float64]


def fits_somehow(
    question: Question, ways: Ways, candidates: Candidates, *, is_idle: bool = False
) -> Mask:
    """Say which candidates are not proven to fit in no layout."""
    most_PC = most_layers(question, ways, candidates, is_idle=is_idle)
    model = question.model
    return np.asarray(most_PC.sum(axis=0) >= (model.num_moe_layers or model.num_layers))


def most_layers(
    question: Question, ways: Ways, candidates: Candidates, *, is_idle: bool = False
) -> Ints:
    """Layers of the common kind that each device can hold at most, [P, C]."""
    rows = candidates.rows
    strategies = strategies_of(question, ways, candidates)
    units, unit_of = unit_memory(question, strategies, candidates)
    units = _idle(units) if is_idle else units
    found_PC = np.zeros((int(rows["pipeline"].max(initial=1)), len(candidates)), dtype=np.int64)
    for at in pieces_alike(candidates, "pipeline"):
        pipeline = int(rows["pipeline"][at[0]])
        alike = replace(taken(strategies, at), pipeline=float(pipeline))
        found_PC[:pipeline, at] = _most_layers(question, alike, taken_bytes(units, unit_of[at]))
    return found_PC


def kept_PC(strategies: Strategies) -> Floats:
    """Micro-batches that each device keeps of one of its layers, on average over its stages."""
    p = int(np.max(strategies.pipeline))
    device = np.arange(p, dtype=np.float64)[:, None]
    m, v = np.asarray(strategies.num_microbatches), np.asarray(strategies.virtual_pipeline)
    plain = np.minimum(m, p - device)
    ahead = (v - 1.0) * p + 2.0 * (p - 1.0 - device) + 1.0
    kept = np.where(v > 1.0, np.minimum(m * v, ahead) / v, plain)
    filled = np.maximum(kept, np.minimum(m, float(p)))
    found: Floats = np.where(np.asarray(strategies.zero_bubble) > 0.0, filled, kept)
    return found


def _most_layers(question: Question, strategies: Strategies, units: MemoryUnits) -> Ints:
    name, kind = ("moe_SC", 1) if question.model.num_moe_layers else ("dense_SC", 0)
    plain = replace(strategies, virtual_pipeline=1.0, zero_bubble=0.0)
    stages = _ends(question, int(np.max(strategies.pipeline)))
    one, two = (
        assemble_memory(
            units, plain, replace(stages, **{name: np.full_like(stages.dense_SC, count)})
        ).total_PC
        for count in (1.0, 2.0)
    )
    with_pools = 1.0 + units.unused_ratio_C + units.pool_ratio_C
    more_PC = (kept_PC(strategies) - kept_PC(plain)) * with_pools * units.saved_KC[kind]
    least_PC = np.maximum(two - one, 1.0)
    slope_PC = least_PC + np.maximum(more_PC, 0.0)
    left_PC = np.maximum(question.memory_limit_bytes - (one - (two - one)), 0.0)
    virtual = np.asarray(strategies.virtual_pipeline)
    rounds_PC = np.floor(left_PC / (slope_PC * virtual))
    rest_PC = np.floor((left_PC - rounds_PC * slope_PC * virtual) / least_PC)
    found: Ints = (rounds_PC * virtual + np.minimum(rest_PC, virtual - 1.0)).astype(np.int64)
    return found


def _ends(question: Question, num_stages: int) -> Stages:
    """Stages without any layer."""
    nothing = np.zeros((num_stages, 1))
    first, last = nothing.copy(), nothing.copy()
    first[0], last[-1] = 1.0, 1.0
    return Stages(
        dense_SC=nothing,
        moe_SC=nothing,
        embedding_SC=first,
        head_SC=last,
        mtp_SC=question.shape.mtp_layers * last,
    )


def _idle(memory: MemoryUnits) -> MemoryUnits:
    nothing = np.zeros(1)
    return replace(memory, dense_moment_C=nothing, moe_moment_C=nothing, dispatch_C=nothing)
