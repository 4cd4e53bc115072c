"""Layers per pipeline stage, so that no device is much slower than another.

The embedding costs time on the first device, the head and multi-token-prediction layers on the
last. With b the seconds of a common layer, e of the embedding and g of everything at the end, the
slowest of p devices needs at least P where

    sum over devices of floor((P - f_d) / b) >= number of layers,    f_0 = e, f_(p-1) = g, else 0

(faster leading dense layers are not counted, which only lowers P), and no less than the whole work
over p. `min_peak_s` is the smallest such P: no layout has a faster slowest device. `balanced_split`
builds a layout from it: the first and the last device take what fits below P, the others share the
rest evenly. `split_to_fit` does the same under a limit of layers on each device.

Device d of an interleaved pipeline runs stages d, d + p, ... . The bubbles of such a schedule with
different stages have no closed form, so all its stages hold the same number of layers, except the
first and the last, which have embedding and head (`interleaved_layers`).

Letters: C candidates of one pipeline size p and v stages a device, P devices, S = p v stages in
execution order, L layers, K candidates for P. Not covered: recomputation that differs between
stages, which is left to the solver of layouts (tuner/search/train/finalists.py).
"""

from dataclasses import dataclass

import numpy as np

from profilers.steps.config import LayerKind
from tuner.arrays import Floats, Ints
from tuner.config.shapes import Stages
from tuner.search.train.rules import Mask
from tuner.spec.model import ModelSpec

ROUNDING_UP = 1e-9
"""Margin for the rounding of sums in another order, so that no whole layer is lost to it."""

