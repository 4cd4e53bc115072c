"""Whether candidates can fit in any pipeline layout, without building the layout.

The bytes of a device grow by the same amount with every further layer of a kind. One and two layers
of the common kind on every device of a plain pipeline give that slope; leading dense layers, which
are small, are left out. With several stages a device keeps more micro-batches of each layer:

    kept = min(m v, (v - 1) p + 2 (p - 1 - d) + 1) / v  on device d, where a plain one keeps
           min(m, p - d)

(tuner/costs/train/in_flight.py, layers spread evenly over the stages). Without any layer a
device would hold its bytes less one slope, and

    most = floor((limit - bytes without layers) / slope)

layers fit on it. Several stages hold as many layers each, and some one more, which is counted with
the slope of a plain pipeline, as no stage keeps fewer micro-batches. Where the devices together
cannot take all layers of that kind, no layout fits.

`is_idle` leaves out what only some options need, the peak within a layer's backward pass and
dispatch buffers, so that the option of least memory bounds all of them.

Letters: C candidates, P devices, d one of them, p their number, v stages of each, m micro-batches.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Strategies
from tuner.costs.train.memory import assemble_memory
from tuner.costs.train.memory_units import MemoryUnits
from tuner.costs.train.shapes import Stages, taken
from tuner.search.train.candidates import Candidates, to_strategies
from tuner.search.train.memory import take_units, uniform_pieces, unit_memory
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Ints, Mask

Floats = npt.NDArray[np.float64]


def may_fit(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates, *, is_idle: bool = False
) -> Mask:
    """Whether each candidate may fit in some layout; False is proven."""
    most_PC = layer_capacity(problem, options, candidates, is_idle=is_idle)
    model = problem.model
    return np.asarray(most_PC.sum(axis=0) >= (model.num_moe_layers or model.num_layers))


def layer_capacity(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates, *, is_idle: bool = False
) -> Ints:
    """Layers of the common kind that each device can hold at most, [P, C]."""
    rows = candidates.rows
    strategies = to_strategies(problem, options, candidates)
    units, unit_of = unit_memory(problem, strategies, candidates)
    units = _idle(units) if is_idle else units
    layers_PC = np.zeros((int(rows["pipeline"].max(initial=1)), len(candidates)), dtype=np.int64)
    for at in uniform_pieces(candidates, "pipeline"):
        pipeline = int(rows["pipeline"][at[0]])
        strategies_P = replace(taken(strategies, at), pipeline=float(pipeline))
        layers_PC[:pipeline, at] = _layer_capacity(
            problem, strategies_P, take_units(units, unit_of[at])
        )
    return layers_PC


def kept_PC(strategies: Strategies) -> Floats:
    """Micro-batches that each device keeps of one of its layers, on average over its stages."""
    p = int(np.max(strategies.pipeline))
    device = np.arange(p, dtype=np.float64)[:, None]
    m, v = np.asarray(strategies.num_microbatches), np.asarray(strategies.virtual_pipeline)
    plain = np.minimum(m, p - device)
    ahead = (v - 1.0) * p + 2.0 * (p - 1.0 - device) + 1.0
    kept = np.where(v > 1.0, np.minimum(m * v, ahead) / v, plain)
    filled = np.maximum(kept, np.minimum(m, float(p)))
    in_flight_PC: Floats = np.where(np.asarray(strategies.zero_bubble) > 0.0, filled, kept)
    return in_flight_PC


def _layer_capacity(problem: TrainProblem, strategies: Strategies, units: MemoryUnits) -> Ints:
    name, kind = ("moe_SC", 1) if problem.model.num_moe_layers else ("dense_SC", 0)
    plain = replace(strategies, virtual_pipeline=1.0, zero_bubble=0.0)
    stages = _without_layers(problem, int(np.max(strategies.pipeline)))
    units = _in_largest_chunk(units, strategies)
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
    left_PC = np.maximum(problem.memory_limit_bytes - (one - (two - one)), 0.0)
    virtual = np.asarray(strategies.virtual_pipeline)
    rounds_PC = np.floor(left_PC / (slope_PC * virtual))
    rest_PC = np.floor((left_PC - rounds_PC * slope_PC * virtual) / least_PC)
    layers_PC: Ints = (rounds_PC * virtual + np.minimum(rest_PC, virtual - 1.0)).astype(np.int64)
    return layers_PC


def _without_layers(problem: TrainProblem, num_stages: int) -> Stages:
    """Stages without any layer."""
    nothing = np.zeros((num_stages, 1))
    first, last = nothing.copy(), nothing.copy()
    first[0], last[-1] = 1.0, 1.0
    return Stages(
        dense_SC=nothing,
        moe_SC=nothing,
        embedding_SC=first,
        head_SC=last,
        mtp_SC=problem.shape.mtp_layers * last,
    )


def _in_largest_chunk(units: MemoryUnits, strategies: Strategies) -> MemoryUnits:
    """Bound the whole gradients of the largest of v chunks by their mean, 1 / v of all.

    Under ZeRO 3 with at most p micro-batches a device has those of one chunk at a time
    (tuner/costs/train/memory.py).
    """
    chunks = np.asarray(strategies.virtual_pipeline)
    if not (np.any(units.is_gathered_C > 0.0) and np.any(chunks > 1.0)):
        return units
    is_one_at_a_time = np.asarray(strategies.num_microbatches) <= np.asarray(strategies.pipeline)
    ratio = np.where(is_one_at_a_time, 1.0 / chunks, 1.0)
    *others, whole_gradient_KC = np.broadcast_arrays(*units.state_BKC, ratio)[:-1]
    return replace(units, state_BKC=np.stack([*others, whole_gradient_KC * ratio]))


def _idle(memory: MemoryUnits) -> MemoryUnits:
    nothing = np.zeros(1)
    return replace(memory, dense_moment_C=nothing, moe_moment_C=nothing, dispatch_C=nothing)
