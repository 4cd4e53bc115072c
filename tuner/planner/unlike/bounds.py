"""What no partition of a column over given pools can beat, and whether any can fit: whole columns.

Per micro-batch a pool does no more of the model per second than at its best kind of layer: with t
the seconds of a kind, relative to the first pool, rate = max over kinds of t_first / t_pool, and
the stages of all pools together need

    pace >= W_first / sum over stages of rate

Whole layers need more: pace is no less than the smallest P with

    sum over stages of min(floor(P / b), r) - (what the head takes of one stage) >= layers

where b is the seconds of a common layer, r the layers that a stage has room for (below), and the
head lies where it takes least. That P is the first bound or a multiple of some pool's b, the head's
seconds added or not. At this pace the fastest pools cannot hold all layers, which bounds the sum
over stages:

    step >= sum D(P) + (m - 1) P + once,    sum D(P) filling the fastest pools up to P first

As P grows by one second, sum D falls by at most F = sum over stages of (b_slowest / b - 1), so
the smallest P gives the bound where m - 1 >= F; elsewhere sum D counts every layer on its fastest
pool.
`once` is at least the fixed part and the shares of gradient sums and gathers that stay visible
under endless passes, of an even share of the parameters (the fullest stage has no less), where that
is least.

The j-th stage from the end of a pool's stretch holds at least min(j, m) micro-batches; r is what
its memory then leaves room for, and layers fit only if all stages together have room for them.

Letters: C columns, J positions from the end, K kinds, P pools.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.costs.analytic.shapes import Stages
from tuner.costs.analytic.step import assemble
from tuner.costs.analytic.units import KINDS, UnitCosts
from tuner.planner.analytic.pricing import KINDS_OF_STAGES, ROUNDING
from tuner.planner.analytic.rules import Ints, Mask
from tuner.planner.unlike.pricing import DENSE, HEAD, MOE, MTP, Floats, LayerBytes, OnPool, counts_K

ENDLESS_S: Final = 1e12
"""Passes so long that everything beside them is hidden as far as it can be."""

NEAR: Final = 8
"""Multiples of each pool's layer that are tried above the even pace."""

ABOVE: Final = 1.0 + 1e-9
"""Slack for sums in another order."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnceParts:
    """What a stage pays once a step at the least: linear in its layers."""

    fixed_C: Floats
    per_layer_KC: Floats
    """[2, C]: layers without and with experts."""

    def taken(self, column: int) -> "OnceParts":
        """Keep one column."""
        at = np.array([column])
        return OnceParts(fixed_C=self.fixed_C[at], per_layer_KC=self.per_layer_KC[:, at])


def most_stages(pools: Sequence[OnPool]) -> Ints:
    """Stages that all pools together could run, one layer each at least."""
    found: Ints = np.minimum(
        sum(on.max_stages_C for on in pools), pools[0].question.model.num_layers
    )
    return found


def rooms(on: OnPool, part: LayerBytes) -> Floats:
    """Common layers that the j-th stage from the end of the pool's stretch has room for, [J, C]."""
    kind, layers = _common(on)
    most = int(min(on.max_stages_C.max(initial=0), layers))
    position = np.arange(1, most + 1)[:, None]
    held = np.minimum(position, np.asarray(on.strategies.num_microbatches))
    per_layer = np.maximum(part.static_KC[kind] + held * part.saved_KC[kind], 1.0)
    room_JC = np.floor((on.question.memory_limit_bytes - part.without_C) / per_layer * ABOVE)
    return np.where(position <= on.max_stages_C, np.clip(room_JC, 0.0, layers), 0.0)


def can_fit(pools: Sequence[OnPool], rooms_P: Sequence[Floats]) -> Mask:
    """Say where the stages together may have room for the layers."""
    room = sum((room_JC.sum(axis=0) for room_JC in rooms_P), np.zeros(1))
    found: Mask = room >= _common(pools[0])[1]
    return found


def least_step_s(pools: Sequence[OnPool], rooms_P: Sequence[Floats]) -> Floats:
    """Bound the step of every column over these pools; infinite where nothing fits."""
    found = least_pipeline_s(pools, rooms_P) + least_once_s(pools) * ROUNDING
    return np.where(can_fit(pools, rooms_P) & (most_stages(pools) > 0), found, np.inf)


def least_pipeline_s(pools: Sequence[OnPool], rooms_P: Sequence[Floats | None]) -> Floats:
    """Bound the step without what is paid once; without rooms memory is not looked at."""
    kind, layers = _common(pools[0])
    m = np.asarray(pools[0].strategies.num_microbatches)
    pace_s = least_pace_s(pools, rooms_P)
    fastest_KC = np.min([on.seconds_KC for on in pools], axis=0)
    sum_s = counts_K(pools[0].question) @ fastest_KC
    layer_PC = np.stack([on.seconds_KC[kind] for on in pools])
    stages_PC = np.stack([on.max_stages_C for on in pools])
    falls = (stages_PC * (layer_PC.max(axis=0) / layer_PC - 1.0)).sum(axis=0)
    filled_s = _filled_s(layer_PC, stages_PC, pace_s, layers) - layers * layer_PC.min(axis=0)
    sum_s = sum_s + np.where(m - 1.0 >= falls, np.maximum(filled_s, 0.0), 0.0)
    found: Floats = (sum_s + (m - 1.0) * pace_s) * ROUNDING
    return found


