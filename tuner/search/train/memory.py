"""Memory of many candidates: in given layouts, and whether they can fit in any.

In given layouts unit bytes are priced once, then counted per layout. Candidates are cut into pieces
of one pipeline size, number of virtual stages and layout, since candidates with the same stages
share the counts of micro-batches in flight.

Whether any layout fits is decided without building one. The bytes of a device grow by the same
amount with every further layer of a kind. One and two layers of the common kind on every device of
a plain pipeline give that slope; leading dense layers, which are small, are left out. With several
stages a device keeps more micro-batches of each layer:

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

Rows and groups of options are checked at the option of least memory that is left. The highest ZeRO
stage does not always hold the least, since it gathers weights, so they fit if they do under one of
the stages that are left. Every other open knob takes its choice of least memory.

Letters: C candidates, P devices of a pipeline, d one of them, p their number, v stages of each, S
stages, m micro-batches; A axes, Z stages of ZeRO.
"""

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.columns import Strategies
from tuner.config.knobs import OFFLOADS
from tuner.config.shapes import Stages, taken
from tuner.costs.train.host_memory import offloaded_bytes, pipeline_inside
from tuner.costs.train.memory import assemble_memory
from tuner.costs.train.memory_units import MemoryUnits, unit_bytes
from tuner.search.train.candidates import MEMORY_AXES, MEMORY_DEGREES, Candidates, to_strategies
from tuner.search.train.degrees import Table, take_rows
from tuner.search.train.layouts import layers_of_stages, to_stages
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Mask

PIECE = 4096
"""Candidates that are assembled at once; their arrays fit a core's cache."""


def unit_memory(
    problem: TrainProblem, strategies: Strategies, candidates: Candidates
) -> tuple[MemoryUnits, Ints]:
    """Bytes of one layer of each kind for the distinct candidates, and the inverse index."""
    first, inverse = candidates.same((*MEMORY_DEGREES, *MEMORY_AXES))
    units = unit_bytes(
        problem.shape,
        taken(strategies, first),
        problem.hardware,
        constants=problem.memory_constants,
    )
    return units, inverse


def take_units(units: MemoryUnits, chosen: Ints) -> MemoryUnits:
    """Gather the unit bytes of some candidates."""

    def kept(array: Floats) -> Floats:
        return array if array.shape[-1] == 1 else array[..., chosen]

    return MemoryUnits(
        **{field.name: kept(getattr(units, field.name)) for field in fields(MemoryUnits)}
    )


def bytes_of_devices(
    problem: TrainProblem, strategies: Strategies, candidates: Candidates, layers_PC: Ints
) -> Floats:
    """Bytes of every device, [P, C]; 0 beyond a candidate's pipeline."""
    units, unit_of_C = unit_memory(problem, strategies, candidates)
    bytes_PC = np.zeros(layers_PC.shape)
    for at, pipeline, virtual in pieces_of_layouts(candidates, layers_PC):
        layers_SC = layers_of_stages(layers_PC[:pipeline, at[:1]], virtual=virtual)
        uniform = replace(
            taken(strategies, at), pipeline=float(pipeline), virtual_pipeline=float(virtual)
        )
        memory = assemble_memory(
            take_units(units, unit_of_C[at]), uniform, to_stages(problem.model, layers_SC)
        )
        bytes_PC[:pipeline, at] = memory.total_PC
    return bytes_PC


def host_bytes(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates, layers_PC: Ints
) -> Floats:
    """Bytes of a node's memory that each candidate offloads."""
    strategies, needed_C = to_strategies(problem, options, candidates), np.zeros(len(candidates))
    moved_C = needed_C + sum(getattr(strategies, name) for name in OFFLOADS)
    orders = np.array([pipeline_inside(str(order)) for order in options.choices["rank_order"]])
    inside_C, chosen = orders[candidates.options["rank_order"]], np.flatnonzero(moved_C > 0.0)
    for at, pipeline, virtual in pieces_of_layouts(candidates.taken(chosen), layers_PC[:, chosen]):
        same = chosen[at]
        layers_SC = layers_of_stages(layers_PC[:pipeline, same[:1]], virtual=virtual)
        degrees = {"pipeline": float(pipeline), "virtual_pipeline": float(virtual)}
        parts = offloaded_bytes(
            problem.shape,
            replace(taken(strategies, same), **degrees),
            problem.hardware,
            to_stages(problem.model, layers_SC),
            constants=problem.memory_constants,
            devices_per_node=problem.devices_per_node,
            inside_C=inside_C[same],
        )
        needed_C[same] = sum(parts.values())
    return needed_C


