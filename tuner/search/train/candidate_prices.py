"""Step time and memory of many candidates: unit costs once, then pipeline layouts.

Unit costs depend on few of a candidate's columns, so the distinct combinations are priced once.
Time is assembled for candidates of one pipeline size and rank order, memory for those of one
pipeline size and number of virtual stages, in pieces whose arrays fit a core's cache. The layout of
a candidate is balanced by its own unit times (layouts.py); where it does not fit in memory, layers
are moved off the devices that are too full.

`candidate_bound_s` prices layers split into equal fractions instead. Then no device is slower than
another and none holds more parameters, and whole layers can only add to that. Costs once per step
are counted at their least: parameters are those of the mean device, and overlap leaves no more than
its share exposed, however little there is to overlap with. What whole layers must add to the
slowest device (`min_peak_s`) comes on top, so that no layout of the candidate is faster.

A device that is too full gives layers to others, which slows down the slowest of them.
`candidate_bound_in_memory_s` therefore looks for the fastest slowest device (layouts.py) under the
most layers that each device can hold (memory.py).

Letters: C candidates, P devices of a pipeline, S stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import ModelShape, Stages, taken
from tuner.costs.train.prices import StepPrice
from tuner.costs.train.step import assemble, optimizer_step_s
from tuner.costs.train.units import UnitCosts, unit_costs
from tuner.prices.train.collectives import (
    MEGATRON_ORDER,
    Group,
    all_gather_s,
    all_reduce_s,
    between_copies,
    groups,
    num_copies,
    of_one_copy,
)
from tuner.search.train.candidates import (
    TIME_AXES,
    TIME_DEGREES,
    Candidates,
    to_strategies,
)
from tuner.search.train.layouts import (
    PassTimes,
    balanced_split,
    even_split,
    interleaved_layers,
    layers_of_stages,
    min_peak_s,
    peak_under,
    split_to_fit,
    to_device_layers,
    to_stages,
    total_s,
)
from tuner.search.train.memory import (
    bytes_of_devices,
    host_bytes,
    kept_PC,
    layer_capacity,
    pieces_of_layouts,
    take_units,
    uniform_pieces,
    unit_memory,
)
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem

ROUNDING = 1.0 - 1e-9
"""Margin of bounds for the rounding of sums in another order."""

KINDS_OF_STAGES = ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CandidatePrices:
    """Predictions for every candidate, each in a layout of its own."""

    step_s: Floats
    peak_bytes: Floats
    """Peak bytes of the device with the highest peak."""
    layers_PC: Ints
    """Layers of every device; rows beyond a candidate's pipeline are 0."""
    full: Ints
    """Candidates whose balanced layout exceeds memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Candidates with the unit costs of their time."""

    problem: TrainProblem
    candidates: Candidates
    strategies: Strategies
    times: UnitCosts
    """Distinct unit costs; `time_of_C` has each candidate's."""
    time_of_C: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimePiece:
    """Candidates of one pipeline size and rank order."""

    at: Ints
    strategies: Strategies
    units: UnitCosts
    pipeline: int
    order: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.at)

    def taken(self, at: Ints) -> "TimePiece":
        """Return some of its candidates."""
        return replace(
            self,
            at=self.at[at],
            strategies=taken(self.strategies, at),
            units=self.units.taken(at),
        )


def price_batch(problem: TrainProblem, options: OptionSpace, candidates: Candidates) -> Batch:
    """Price the distinct unit costs of time.

    The rank orders that are searched differ only in outer groups, whose collectives no layer has,
    so that unit costs are the same under all of them.
    """
    strategies = to_strategies(problem, options, candidates)
    first, inverse = candidates.same((*TIME_DEGREES, *TIME_AXES))
    units = unit_costs(
        problem.shape,
        taken(strategies, first),
        problem.hardware,
        problem.constants,
        prices=problem.prices,
    )
    return Batch(
        problem=problem,
        candidates=candidates,
        strategies=strategies,
        times=units,
        time_of_C=inverse,
    )