MIN_MEMORY_STEPS = 9
"""Layers by which the slowest device may exceed the least under a limit; beyond that each device
takes all that its memory allows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTimes:
    """Seconds of both passes of one micro-batch, per candidate."""

    dense_s: Floats
    moe_s: Floats
    embedding_s: Floats
    end_s: Floats
    """Head and multi-token-prediction layers together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Layers of the first and the last device; the others share the rest evenly."""

    first_C: Ints
    last_C: Ints


def total_s(model: ModelSpec, times: PassTimes) -> Floats:
    """Seconds of one micro-batch on all devices together."""
    num_dense = model.num_layers - model.num_moe_layers
    layers_s = num_dense * times.dense_s + model.num_moe_layers * times.moe_s
    return layers_s + times.embedding_s + times.end_s


def min_peak_s(model: ModelSpec, times: PassTimes, *, pipeline: Ints | int) -> Floats:
    """Seconds that the slowest device needs at least in any layout."""
    even_s = total_s(model, times) / pipeline
    num_moe = model.num_moe_layers
    if num_moe:
        layer_s, count = times.moe_s, num_moe
        # Leading dense layers that are slower than the others count as such.
        slower = times.dense_s >= times.moe_s
        count_C = np.where(slower, model.num_layers, count)
    else:
        layer_s, count_C = times.dense_s, np.full(len(even_s), model.num_layers)
    tried = []
    for offset_s in (np.zeros_like(layer_s), times.embedding_s, times.end_s):
        fewest = np.maximum(np.floor((even_s - offset_s) / layer_s) - 1.0, 0.0)
        tried.append((np.arange(4)[:, None] + fewest) * layer_s + offset_s)
    peak_KC = np.maximum(np.concatenate(tried), even_s)
    room_KC = peak_KC * (1.0 + ROUNDING_UP)
    capacity = (pipeline - 2) * np.floor(room_KC / layer_s)
    capacity = capacity + np.floor(np.maximum(room_KC - times.embedding_s, 0.0) / layer_s)
    capacity = capacity + np.floor(np.maximum(room_KC - times.end_s, 0.0) / layer_s)
    fits = (capacity >= count_C) & (room_KC >= np.maximum(times.embedding_s, times.end_s))
    least = np.where(fits, peak_KC, np.inf).min(axis=0)
    is_single = np.equal(pipeline, 1)
    # Beyond the last candidate nothing is claimed but the even share.
    return np.where(is_single | np.isinf(least), even_s, least)


def balanced_split(model: ModelSpec, times: PassTimes, *, pipeline: int, least: Ints) -> Split:
    """Build a split that keeps the first and last device below the least peak.

    Args:
        model: whose layers.
        times: of every candidate.
        pipeline: devices.
        least: layers that every device must hold, per candidate.
    """
    columns, layers = len(times.moe_s), model.num_layers
    if pipeline == 1:
        whole = np.full(columns, layers, dtype=np.int64)
        return Split(first_C=whole, last_C=whole)
    peak_s = min_peak_s(model, times, pipeline=pipeline) * (1.0 + ROUNDING_UP)
    layer_s = _common_s(model, times)
    leading = _leading_dense(model)
    last = np.floor((peak_s - times.end_s) / layer_s).astype(np.int64)
    room_s = peak_s - times.embedding_s
    dense = np.minimum(leading, np.floor(room_s / times.dense_s))
    first = (dense + np.floor((room_s - dense * times.dense_s) / layer_s)).astype(np.int64)
    middle = (pipeline - 2) * least
    last = np.clip(last, least, layers - middle - least)
    if pipeline == 2:
        return Split(first_C=layers - last, last_C=last)
    # Layers that the middle devices can take below the peak need not go to the first and last.
    most_even = -(-layers // pipeline)
    last = np.minimum(last, np.maximum(most_even, least))
    first = np.minimum(first, np.minimum(layers - middle - last, most_even + leading))
    return Split(first_C=np.maximum(first, least), last_C=last)


def even_split(model: ModelSpec, *, pipeline: int, columns: int) -> Split:
    """The split of targets whose stages must all hold the same number of layers."""
    layers_C = np.full(columns, model.num_layers // pipeline, dtype=np.int64)
    return Split(first_C=layers_C, last_C=layers_C)


def to_device_layers(model: ModelSpec, split: Split, *, pipeline: int) -> Ints:
    """Layers of every device, [P, C]."""
    devices_PC = np.empty((pipeline, len(split.first_C)), dtype=np.int64)
    if pipeline == 1:
        devices_PC[0] = model.num_layers
        return devices_PC
    devices_PC[0], devices_PC[-1] = split.first_C, split.last_C
    inner = pipeline - 2
    if inner:
        rest = model.num_layers - split.first_C - split.last_C
        layers_C, more = np.divmod(rest, inner)
        # Later devices hold fewer micro-batches, so the longer share is theirs.
        position = np.arange(inner)[:, None]
        devices_PC[1:-1] = layers_C + (position >= inner - more)
    return devices_PC


def peak_under(model: ModelSpec, times: PassTimes, *, most_PC: Ints, count: int) -> Floats:
    """Seconds that the slowest device needs at least if each holds at most so many layers.

    The capacity of a device only grows at whole layers beyond its offset, so the candidates are
    few. Infinite where the limits leave no space for `count` layers.
    """
    layer_s = _common_s(model, times)
    offset_PC = _offset_s(times, len(most_PC))
    unlimited_s = min_peak_s(model, times, pipeline=len(most_PC))
    capacity_PC = np.maximum(most_PC, 0)
    limited_s = np.where(
        capacity_PC.sum(axis=0) >= count, (offset_PC + capacity_PC * layer_s).max(axis=0), np.inf
    )
    for offset_s in (times.embedding_s, times.end_s, np.zeros_like(layer_s)):
        fewest = np.maximum(np.floor((unlimited_s - offset_s) / layer_s) - 1.0, 0.0)
        for more in range(MIN_MEMORY_STEPS):
            peak_s = np.maximum((fewest + more) * layer_s + offset_s, unlimited_s)
            room_PC = _room(peak_s, offset_PC, layer_s)
            enough = np.minimum(capacity_PC, room_PC).sum(axis=0) >= count
            limited_s = np.where(enough, np.minimum(limited_s, peak_s), limited_s)
    return limited_s


def split_to_fit(
    model: ModelSpec, times: PassTimes, *, most_PC: Ints, least: Ints
) -> tuple[Ints, Mask]:
    """Split layers under a limit of each device, [P, C], and say where that is possible.

    The slowest device takes the least time that the limits allow. Surplus layers are taken off the
    first devices, whose activations live longest.
    """
    layers, layer_s = model.num_layers, _common_s(model, times)
    offset_PC = _offset_s(times, len(most_PC))
    peak_s = peak_under(model, times, most_PC=most_PC, count=layers)
    is_possible = np.isfinite(peak_s)
    room_PC = _room(np.where(is_possible, peak_s, 0.0), offset_PC, layer_s)
    chosen_PC = np.minimum(np.maximum(most_PC, 0), room_PC)
    is_possible &= (chosen_PC >= least).all(axis=0)
    over = np.maximum(chosen_PC.sum(axis=0) - layers, 0)
    for device in range(len(most_PC)):
        taken = np.minimum(over, np.maximum(chosen_PC[device] - least, 0))
        chosen_PC[device] -= taken
        over = over - taken
    return chosen_PC, is_possible & (chosen_PC.sum(axis=0) == layers)


def _offset_s(times: PassTimes, pipeline: int) -> Floats:
    """Seconds of embedding, head and MTP layers on the first and last device, [P, C]."""
    offset_PC = np.zeros((pipeline, len(times.moe_s)))
    offset_PC[0] += times.embedding_s
    offset_PC[-1] += times.end_s
    return offset_PC


def _room(peak_s: Floats, offset_PC: Floats, layer_s: Floats) -> Ints:
    """Layers that each device can run in so many seconds."""
    left_PC = np.maximum(peak_s * (1.0 + ROUNDING_UP) - offset_PC, 0.0)
    return np.floor(left_PC / layer_s).astype(np.int64)


def interleaved_layers(model: ModelSpec, *, pipeline: int, virtual: Ints) -> Ints:
    """Layers of every device, [P, C], where all stages but the first and last are identical.

    Missing layers are taken off the last stage as far as possible, where the head is.
    """
    layers_C = -(-model.num_layers // (pipeline * virtual))
    missing = layers_C * pipeline * virtual - model.num_layers
    of_last = np.minimum(missing, layers_C)
    devices_PC = np.repeat((layers_C * virtual)[None], pipeline, axis=0)
    devices_PC[0] -= missing - of_last
    devices_PC[-1] -= of_last
    return devices_PC


def layers_of_stages(devices_PC: Ints, *, virtual: int) -> Ints:
    """Layers of every stage, [S, C], in execution order, from those of every device."""
    pipeline = len(devices_PC)
    if virtual == 1:
        return devices_PC
    layers_C = -(-devices_PC.sum(axis=0) // (pipeline * virtual))
    layers_SC = np.repeat(layers_C[None], pipeline * virtual, axis=0)
    layers_SC[0] -= layers_C * virtual - devices_PC[0]
    layers_SC[-1] -= layers_C * virtual - devices_PC[-1]
    return layers_SC


def to_stages(model: ModelSpec, layers_SC: Ints) -> Stages:
    """Count what each stage holds."""
    stages, columns = layers_SC.shape
    bounds = np.zeros((stages + 1, columns), dtype=np.int64)
    np.cumsum(layers_SC, axis=0, out=bounds[1:])
    is_moe = np.array([kind is LayerKind.MOE for kind in model.layers])
    before = np.concatenate(([0], np.cumsum(is_moe)))
    moe_SC = np.diff(before[bounds], axis=0)
    first, last = np.zeros((stages, 1)), np.zeros((stages, 1))
    first[0], last[-1] = 1.0, 1.0
    return Stages(
        dense_SC=(layers_SC - moe_SC).astype(np.float64),
        moe_SC=moe_SC.astype(np.float64),
        embedding_SC=first,
        head_SC=last,
        mtp_SC=model.mtp_num_layers * last,
    )


def _common_s(model: ModelSpec, times: PassTimes) -> Floats:
    return times.moe_s if model.num_moe_layers else times.dense_s


def _leading_dense(model: ModelSpec) -> int:
    for index, kind in enumerate(model.layers):
        if kind is LayerKind.MOE:
            return index
    return model.num_layers
