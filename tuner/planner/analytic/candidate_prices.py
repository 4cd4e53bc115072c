"""Seconds and bytes of many candidates: unit costs once, then layers to stages, in bounded pieces.

Unit costs depend on few of a candidate's columns; the distinct ones are priced once. Time is put
together for candidates of one pipeline size and rank order, memory for those of one pipeline size
and number of virtual stages, in pieces whose grids fit a core's cache. The layout of a candidate is
balanced by its own unit times (layouts.py), and moved away from devices that are too full.

`least_s` prices layers cut into equal fractions instead: then no device is slower than another and
none holds more parameters, and whole layers can only add to that. What is paid once is counted at
its least (per_step.py). What they must add to the slowest
device (`least_peak_s`) comes on top, so that no layout of the candidate is faster.

Letters: C candidates, P devices of a pipeline, S stages.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.prices import StepPrice
from tuner.costs.analytic.shapes import Numbers, Stages, Strategies, taken
from tuner.costs.analytic.step import assemble
from tuner.costs.analytic.units import UnitCosts, unit_costs
from tuner.planner.analytic.candidates import (
    TIME_AXES,
    TIME_DEGREES,
    Candidates,
    strategies_of,
)
from tuner.planner.analytic.layouts import (
    PassTimes,
    balanced,
    even,
    interleaved,
    layers_of_stages,
    lean,
    least_peak_s,
    on_devices_of,
    stages_of,
    total_s,
)
from tuner.planner.analytic.memory import (
    bytes_of_devices,
    pieces_alike,
    pieces_of_layouts,
    taken_bytes,
    unit_memory,
)
from tuner.planner.analytic.memory_feasibility import kept_PC
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.per_step import least_once_s, of_all
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints

Floats = npt.NDArray[np.float64]

ROUNDING = 1.0 - 1e-9
"""Bounds are lowered by what sums in another order can differ."""

KINDS_OF_STAGES = ("dense_SC", "moe_SC", "embedding_SC", "head_SC", "mtp_SC")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prices:
    """What the model says of every candidate in one layout of its own."""

    step_s: Floats
    peak_bytes: Floats
    """Of the fullest device."""
    layers_PC: Ints
    """Layers of every device; rows beyond a candidate's pipeline are 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Candidates with the unit costs of their time."""

    question: Question
    candidates: Candidates
    strategies: Strategies
    times: UnitCosts
    """The distinct ones."""
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


def batch_of(question: Question, ways: Ways, candidates: Candidates) -> Batch:
    """Price the distinct units of time.

    The rank orders that are searched differ in the outer groups only, whose collectives no layer
    has, so that units are the same under all of them.
    """
    strategies = strategies_of(question, ways, candidates)
    first, inverse = candidates.same((*TIME_DEGREES, *TIME_AXES))
    units = unit_costs(
        question.shape,
        taken(strategies, first),
        question.hardware,
        question.constants,
        kernels=question.kernels,
    )
    return Batch(
        question=question,
        candidates=candidates,
        strategies=strategies,
        times=units,
        time_of_C=inverse,
    )


def price(
    question: Question, ways: Ways, candidates: Candidates, *, is_lean: bool = False
) -> Prices:
    """Price candidates in time and memory.

    Args:
        question: the model on its machine.
        ways: the axes that the candidates' choices refer to.
        candidates: what to price.
        is_lean: move layers away from devices that are too full in the balanced layout.
    """
    batch = batch_of(question, ways, candidates)
    pieces = tuple(time_pieces(ways, batch))
    layers_PC = np.zeros((int(candidates.rows["pipeline"].max()), len(candidates)), dtype=np.int64)
    for piece in pieces:
        layers_PC[: piece.pipeline, piece.at] = balanced_layers(batch, piece)
    if is_lean:
        bytes_PC = bytes_of_devices(question, batch.strategies, candidates, layers_PC)
        for piece in pieces:
            _move_layers(batch, piece, layers_PC, bytes_PC)
    dense_PC = _dense_on_devices(question, candidates, layers_PC)
    step_s = np.empty(len(candidates))
    for piece in pieces:
        at = np.s_[: piece.pipeline, piece.at]
        stages = _on_devices(question, layers_PC[at], dense_PC[at])
        step_s[piece.at] = assembled(question, piece, stages).step_s
    bytes_PC = bytes_of_devices(question, batch.strategies, candidates, layers_PC)
    return Prices(step_s=step_s, peak_bytes=bytes_PC.max(axis=0), layers_PC=layers_PC)