def least_pace_s(pools: Sequence[OnPool], rooms_P: Sequence[Floats | None]) -> Floats:
    """Bound what every further micro-batch costs."""
    first = pools[0]
    count_K = counts_K(first.question)
    present = count_K > 0.0
    work_s = count_K @ first.seconds_KC
    rate_PC = np.stack(
        [(first.seconds_KC[present] / on.seconds_KC[present]).max(axis=0) for on in pools]
    )
    stages_PC = np.stack([on.max_stages_C for on in pools])
    # Where there are more stages than layers the fastest pools keep theirs.
    order = np.argsort(-rate_PC, axis=0, kind="stable")
    fastest = np.take_along_axis(stages_PC, order, axis=0)
    before = np.cumsum(fastest, axis=0) - fastest
    kept = np.clip(first.question.model.num_layers - before, 0, fastest)
    speed = (kept * np.take_along_axis(rate_PC, order, axis=0)).sum(axis=0)
    even_s: Floats = work_s / np.maximum(speed, 1e-9)
    return _of_whole_layers(pools, rooms_P, even_s)


def _of_whole_layers(
    pools: Sequence[OnPool], rooms_P: Sequence[Floats | None], even_s: Floats
) -> Floats:
    """The smallest pace that whole layers allow; the even one where none is found near."""
    kind, layers = _common(pools[0])
    least = np.where(_held(pools, rooms_P, even_s * ABOVE) >= layers, even_s, np.inf)
    for on in pools:
        layer_s = on.seconds_KC[kind]
        for end_s in (0.0, _end_s(on)):
            fewest = np.maximum(np.ceil((even_s - end_s) / (layer_s * ABOVE)), 0.0)
            for more in range(NEAR):
                pace_s = np.maximum((fewest + more) * layer_s + end_s, even_s)
                enough = _held(pools, rooms_P, pace_s * ABOVE) >= layers
                least = np.where(enough, np.minimum(least, pace_s), least)
                if np.isfinite(least).all() and (pace_s >= least).all():
                    break
    return np.where(np.isfinite(least), least, even_s)


def _held(pools: Sequence[OnPool], rooms_P: Sequence[Floats | None], pace_s: Floats) -> Floats:
    """Layers that all stages hold at a pace, the head on the stage where it takes least."""
    kind, _ = _common(pools[0])
    held, lost = np.zeros_like(pace_s), np.full_like(pace_s, np.inf)
    for on, room_JC in zip(pools, rooms_P, strict=True):
        whole = np.floor(pace_s / on.seconds_KC[kind])
        beside = np.floor(np.maximum(pace_s - _end_s(on), 0.0) / on.seconds_KC[kind])
        if room_JC is None:
            held += on.max_stages_C * whole
        elif len(room_JC):
            held += np.minimum(whole, room_JC).sum(axis=0)
            whole, beside = np.minimum(whole, room_JC[0]), np.minimum(beside, room_JC[0])
        lost = np.minimum(lost, np.where(on.max_stages_C > 0, whole - beside, np.inf))
    found: Floats = held - lost
    return found


def _filled_s(layer_PC: Floats, stages_PC: Ints, pace_s: Floats, layers: int) -> Floats:
    """Seconds of all layers when the fastest pools are filled up to a pace first."""
    order = np.argsort(layer_PC, axis=0, kind="stable")
    layer_s = np.take_along_axis(layer_PC, order, axis=0)
    room = np.take_along_axis(stages_PC, order, axis=0) * pace_s / layer_s
    before = np.cumsum(room, axis=0) - room
    held = np.clip(layers - before, 0.0, room)
    found: Floats = (held * layer_s).sum(axis=0)
    return found


def once_parts(on: OnPool) -> OnceParts:
    """Take the once-a-step part of a stage apart."""
    kinds = (DENSE, MOE)
    one, two = ([_once_s(on, kind, layers) for kind in kinds] for layers in (1.0, 2.0))
    per_layer_KC = np.array(two) - np.array(one)
    return OnceParts(
        fixed_C=np.min(np.array(one) - per_layer_KC, axis=0), per_layer_KC=per_layer_KC
    )


def least_once_s(pools: Sequence[OnPool]) -> Floats:
    """Bound what is paid once a step."""
    kind, layers = _common(pools[0])
    share_C = layers / np.maximum(most_stages(pools), 1)
    least: Floats = np.min([_once_s(on, kind, share_C) for on in pools], axis=0)
    return least


def _once_s(on: OnPool, kind: int, layers: Floats | float) -> Floats:
    """Seconds a step pays once at the least for a stage of so many layers."""
    grids = {name: np.zeros((1, len(on.devices_C))) for name in KINDS_OF_STAGES}
    grids[KINDS_OF_STAGES[kind]][0] = layers
    own = on.question
    step = assemble(
        own.shape, _endless(on.units), on.strategies, own.hardware, own.constants, Stages(**grids)
    )
    found: Floats = np.broadcast_to(step.once_s, on.devices_C.shape)
    return found


def _endless(units: UnitCosts) -> UnitCosts:
    return replace(
        units,
        **{
            kind: replace(getattr(units, kind), forward_s=ENDLESS_S, backward_s=ENDLESS_S)
            for kind in KINDS
        },
    )


def _end_s(on: OnPool) -> Floats:
    found: Floats = on.seconds_KC[HEAD] + float(on.question.shape.mtp_layers) * on.seconds_KC[MTP]
    return found


def _common(on: OnPool) -> tuple[int, int]:
    """The kind that most layers are of, and how many are."""
    model = on.question.model
    return (MOE, model.num_moe_layers) if model.num_moe_layers else (DENSE, model.num_layers)