def price(
    problem: TrainProblem,
    options: OptionSpace,
    candidates: Candidates,
    *,
    is_moved_to_fit: bool = False,
) -> CandidatePrices:
    """Price candidates in time and memory.

    Args:
        problem: model, devices and limits.
        options: axes that the candidates' choices refer to.
        candidates: to price.
        is_moved_to_fit: move layers off devices that are too full in the balanced layout, where
            that fits.
    """
    batch = price_batch(problem, options, candidates)
    pieces = tuple(time_pieces(options, batch))
    layers_PC = np.zeros((int(candidates.rows["pipeline"].max()), len(candidates)), dtype=np.int64)
    for piece in pieces:
        layers_PC[: piece.pipeline, piece.at] = balanced_layers(batch, piece)
    bytes_PC = bytes_of_devices(problem, batch.strategies, candidates, layers_PC)
    full = np.flatnonzero(bytes_PC.max(axis=0) > problem.memory_limit_bytes)
    if len(full) and is_moved_to_fit:
        for piece in pieces:
            _move_layers(
                batch, piece.taken(np.flatnonzero(np.isin(piece.at, full))), layers_PC, bytes_PC
            )
        bytes_PC[:, full] = bytes_of_devices(
            problem, taken(batch.strategies, full), candidates.taken(full), layers_PC[:, full]
        )
    dense_PC = _dense_on_devices(problem, candidates, layers_PC)
    step_s = np.empty(len(candidates))
    for piece in pieces:
        at = np.s_[: piece.pipeline, piece.at]
        stages = _on_devices(problem, layers_PC[at], dense_PC[at])
        step_s[piece.at] = assemble_step(problem, piece, stages).step_s
    peak_bytes = bytes_PC.max(axis=0)
    if problem.host_limit_bytes is not None:
        needed_C = host_bytes(problem, options, candidates, layers_PC)
        peak_bytes[needed_C > problem.host_limit_bytes] = np.inf
    return CandidatePrices(step_s=step_s, peak_bytes=peak_bytes, layers_PC=layers_PC, full=full)


