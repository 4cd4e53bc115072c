"""Lower bounds on the step of a candidate over given pools, and whether any partition fits.

A pool's throughput is at most that of its best kind of layer: with t the seconds of a kind and rate
= max over kinds of t_first / t_pool, relative to the first pool, the stages of all pools together
need

    pace >= W_first / sum over stages of rate

seconds per micro-batch. Whole layers need more. The j-th stage from the end of a chain keeps at
least min(j, m) micro-batches in flight; r_j is the number of layers that a pool's memory then has
room for. At pace P a stage of common layers of b seconds each has min(floor(P / b), r_j) of them,
and

    pace >= the smallest P at which some order of the pools has all common layers

The last pool runs any number of its stages, and all other pools come before them (each directly
before, which can only overestimate the room with more than two pools). The last stage also has the
last layer, the head and multi-token prediction, and the first stages the dense layers that a model
begins with. P is found by bisection, from below; if no P is enough nothing fits. At this pace the
fastest pools cannot have all layers, which bounds the sum over stages:

    step >= sum D(P) + (m - 1) P + once,    sum D(P) filling the fastest pools up to P first

As P grows by one second, sum D falls by at most F = sum over stages of (b_slowest / b - 1), so the
smallest P gives the bound where m - 1 >= F; elsewhere sum D counts every layer on its fastest pool.
`once` is at least the minimum over pools of the fixed part plus the exposed gradient reduction and
parameter all-gather under infinitely long passes, for an even share of the parameters (some stage
has at least that).

Letters: C candidates, J positions from the end, K kinds, P pools.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from profilers.steps.config import LayerKind
from tuner.arrays import Floats, Ints
from tuner.config.shapes import Stages, taken
from tuner.costs.train.step import assemble
from tuner.costs.train.units import KINDS, UnitCosts
from tuner.search.train.candidate_prices import KINDS_OF_STAGES, ROUNDING
from tuner.search.train.pools.stage_prices import (
    DENSE,
    HEAD,
    MOE,
    MTP,
    PoolMemory,
    PoolPricing,
    StageBytes,
    counts_K,
)
from tuner.search.train.rules import Mask

ENDLESS_S: Final = 1e12
"""Length of passes that hide everything that can overlap with them."""

HALVINGS: Final = 20
"""Bisection steps for the pace: to a millionth of its range."""

ABOVE: Final = 1.0 + 1e-9
"""Slack for floating-point sums in another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnceParts:
    """Lower bound on what a stage pays once per step, linear in its layers."""

    fixed_C: Floats
    per_layer_KC: Floats
    """[2, C]: layers without and with experts."""


def most_stages(pools: Sequence[PoolMemory]) -> Ints:
    """Stages that all pools together could run, with at least one layer each."""
    stages: Ints = np.minimum(
        sum(on.max_stages_C for on in pools), pools[0].problem.model.num_layers
    )
    return stages


def rooms(on: PoolMemory, part: StageBytes, *, positions: int) -> Floats:
    """Common layers that the j-th stage from the end of a chain has room for, [J, C]."""
    kind, layers = _common(on)
    position = np.arange(1, positions + 1)[:, None]
    in_flight = np.minimum(position, np.asarray(on.strategies.num_microbatches))
    per_layer = np.maximum(part.static_KC[kind] + in_flight * part.saved_KC[kind], 1.0)
    room_JC = np.floor((on.problem.memory_limit_bytes - part.without_C) / per_layer * ABOVE)
    layers_JC: Floats = np.clip(room_JC, 0.0, layers)
    return layers_JC


def rooms_on(pools: Sequence[PoolMemory], bytes_of: Sequence[StageBytes]) -> list[Floats]:
    """Common layers that stages have room for on each pool, by position from the end."""
    longest = positions(pools)
    return [rooms(on, part, positions=longest) for on, part in zip(pools, bytes_of, strict=True)]


def single_pool_room(on: PoolMemory, part: StageBytes) -> Floats:
    """Common layers that all stages of the pool have room for, with no other pool after them."""
    (room_JC,) = rooms_on([on], [part])
    position = np.arange(1, len(room_JC) + 1)[:, None]
    layers_C: Floats = np.where(position <= on.max_stages_C, room_JC, 0.0).sum(axis=0)
    return layers_C


def positions(pools: Sequence[PoolMemory]) -> int:
    """Return the length of the longest chain of any candidate, J."""
    return int(most_stages(pools).max(initial=0))


def can_fit(pools: Sequence[PoolMemory], rooms_P: Sequence[Floats]) -> Mask:
    """Return which candidates may have room for all layers."""
    fits: Mask = spare_layers(pools, rooms_P) >= 0.0
    return fits


