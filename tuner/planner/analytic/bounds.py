"""Seconds that no way to run given degrees can beat, in any layout: what pruning rests on.

With W the seconds of one micro-batch, both passes, on all devices together, P the least that the
slowest device can need (layouts.py), G the part of W that a zero-bubble schedule may put into the
bubble, m micro-batches, v stages on each of p devices,

    step >= m P + max(0, W - P - 2 G) / v + boundaries + once

which is the closed form of tuner/costs/analytic/step.py at the smallest possible slowest device: it
grows with P since m >= 1 / v. G is 0 where the target has no such schedule. Boundaries are those of
the nearest order of ranks; `once` counts the fixed cost, the optimizer on an even share of the
parameters, and of gradient sums the share that overlapping leaves visible.

Two levels use it. A row (all degrees) brings the unit costs of one way to run it, which bounds
every way that only adds recomputation, offloading or less overlap. A cell (no expert degrees yet)
brings unit costs of one imagined expert as wide as one of the model's: its router scores one
expert, its products are whole, and nothing is exchanged, so no real expert degrees are faster.

Letters: C columns.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.links import all_gather_s, groups, send_s
from tuner.costs.analytic.shapes import ModelShape, Numbers, Strategies
from tuner.costs.analytic.step import OFFLOAD_BYTES
from tuner.costs.analytic.units import UnitCosts
from tuner.planner.analytic.candidate_prices import ROUNDING, filled_s, pass_times
from tuner.planner.analytic.layouts import PassTimes, least_peak_s, total_s
from tuner.planner.analytic.per_step import of_all
from tuner.planner.analytic.problem import Question

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What the best way could make use of, by the targets and limits."""

    zero_stages: frozenset[int]
    rank_orders: tuple[str, ...]
    zero_bubble: bool


def imagined_expert(shape: ModelShape) -> ModelShape:
    """One expert in place of all; every token's copies go to it."""
    one = np.minimum(shape.experts, 1.0)
    return replace(shape, experts=one, num_groups=1.0, groups_per_token=1.0)


def least_step_s(
    question: Question, strategies: Strategies, units: UnitCosts, allowed: Allowed
) -> Floats:
    """Bound the step of every column from below, whatever its layout."""
    columns = len(np.atleast_1d(strategies.num_microbatches))
    times = pass_times(question, units, columns)
    work_s = total_s(question.model, times)
    pipeline = np.asarray(strategies.pipeline)
    peak_s = _peak_s(question, times, pipeline)
    later_s = filled_s(question, units) if allowed.zero_bubble else 0.0
    way_s = np.maximum(work_s - peak_s - 2.0 * later_s, 0.0) / strategies.virtual_pipeline
    least = strategies.num_microbatches * peak_s + way_s
    least = least + _boundaries_s(question, strategies, allowed)
    found: Floats = (least + _once_s(question, strategies, units, allowed)) * ROUNDING
    return found


def _peak_s(question: Question, times: PassTimes, pipeline: Floats) -> Floats:
    target = question.capabilities
    if target.uneven_layout:
        return least_peak_s(question.model, times, pipeline=pipeline.astype(np.int64))
    each = question.model.num_layers // pipeline
    alike_s = each * np.minimum(times.dense_s, times.moe_s)
    return np.maximum(alike_s + times.end_s, total_s(question.model, times) / pipeline)


def _boundaries_s(question: Question, strategies: Strategies, allowed: Allowed) -> Numbers:
    s, own = strategies, question.constants
    sent = s.element_bytes * s.tokens * question.shape.hidden / s.tensor
    nearest: Numbers = np.inf
    for order in allowed.rank_orders:
        group = groups(s, question.hardware, order=tuple(order.split("-"))).boundary
        nearest = np.minimum(nearest, send_s(sent, group, question.hardware, own))
    crossings = 2.0 * (s.pipeline - 1.0)
    each = np.where(
        np.equal(s.virtual_pipeline, 1.0),
        crossings / s.pipeline * (s.num_microbatches - 1.0),
        0.0,
    )
    return (crossings + each) * nearest * own.boundary_exposed_ratio


def _once_s(
    question: Question, strategies: Strategies, units: UnitCosts, allowed: Allowed
) -> Numbers:
    s, own, shape = strategies, question.constants, question.shape
    dense = of_all(shape, units, "parameters") / s.pipeline
    experts = of_all(shape, units, "expert_parameters") / s.pipeline
    shared, apart = s.data * s.context, s.expert_data
    is_sharded = bool(allowed.zero_stages - {0})
    local = dense / shared + experts / apart if is_sharded else dense + experts
    once_s = local * _optimizer_s(question) + own.step_fixed_s
    if allowed.zero_stages <= {0, 1}:
        once_s = once_s + own.gradient_exposed_ratio * _sums_s(question, s, dense, allowed)
    return once_s


def _optimizer_s(question: Question) -> Numbers:
    """Seconds per parameter, on the device or offloaded, whichever is faster."""
    machine = question.hardware
    on_device = question.constants.optimizer_bytes / machine.memory_bytes_per_s
    return np.minimum(on_device, OFFLOAD_BYTES / machine.host_bytes_per_s)


def _sums_s(
    question: Question, strategies: Strategies, dense: Numbers, allowed: Allowed
) -> Numbers:
    """Gradient sums of the dense parameters in the order that suits them best."""
    nearest: Numbers = np.inf
    for order in allowed.rank_orders:
        group = groups(strategies, question.hardware, order=tuple(order.split("-"))).shared
        moved = all_gather_s(
            dense * strategies.gradient_bytes, group, question.hardware, question.constants
        )
        nearest = np.minimum(nearest, moved)
    return nearest