def pieces_of_layouts(candidates: Candidates, layers_PC: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Cut candidates into pieces of one pipeline size, depth and layout."""
    rows = candidates.rows
    for at in uniform_pieces(candidates, "pipeline", "virtual_pipeline"):
        pipeline, virtual = (int(rows[name][at[0]]) for name in ("pipeline", "virtual_pipeline"))
        for same in _uniform_layouts(layers_PC[:pipeline, at]):
            yield at[same], pipeline, virtual


def uniform_pieces(candidates: Candidates, *names: str) -> Iterator[Ints]:
    """Cut candidates into pieces that agree in the named columns."""
    _, group = candidates.same(names)
    for of_group in _of_groups(group):
        for start in range(0, len(of_group), PIECE):
            yield of_group[start : start + PIECE]


def _uniform_layouts(layers_PC: Ints) -> Iterator[Ints]:
    if (layers_PC == layers_PC[:, :1]).all():
        yield np.arange(layers_PC.shape[1])
        return
    rows = np.ascontiguousarray(layers_PC.T.astype(np.int16))
    _, group = np.unique(rows.view(f"V{rows.shape[1] * rows.itemsize}"), return_inverse=True)
    yield from _of_groups(group.ravel())


def _of_groups(group: Ints) -> Iterator[Ints]:
    order = np.argsort(group, kind="stable")
    boundaries = np.flatnonzero(np.diff(group[order])) + 1
    yield from (members for members in np.split(order, boundaries) if len(members))


def may_fit(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates, *, is_idle: bool = False
) -> Mask:
    """Return whether each candidate may fit in some layout; False is proven."""
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
    single_PC, double_PC = (
        assemble_memory(
            units, plain, replace(stages, **{name: np.full_like(stages.dense_SC, count)})
        ).total_PC
        for count in (1.0, 2.0)
    )
    with_pools = 1.0 + units.unused_ratio_C + units.pool_ratio_C
    more_PC = (kept_PC(strategies) - kept_PC(plain)) * with_pools * units.saved_KC[kind]
    least_PC = np.maximum(double_PC - single_PC, 1.0)
    slope_PC = least_PC + np.maximum(more_PC, 0.0)
    left_PC = np.maximum(problem.memory_limit_bytes - (single_PC - (double_PC - single_PC)), 0.0)
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


def row_fits(problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table) -> Mask:
    """Rows of which some option may fit."""
    count = len(rows["tensor"])
    min_memory_A = _offloaded(table)
    min_memory_A[table.axes.index("recompute")] = len(options.choices["recompute"]) - 1
    min_memory_CA = np.tile(min_memory_A, (count, 1))
    return _fits(
        problem, options, table, rows, min_memory_CA, _any_stage(table, count), is_idle=True
    )


def fits_without_recompute(
    problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table, dispatch: Ints
) -> Mask:
    """Rows that may fit at a dispatch setting without recomputation, in one chunk."""
    min_memory_CA = table.dispatch_DA[dispatch] + _offloaded(table)
    return _fits(problem, options, table, rows, min_memory_CA, _any_stage(table, len(dispatch)))


def no_recompute_level_fits(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Mask:
    """Groups of which some option may fit: checked with full recomputation."""
    whole = np.full(len(candidates), len(options.choices["recompute"]) - 1)
    whole_recompute = Candidates(
        rows=candidates.rows, options={**candidates.options, "recompute": whole}
    )
    return may_fit(problem, options, whole_recompute, is_idle=True)


def recompute_level_fits(
    problem: TrainProblem, options: OptionSpace, table: OptionTable, rows: Table, recompute: Ints
) -> Mask:
    """Rows of which some option of a recompute group may fit."""
    min_memory_CA, stages_CZ = table.min_memory_RA[recompute], table.zero_RZ[recompute]
    return _fits(problem, options, table, rows, min_memory_CA, stages_CZ)


def _offloaded(table: OptionTable) -> Ints:
    offloaded_A: Ints = table.min_memory_RA.max(axis=0, initial=0) * np.isin(table.axes, OFFLOADS)
    return offloaded_A


def _any_stage(table: OptionTable, count: int) -> Mask:
    return np.tile(table.zero_RZ.any(axis=0), (count, 1))


def _fits(
    problem: TrainProblem,
    options: OptionSpace,
    table: OptionTable,
    rows: Table,
    min_memory_CA: Ints,
    stages_CZ: Mask,
    *,
    is_idle: bool = False,
) -> Mask:
    fits_C = np.zeros(len(min_memory_CA), dtype=np.bool_)
    at = table.axes.index("zero_stage")
    for stage in reversed(range(stages_CZ.shape[1])):
        left = np.flatnonzero(~fits_C & stages_CZ[:, stage])
        if not len(left):
            continue
        options_CA = min_memory_CA[left]
        options_CA[:, at] = stage
        some = Candidates(
            rows=take_rows(rows, left),
            options=table.columns(options_CA),
        )
        fits_C[left] = may_fit(problem, options, some, is_idle=is_idle)
    return fits_C