def spare_layers(pools: Sequence[PoolMemory], rooms_P: Sequence[Floats]) -> Floats:
    """Common layers that the stages may have room for, less those of the model."""
    supplies = [_at_any_pace(on, room_JC) for on, room_JC in zip(pools, rooms_P, strict=True)]
    endless_s = np.full(len(pools[0].devices_C), ENDLESS_S)
    return _capacity_layers(supplies, endless_s, before=_before(pools[0])) - _common(pools[0])[1]


def step_bound_s(pools: Sequence[PoolPricing], rooms_P: Sequence[Floats]) -> Floats:
    """Bound the step of every candidate over these pools; infinite where nothing fits."""
    bound_s_C: Floats = np.full(len(pools[0].devices_C), np.inf)
    fits = np.flatnonzero(can_fit(pools, rooms_P) & (most_stages(pools) > 0))
    if len(fits):
        some = [on.taken(fits) for on in pools]
        least_s = least_pipeline_s(some, [room_JC[:, fits] for room_JC in rooms_P])
        bound_s_C[fits] = least_s + per_step_bound_s(some) * ROUNDING
    return bound_s_C


def least_pipeline_s(pools: Sequence[PoolPricing], rooms_P: Sequence[Floats | None]) -> Floats:
    """Bound the step without the once-per-step part; `rooms_P` of None ignore memory."""
    kind, layers = _common(pools[0])
    m = np.asarray(pools[0].strategies.num_microbatches)
    pace_s = least_pace_s(pools, rooms_P)
    fastest_KC = np.min([on.seconds_KC for on in pools], axis=0)
    sum_s = counts_K(pools[0].problem) @ fastest_KC
    layer_PC = np.stack([on.seconds_KC[kind] for on in pools])
    stages_PC = np.stack([on.max_stages_C for on in pools])
    falls = (stages_PC * (layer_PC.max(axis=0) / layer_PC - 1.0)).sum(axis=0)
    filled_s = _filled_s(layer_PC, stages_PC, pace_s, layers) - layers * layer_PC.min(axis=0)
    sum_s = sum_s + np.where(m - 1.0 >= falls, np.maximum(filled_s, 0.0), 0.0)
    bound_s: Floats = (sum_s + (m - 1.0) * pace_s) * ROUNDING
    return bound_s


def least_pace_s(pools: Sequence[PoolPricing], rooms_P: Sequence[Floats | None]) -> Floats:
    """Bound the pace: seconds of every further micro-batch."""
    first = pools[0]
    count_K = counts_K(first.problem)
    present = count_K > 0.0
    work_s = count_K @ first.seconds_KC
    rate_PC = np.stack(
        [(first.seconds_KC[present] / on.seconds_KC[present]).max(axis=0) for on in pools]
    )
    stages_PC = np.stack([on.max_stages_C for on in pools])
    # With more stages than layers the fastest pools keep their stages.
    order = np.argsort(-rate_PC, axis=0, kind="stable")
    fastest = np.take_along_axis(stages_PC, order, axis=0)
    before = np.cumsum(fastest, axis=0) - fastest
    kept = np.clip(first.problem.model.num_layers - before, 0, fastest)
    speed = (kept * np.take_along_axis(rate_PC, order, axis=0)).sum(axis=0)
    even_s: Floats = work_s / np.maximum(speed, 1e-9)
    return _of_whole_layers(pools, rooms_P, even_s)


def _of_whole_layers(
    pools: Sequence[PoolPricing], rooms_P: Sequence[Floats | None], even_s: Floats
) -> Floats:
    """The smallest pace that whole layers allow, from below; at least `even_s`."""
    layers, before = _common(pools[0])[1], _before(pools[0])
    supplies = [_supply(on, room_JC) for on, room_JC in zip(pools, rooms_P, strict=True)]
    least_s = even_s.copy()
    open_C = np.flatnonzero(_capacity_layers(supplies, even_s * ABOVE, before=before) < layers)
    supplies = [taken(supply, open_C) for supply in supplies]
    low_s = even_s[open_C]
    high_s = np.max(
        [layers * supply.layer_s_C + supply.end_s_C + supply.last_s_C for supply in supplies],
        axis=0,
    )
    for _ in range(HALVINGS):
        middle_s = 0.5 * (low_s + high_s)
        enough = _capacity_layers(supplies, middle_s * ABOVE, before=before) >= layers
        low_s, high_s = np.where(enough, low_s, middle_s), np.where(enough, middle_s, high_s)
    least_s[open_C] = low_s
    return least_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Supply:
    """Capacity of the stages of one pool for common layers."""

    layer_s_C: Floats
    end_s_C: Floats
    """Seconds of head and multi-token prediction, on the last stage."""
    other_s_C: Floats
    """Seconds of a layer of the other kind."""
    last_s_C: Floats
    """Seconds of the model's last layer."""
    stages_C: Ints
    room_JC: Floats | None
    """Layers that a stage's memory has room for, by position from the end of the chain; None:
    memory is ignored."""