def least_s(question: Question, ways: Ways, candidates: Candidates) -> Floats:
    """Bound the step of every candidate from below, whatever its layout."""
    batch = batch_of(question, ways, candidates)
    virtual = candidates.rows["virtual_pipeline"]
    found = np.empty(len(candidates))
    for piece in time_pieces(ways, batch):
        even = assembled(question, piece, _fractions(question, piece.pipeline))
        least = np.asarray(even.step_s)
        if piece.pipeline > 1:
            once_s = least_once_s(question, piece.strategies, piece.units, piece.order)
            least = least - even.once_s + once_s + _whole_s(batch, piece)
        found[piece.at] = least * ROUNDING
        # Interleaved stages have one layout.
        fixed = np.flatnonzero(virtual[piece.at] > 1)
        if len(fixed):
            found[piece.at[fixed]] = _balanced_s(batch, piece)[fixed] * ROUNDING
    return found


def _balanced_s(batch: Batch, piece: TimePiece) -> Floats:
    """Seconds of a step in the balanced layout."""
    layers_PC = balanced_layers(batch, piece)
    candidates = batch.candidates.taken(piece.at)
    dense_PC = _dense_on_devices(batch.question, candidates, layers_PC)
    stages = _on_devices(batch.question, layers_PC, dense_PC)
    return np.asarray(assembled(batch.question, piece, stages).step_s)


def time_pieces(ways: Ways, batch: Batch) -> Iterator[TimePiece]:
    """Cut a batch into pieces of one pipeline size and rank order."""
    candidates = batch.candidates
    for at in pieces_alike(candidates, "pipeline", "rank_order"):
        named = ways.choices["rank_order"][candidates.ways["rank_order"][at[0]]]
        pipeline = int(candidates.rows["pipeline"][at[0]])
        yield TimePiece(
            at=at,
            strategies=replace(taken(batch.strategies, at), pipeline=float(pipeline)),
            units=batch.times.taken(batch.time_of_C[at]),
            pipeline=pipeline,
            order=tuple(str(named).split("-")),
        )


def assembled(question: Question, piece: TimePiece, stages: Stages) -> StepPrice:
    """Price the steps of a piece whose devices hold `stages`."""
    return assemble(
        question.shape,
        piece.units,
        piece.strategies,
        question.hardware,
        question.constants,
        stages,
        order=piece.order,
    )


def balanced_layers(batch: Batch, piece: TimePiece) -> Ints:
    """Layers of every device, [P, C], balanced by each candidate's own unit times."""
    question, columns = batch.question, len(piece)
    model, target = question.model, question.capabilities
    virtual = batch.candidates.rows["virtual_pipeline"][piece.at]
    if target.uneven_layout:
        split = balanced(
            model,
            pass_times(question, piece.units, columns),
            pipeline=piece.pipeline,
            least=_fewest(batch, piece),
        )
    else:
        split = even(model, pipeline=piece.pipeline, columns=columns)
    plain_PC = on_devices_of(model, split, pipeline=piece.pipeline)
    if (virtual == 1).all():
        return plain_PC
    alike_PC = interleaved(model, pipeline=piece.pipeline, virtual=virtual)
    return np.where(virtual > 1, alike_PC, plain_PC)


def pass_times(question: Question, units: UnitCosts, columns: int) -> PassTimes:
    """Both passes of one micro-batch through each kind of layer."""

    def both(*costs: Numbers) -> Floats:
        return np.broadcast_to(np.asarray(sum(costs), dtype=np.float64), columns)

    mtp = question.shape.mtp_layers
    return PassTimes(
        dense_s=both(units.dense.forward_s, units.dense.backward_s),
        moe_s=both(units.moe.forward_s, units.moe.backward_s),
        embedding_s=both(units.embedding.forward_s, units.embedding.backward_s),
        end_s=both(units.head.forward_s, units.head.backward_s)
        + mtp * both(units.mtp.forward_s, units.mtp.backward_s),
    )


def _dense_on_devices(question: Question, candidates: Candidates, layers_PC: Ints) -> Ints:
    """Layers without experts on every device, [P, C]."""
    model = question.model
    if not model.num_moe_layers:
        return layers_PC
    dense_PC = np.zeros_like(layers_PC)
    if model.num_moe_layers == model.num_layers:
        return dense_PC
    for at, pipeline, virtual in pieces_of_layouts(candidates, layers_PC):
        layers_SC = layers_of_stages(layers_PC[:pipeline, at[:1]], virtual=virtual)
        dense_SC = stages_of(model, layers_SC).dense_SC.reshape(virtual, pipeline, 1)
        dense_PC[:pipeline, at] = dense_SC.sum(axis=0)
    return dense_PC