def candidate_bound_s(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Floats:
    """Lower bound on the step time of every candidate in any layout, in seconds."""
    batch = price_batch(problem, options, candidates)
    virtual = candidates.rows["virtual_pipeline"]
    bound_s = np.empty(len(candidates))
    for piece in time_pieces(options, batch):
        fractional = assemble_step(problem, piece, _fractions(problem, piece.pipeline))
        least = np.asarray(fractional.step_s)
        if piece.pipeline > 1:
            once_s = per_step_bound_s(problem, piece.strategies, piece.units, piece.order)
            least = least - fractional.once_s + once_s + _whole_s(batch, piece)
        bound_s[piece.at] = least * ROUNDING
        # Interleaved stages have one layout.
        fixed = np.flatnonzero(virtual[piece.at] > 1)
        if len(fixed):
            bound_s[piece.at[fixed]] = _balanced_s(batch, piece)[fixed] * ROUNDING
    return bound_s


def _balanced_s(batch: Batch, piece: TimePiece) -> Floats:
    """Seconds of a step in the balanced layout."""
    layers_PC = balanced_layers(batch, piece)
    candidates = batch.candidates.taken(piece.at)
    dense_PC = _dense_on_devices(batch.problem, candidates, layers_PC)
    stages = _on_devices(batch.problem, layers_PC, dense_PC)
    return np.asarray(assemble_step(batch.problem, piece, stages).step_s)


def time_pieces(options: OptionSpace, batch: Batch) -> Iterator[TimePiece]:
    """Cut a batch into pieces of one pipeline size and rank order."""
    candidates = batch.candidates
    for at in uniform_pieces(candidates, "pipeline", "rank_order"):
        named = options.choices["rank_order"][candidates.options["rank_order"][at[0]]]
        pipeline = int(candidates.rows["pipeline"][at[0]])
        yield TimePiece(
            at=at,
            strategies=replace(taken(batch.strategies, at), pipeline=float(pipeline)),
            units=batch.times.taken(batch.time_of_C[at]),
            pipeline=pipeline,
            order=tuple(str(named).split("-")),
        )


def assemble_step(problem: TrainProblem, piece: TimePiece, stages: Stages) -> StepPrice:
    """Price the steps of a piece whose devices hold `stages`."""
    return assemble(
        problem.shape,
        piece.units,
        piece.strategies,
        problem.hardware,
        problem.constants,
        stages,
        order=piece.order,
    )


def balanced_layers(batch: Batch, piece: TimePiece) -> Ints:
    """Layers of every device, [P, C], balanced by each candidate's own unit times."""
    problem, columns = batch.problem, len(piece)
    model, target = problem.model, problem.capabilities
    virtual = batch.candidates.rows["virtual_pipeline"][piece.at]
    if target.uneven_layout:
        split = balanced_split(
            model,
            pass_times(problem, piece.units, columns),
            pipeline=piece.pipeline,
            least=_fewest(batch, piece),
        )
    else:
        split = even_split(model, pipeline=piece.pipeline, columns=columns)
    plain_PC = to_device_layers(model, split, pipeline=piece.pipeline)
    if (virtual == 1).all():
        return plain_PC
    interleaved_PC = interleaved_layers(model, pipeline=piece.pipeline, virtual=virtual)
    return np.where(virtual > 1, interleaved_PC, plain_PC)


def pass_times(problem: TrainProblem, units: UnitCosts, columns: int) -> PassTimes:
    """Both passes of one micro-batch through each kind of layer."""

    def both(*costs: Numbers) -> Floats:
        return np.broadcast_to(np.asarray(sum(costs), dtype=np.float64), columns)

    mtp = problem.shape.mtp_layers
    return PassTimes(
        dense_s=both(units.dense.forward_s, units.dense.backward_s),
        moe_s=both(units.moe.forward_s, units.moe.backward_s),
        embedding_s=both(units.embedding.forward_s, units.embedding.backward_s),
        end_s=both(units.head.forward_s, units.head.backward_s)
        + mtp * both(units.mtp.forward_s, units.mtp.backward_s),
    )


def _dense_on_devices(problem: TrainProblem, candidates: Candidates, layers_PC: Ints) -> Ints:
    """Layers without experts on every device, [P, C]."""
    model = problem.model
    if not model.num_moe_layers:
        return layers_PC
    dense_PC = np.zeros_like(layers_PC)
    if model.num_moe_layers == model.num_layers:
        return dense_PC
    for at, pipeline, virtual in pieces_of_layouts(candidates, layers_PC):
        layers_SC = layers_of_stages(layers_PC[:pipeline, at[:1]], virtual=virtual)
        dense_SC = to_stages(model, layers_SC).dense_SC.reshape(virtual, pipeline, 1)
        dense_PC[:pipeline, at] = dense_SC.sum(axis=0)
    return dense_PC


def _on_devices(problem: TrainProblem, layers_PC: Ints, dense_PC: Ints) -> Stages:
    """Return the layers of each device, its stages merged; step time depends on nothing else."""
    both = np.stack((layers_PC, dense_PC))
    if (both == both[..., :1]).all():
        layers_PC, dense_PC = layers_PC[:, :1], dense_PC[:, :1]
    pipeline = len(layers_PC)
    first, last = np.zeros((pipeline, 1)), np.zeros((pipeline, 1))
    first[0], last[-1] = 1.0, 1.0
    return Stages(
        dense_SC=dense_PC.astype(np.float64),
        moe_SC=(layers_PC - dense_PC).astype(np.float64),
        embedding_SC=first,
        head_SC=last,
        mtp_SC=problem.shape.mtp_layers * last,
    )


def _fewest(batch: Batch, piece: TimePiece) -> Ints:
    """Layers that every device must hold."""
    virtual = batch.candidates.rows["virtual_pipeline"][piece.at]
    return np.zeros_like(virtual) if batch.problem.capabilities.empty_stages else virtual


def _move_layers(batch: Batch, piece: TimePiece, layers_PC: Ints, bytes_PC: Floats) -> None:
    """Replace layouts that do not fit by ones that do, where there are any."""
    problem = batch.problem
    if not len(piece) or piece.pipeline == 1 or not problem.capabilities.uneven_layout:
        return
    at = np.s_[: piece.pipeline, piece.at]
    room_PC = (problem.memory_limit_bytes - bytes_PC[at]) / _layer_bytes(batch, piece)
    fitting_PC, is_possible = split_to_fit(
        problem.model,
        pass_times(problem, piece.units, len(piece)),
        most_PC=layers_PC[at] + np.floor(room_PC).astype(np.int64),
        least=_fewest(batch, piece),
    )
    has_stage_each = batch.candidates.rows["virtual_pipeline"][piece.at] == 1
    moved = is_possible & has_stage_each & (room_PC < 0.0).any(axis=0)
    layers_PC[at] = np.where(moved, fitting_PC, layers_PC[at])


def _layer_bytes(batch: Batch, piece: TimePiece) -> Floats:
    """Return the bytes that one more layer costs each device, [P, C]."""
    candidates = batch.candidates.taken(piece.at)
    units, unit_of = unit_memory(batch.problem, piece.strategies, candidates)
    memory = take_units(units, unit_of)
    with_pools = 1.0 + memory.unused_ratio_C + memory.pool_ratio_C
    kept = kept_PC(piece.strategies) * with_pools * memory.saved_KC[1]
    layer_bytes: Floats = memory.state_BKC[:3, 1].sum(axis=0) + kept
    return layer_bytes


def _fractions(problem: TrainProblem, pipeline: int) -> Stages:
    shape = problem.shape

    def per_stage(count: Numbers) -> Floats:
        return np.full((pipeline, 1), float(count) / pipeline)

    return Stages(
        dense_SC=per_stage(shape.dense_layers),
        moe_SC=per_stage(shape.moe_layers),
        embedding_SC=per_stage(1.0),
        head_SC=per_stage(1.0),
        mtp_SC=per_stage(shape.mtp_layers),
    )


def _whole_s(batch: Batch, piece: TimePiece) -> Floats:
    """Seconds that whole layers add to equal fractions of layers."""
    model, s, p = batch.problem.model, piece.strategies, piece.pipeline
    times = times_of_kinds(batch.problem, piece)
    beyond_s = min_peak_s(model, times, pipeline=p) - total_s(model, times) / p
    counted_s = (s.num_microbatches - 1.0 / s.virtual_pipeline) * np.maximum(beyond_s, 0.0)
    # The slowest device's weight gradients fill no bubble; it may have more than its share.
    lost_s = -2.0 * deferred_wgrad_s(batch.problem, piece.units) / p
    return np.where(np.asarray(s.zero_bubble) > 0.0, lost_s, counted_s)


def deferred_wgrad_s(problem: TrainProblem, units: UnitCosts) -> Numbers:
    """Weight gradients of one micro-batch on all devices, which a schedule may defer."""
    return sum_over_layers(problem.shape, units, "weight_s")


def times_of_kinds(problem: TrainProblem, piece: TimePiece) -> PassTimes:
    """Both passes of each kind of layer, with the traffic of sharding and offloading."""
    s = piece.strategies
    if not np.any(s.zero_stage > 1.0) and not np.any(s.activation_offload):
        return pass_times(problem, piece.units, len(piece))
    dense_s, moe_s, embedding_s, head_s, mtp_s = seconds_of_kinds(
        problem, piece.units, s, len(piece), order=piece.order
    )
    return PassTimes(
        dense_s=dense_s,
        moe_s=moe_s,
        embedding_s=embedding_s,
        end_s=head_s + problem.shape.mtp_layers * mtp_s,
    )


def seconds_of_kinds(
    problem: TrainProblem,
    units: UnitCosts,
    strategies: Strategies,
    columns: int,
    *,
    order: tuple[str, ...] = MEGATRON_ORDER,
) -> Floats:
    """Both passes of one micro-batch through a layer of each kind of `KINDS_OF_STAGES`, [K, C]."""
    identity = np.eye(len(KINDS_OF_STAGES))[:, :, None]
    price = assemble(
        problem.shape,
        units,
        replace(strategies, pipeline=float(len(identity))),
        problem.hardware,
        problem.constants,
        Stages(**dict(zip(KINDS_OF_STAGES, identity, strict=True))),
        order=order,
    )
    return np.broadcast_to(price.forward_s_SC + price.backward_s_SC, (len(identity), columns))


def candidate_bound_in_memory_s(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Floats:
    """Lower bound on the step time over layouts that fit; infinite where none does.

    For candidates whose balanced layout does not fit.
    """
    batch = price_batch(problem, options, candidates)
    model = problem.model
    most_PC = layer_capacity(problem, options, candidates)
    bound_s = candidate_bound_s(problem, options, candidates)
    for piece in time_pieces(options, batch):
        s, p = piece.strategies, piece.pipeline
        times = times_of_kinds(problem, piece)
        count = model.num_moe_layers or model.num_layers
        virtual = candidates.rows["virtual_pipeline"][piece.at]
        capped_s = peak_under(model, times, most_PC=most_PC[:p, piece.at], count=count)
        beyond_s = np.maximum(capped_s - min_peak_s(model, times, pipeline=p), 0.0)
        most_s = np.where(np.isinf(beyond_s), np.inf, 0.0)
        beyond_s = np.where(np.isinf(beyond_s), 0.0, beyond_s)
        more_s = (s.num_microbatches - 1.0 / s.virtual_pipeline) * beyond_s
        plain = np.asarray(s.zero_bubble) == 0.0
        more_s = np.where(plain, more_s, 0.0) + most_s
        # Interleaved stages have one layout, and it is known not to fit.
        bound_s[piece.at] += np.where(virtual > 1, np.inf, more_s)
    return bound_s


def per_step_bound_s(
    problem: TrainProblem, strategies: Strategies, units: UnitCosts, order: tuple[str, ...]
) -> Numbers:
    """Lower bound on the costs once per step of every candidate, in seconds."""
    s, constants = strategies, problem.constants
    laid = groups(s, problem.hardware, order=order)
    dense = sum_over_layers(problem.shape, units, "trained") / s.pipeline
    experts = sum_over_layers(problem.shape, units, "expert_trained") / s.pipeline
    reduction_s = _gradient_reduction_s(problem, s, dense, laid.shared)
    reduction_s = reduction_s + _gradient_reduction_s(problem, s, experts, laid.expert_data)
    all_gather_total_s = _parameter_all_gather_s(problem, s, dense, laid.shared)
    all_gather_total_s = all_gather_total_s + _parameter_all_gather_s(
        problem, s, experts, laid.expert_data
    )
    visible_s = reduction_s * np.where(
        np.greater(s.overlap_gradients, 0.0), constants.gradient_exposed_ratio, 1.0
    ) + all_gather_total_s * np.where(
        np.greater(s.overlap_parameters, 0.0), constants.parameter_exposed_ratio, 1.0
    )
    update_s = optimizer_step_s(
        s, laid, problem.hardware, constants, parameters=dense, experts=experts
    )
    return visible_s + update_s + constants.step_fixed_s


def sum_over_layers(shape: ModelShape, units: UnitCosts, name: str) -> Numbers:
    """Sum a cost over all layers, the embedding and the LM head."""
    parts = (
        (shape.dense_layers, units.dense),
        (shape.moe_layers, units.moe),
        (shape.mtp_layers, units.mtp),
        (1.0, units.embedding),
        (1.0, units.head),
    )
    total: Numbers = 0.0
    for count, cost in parts:
        total = total + count * getattr(cost, name)
    return total


def _gradient_reduction_s(
    problem: TrainProblem, s: Strategies, parameters: Numbers, group: Group
) -> Numbers:
    total = parameters * s.gradient_bytes
    reduced = all_reduce_s(total, group, problem.hardware, problem.constants)
    copies = num_copies(s)
    near = of_one_copy(group, copies)
    scattered = all_gather_s(total, near, problem.hardware, problem.constants)
    if np.any(np.greater(copies, 1.0)):
        copies_group = between_copies(group, copies)
        scattered = scattered + all_reduce_s(
            total / near.ranks, copies_group, problem.hardware, problem.constants
        )
    moved = np.where(np.equal(s.zero_stage, 0.0), reduced, scattered)
    return np.where(np.less(s.zero_stage, 2.0) & np.greater(parameters, 0.0), moved, 0.0)


def _parameter_all_gather_s(
    problem: TrainProblem, s: Strategies, parameters: Numbers, group: Group
) -> Numbers:
    total = parameters * s.weight_bytes
    near = of_one_copy(group, num_copies(s))
    gathered = all_gather_s(total, near, problem.hardware, problem.constants)
    once = np.equal(s.zero_stage, 1.0) | np.equal(s.zero_stage, 2.0)
    return np.where(once & np.greater(parameters, 0.0), gathered, 0.0)