def _supply(on: PoolPricing, room_JC: Floats | None) -> _Supply:
    shape, kind = on.devices_C.shape, _common(on)[0]
    return _Supply(
        layer_s_C=np.broadcast_to(on.seconds_KC[kind], shape),
        end_s_C=np.broadcast_to(_end_s(on), shape),
        other_s_C=np.broadcast_to(on.seconds_KC[DENSE], shape),
        last_s_C=np.broadcast_to(on.seconds_KC[_last(on)], shape),
        stages_C=np.broadcast_to(on.max_stages_C, shape),
        room_JC=room_JC,
    )


def _at_any_pace(on: PoolMemory, room_JC: Floats) -> _Supply:
    """Return the capacity with one second per layer, where time does not matter."""
    second_C = np.ones(len(on.devices_C))
    return _Supply(
        layer_s_C=second_C,
        end_s_C=second_C,
        other_s_C=second_C,
        last_s_C=second_C,
        stages_C=np.broadcast_to(on.max_stages_C, second_C.shape),
        room_JC=room_JC,
    )


def _capacity_layers(supplies: Sequence[_Supply], pace_s: Floats, *, before: int) -> Floats:
    """Common layers that all stages can have at a pace, in the best order of the pools.

    `before` layers of the other kind come first in the model.
    """
    pools = range(len(supplies))
    orders = itertools.permutations(pools, 2) if len(pools) > 1 else ((0, 0),)
    capacity_C: Floats = np.max(
        [_capacity_between(supplies, first_last, pace_s, before=before) for first_last in orders],
        axis=0,
    )
    return capacity_C


def _capacity_between(
    supplies: Sequence[_Supply], first_last: tuple[int, int], pace_s: Floats, *, before: int
) -> Floats:
    """Count the common layers for given pools of the first stage and of the last, with the head.

    All other stages come before those of the last pool, whose number is the best one.
    """
    last = supplies[first_last[1]]
    whole = np.floor(pace_s / last.layer_s_C)
    beside = np.floor(np.maximum(pace_s - last.end_s_C, 0.0) / last.layer_s_C)
    # The last stage has at least the last layer.
    is_possible = pace_s >= last.end_s_C + last.last_s_C
    if last.room_JC is None:
        all_layers = sum(
            (pool.stages_C * np.floor(pace_s / pool.layer_s_C) for pool in supplies), 0.0
        )
        at_any_memory: Floats = np.where(is_possible, all_layers - (whole - beside), -np.inf)
        return at_any_memory
    lost = np.minimum(whole, last.room_JC[0]) - np.minimum(beside, last.room_JC[0])
    count_J = np.arange(len(last.room_JC) + 1)[:, None]
    summed_JC = _summed(last, pace_s)
    capacity_JC = (
        summed_JC
        if first_last[0] != first_last[1]
        else _begun(last, summed_JC, count_J, pace_s, before)
    )
    for index, supply in enumerate(supplies):
        if index == first_last[1]:
            continue
        summed_JC = _summed(supply, pace_s)
        stop_JC = np.minimum(count_J + supply.stages_C, len(summed_JC) - 1)
        if index == first_last[0]:
            until_JC = _begun(supply, summed_JC, stop_JC, pace_s, before)
        else:
            until_JC = np.take_along_axis(summed_JC, stop_JC, axis=0)
        capacity_JC = capacity_JC + np.maximum(until_JC - summed_JC, 0.0)
    allowed = is_possible & (count_J >= 1) & (count_J <= last.stages_C)
    capacity_C: Floats = np.where(allowed, capacity_JC, -np.inf).max(axis=0) - lost
    return capacity_C


def _summed(supply: _Supply, pace_s: Floats) -> Floats:
    """Layers of the last n stages of a chain if all are of this pool, [J + 1, C]."""
    assert supply.room_JC is not None
    whole_JC = np.minimum(np.floor(pace_s / supply.layer_s_C), supply.room_JC)
    return np.concatenate([np.zeros((1, whole_JC.shape[1])), np.cumsum(whole_JC, axis=0)])