def _on_devices(question: Question, layers_PC: Ints, dense_PC: Ints) -> Stages:
    """What lies on every device, its stages together, which is all that a step's time asks."""
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
        mtp_SC=question.shape.mtp_layers * last,
    )


def _fewest(batch: Batch, piece: TimePiece) -> Ints:
    """Layers that every device must hold."""
    virtual = batch.candidates.rows["virtual_pipeline"][piece.at]
    return np.zeros_like(virtual) if batch.question.capabilities.empty_stages else virtual


def _move_layers(batch: Batch, piece: TimePiece, layers_PC: Ints, bytes_PC: Floats) -> None:
    """Put lean layouts in place of those that do not fit, where a lean one is possible."""
    question = batch.question
    if piece.pipeline == 1 or not question.capabilities.uneven_layout:
        return
    at = np.s_[: piece.pipeline, piece.at]
    room_PC = (question.memory_limit_bytes - bytes_PC[at]) / _layer_bytes(batch, piece)
    lean_PC, is_possible = lean(
        question.model,
        pass_times(question, piece.units, len(piece)),
        most_PC=layers_PC[at] + np.floor(room_PC).astype(np.int64),
        least=_fewest(batch, piece),
    )
    has_stage_each = batch.candidates.rows["virtual_pipeline"][piece.at] == 1
    moved = is_possible & has_stage_each & (room_PC < 0.0).any(axis=0)
    layers_PC[at] = np.where(moved, lean_PC, layers_PC[at])


def _layer_bytes(batch: Batch, piece: TimePiece) -> Floats:
    """What one more layer costs each device, [P, C]."""
    candidates = batch.candidates.taken(piece.at)
    units, unit_of = unit_memory(batch.question, piece.strategies, candidates)
    own = taken_bytes(units, unit_of)
    with_pools = 1.0 + own.unused_ratio_C + own.pool_ratio_C
    kept = kept_PC(piece.strategies) * with_pools * own.saved_KC[1]
    found: Floats = own.state_BKC[:3, 1].sum(axis=0) + kept
    return found


def _fractions(question: Question, pipeline: int) -> Stages:
    shape = question.shape

    def each(count: Numbers) -> Floats:
        return np.full((pipeline, 1), float(count) / pipeline)

    return Stages(
        dense_SC=each(shape.dense_layers),
        moe_SC=each(shape.moe_layers),
        embedding_SC=each(1.0),
        head_SC=each(1.0),
        mtp_SC=each(shape.mtp_layers),
    )


def _whole_s(batch: Batch, piece: TimePiece) -> Floats:
    """What whole layers must add to layers in equal fractions."""
    model, s, p = batch.question.model, piece.strategies, piece.pipeline
    times = times_of_kinds(batch.question, piece)
    beyond_s = least_peak_s(model, times, pipeline=p) - total_s(model, times) / p
    counted_s = (s.num_microbatches - 1.0 / s.virtual_pipeline) * np.maximum(beyond_s, 0.0)
    # The slowest device's weight gradients fill no bubble; it may have more than its share.
    lost_s = -2.0 * filled_s(batch.question, piece.units) / p
    return np.where(np.asarray(s.zero_bubble) > 0.0, lost_s, counted_s)


def filled_s(question: Question, units: UnitCosts) -> Numbers:
    """Weight gradients of one micro-batch on all devices, which a schedule may put off."""
    return of_all(question.shape, units, "weight_s")


def times_of_kinds(question: Question, piece: TimePiece) -> PassTimes:
    """Both passes of each kind of layer, with what sharding and offloading add to them."""
    s = piece.strategies
    if not np.any(s.zero_stage > 1.0) and not np.any(s.activation_offload):
        return pass_times(question, piece.units, len(piece))
    one = np.eye(len(KINDS_OF_STAGES))[:, :, None]
    kinds = Stages(**dict(zip(KINDS_OF_STAGES, one, strict=True)))
    alone = replace(piece, strategies=replace(s, pipeline=float(len(one))))
    found = assembled(question, alone, kinds)
    both = np.broadcast_to(found.forward_s_SC + found.backward_s_SC, (len(one), len(piece)))
    of_kind = dict(zip(KINDS_OF_STAGES, both, strict=True))
    return PassTimes(
        dense_s=of_kind["dense_SC"],
        moe_s=of_kind["moe_SC"],
        embedding_s=of_kind["embedding_SC"],
        end_s=of_kind["head_SC"] + question.shape.mtp_layers * of_kind["mtp_SC"],
    )