def _begun(
    supply: _Supply, summed_JC: Floats, stages_JC: Ints, pace_s: Floats, before: int
) -> Floats:
    """Count the common layers of so many stages whose first have layers of the other kind.

    As many as the pace allows fill whole stages; the rest share a stage with common layers.
    """
    assert supply.room_JC is not None
    if not before:
        return np.take_along_axis(summed_JC, np.broadcast_to(stages_JC, summed_JC.shape), axis=0)
    per_stage = np.clip(np.floor(pace_s / supply.other_s_C), 1.0, before)
    full = np.ceil(before / per_stage) - 1.0
    left_s = np.maximum(pace_s - (before - full * per_stage) * supply.other_s_C, 0.0)
    mixed_JC = np.maximum(stages_JC - full, 0.0).astype(np.int64)
    mixed_JC = np.broadcast_to(mixed_JC, summed_JC.shape)
    room_JC = np.take_along_axis(supply.room_JC, np.maximum(mixed_JC - 1, 0), axis=0)
    shared_JC = np.minimum(np.floor(left_s / supply.layer_s_C), room_JC)
    whole_JC = np.take_along_axis(summed_JC, np.maximum(mixed_JC - 1, 0), axis=0)
    capacity_JC: Floats = whole_JC + np.where(mixed_JC > 0, shared_JC, 0.0)
    return capacity_JC


def _filled_s(layer_PC: Floats, stages_PC: Ints, pace_s: Floats, layers: int) -> Floats:
    """Seconds of all layers if the fastest pools are filled up to the pace first."""
    order = np.argsort(layer_PC, axis=0, kind="stable")
    layer_s = np.take_along_axis(layer_PC, order, axis=0)
    room = np.take_along_axis(stages_PC, order, axis=0) * pace_s / layer_s
    before = np.cumsum(room, axis=0) - room
    filled = np.clip(layers - before, 0.0, room)
    seconds: Floats = (filled * layer_s).sum(axis=0)
    return seconds


def once_parts(on: PoolPricing) -> OnceParts:
    """Split the once-per-step part of a stage into a fixed part and one per layer."""
    kinds = (DENSE, MOE)
    single, double = ([_once_s(on, kind, layers) for kind in kinds] for layers in (1.0, 2.0))
    per_layer_KC = np.array(double) - np.array(single)
    return OnceParts(
        fixed_C=np.min(np.array(single) - per_layer_KC, axis=0), per_layer_KC=per_layer_KC
    )


def per_step_bound_s(pools: Sequence[PoolPricing]) -> Floats:
    """Bound the once-per-step part."""
    kind, layers = _common(pools[0])
    share_C = layers / np.maximum(most_stages(pools), 1)
    least: Floats = np.min([_once_s(on, kind, share_C) for on in pools], axis=0)
    return least


def _once_s(on: PoolPricing, kind: int, layers: Floats | float) -> Floats:
    """Lower bound on the once-per-step seconds of a stage of so many layers."""
    grids = {name: np.zeros((1, len(on.devices_C))) for name in KINDS_OF_STAGES}
    grids[KINDS_OF_STAGES[kind]][0] = layers
    problem = on.problem
    step = assemble(
        problem.shape,
        _endless(on.units),
        on.strategies,
        problem.hardware,
        problem.constants,
        Stages(**grids),
    )
    once_s: Floats = np.broadcast_to(step.once_s, on.devices_C.shape)
    return once_s


def _endless(units: UnitCosts) -> UnitCosts:
    return replace(
        units,
        **{
            kind: replace(getattr(units, kind), forward_s=ENDLESS_S, backward_s=ENDLESS_S)
            for kind in KINDS
        },
    )


def _end_s(on: PoolPricing) -> Floats:
    end_s: Floats = on.seconds_KC[HEAD] + float(on.problem.shape.mtp_layers) * on.seconds_KC[MTP]
    return end_s


def _last(on: PoolPricing) -> int:
    """The kind of the model's last layer."""
    return MOE if on.problem.model.layers[-1] is LayerKind.MOE else DENSE


def _before(on: PoolMemory) -> int:
    """Layers without experts that come before all those with them."""
    model = on.problem.model
    if not model.num_moe_layers:
        return 0
    kinds = [kind is LayerKind.MOE for kind in model.layers]
    return kinds.index(True)


def _common(on: PoolMemory) -> tuple[int, int]:
    """The kind that most layers are of, and how many are."""
    model = on.problem.model
    return (MOE, model.num_moe_layers) if model.num_moe_layers else (DENSE, model.num_layers)
