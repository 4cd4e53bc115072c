"""Seconds that a step pays once in any layout: collectives of data parallelism and the optimizer.

Follows tuner/costs/analytic/step.py, with two differences that can only lower it: parameters are
the mean device's, and what overlaps leaves no more visible than its share, however little there is
to overlap with.

Letters: C columns.
"""

import numpy as np

from tuner.costs.analytic.hybrid_sharding import between_copies, num_copies, of_one_copy
from tuner.costs.analytic.links import Group, all_gather_s, all_reduce_s, groups
from tuner.costs.analytic.shapes import ModelShape, Numbers, Strategies
from tuner.costs.analytic.step import OFFLOAD_BYTES
from tuner.costs.analytic.units import UnitCosts
from tuner.planner.analytic.problem import Question


def least_once_s(
    question: Question, strategies: Strategies, units: UnitCosts, order: tuple[str, ...]
) -> Numbers:
    """Bound from below what every column pays once."""
    s, own, machine = strategies, question.constants, question.hardware
    laid = groups(s, machine, order=order)
    dense = of_all(question.shape, units, "parameters") / s.pipeline
    experts = of_all(question.shape, units, "expert_parameters") / s.pipeline
    sums_s = _sums_s(question, s, dense, laid.shared)
    sums_s = sums_s + _sums_s(question, s, experts, laid.expert_data)
    gathers_s = _gathers_s(question, s, dense, laid.shared)
    gathers_s = gathers_s + _gathers_s(question, s, experts, laid.expert_data)
    visible_s = sums_s * np.where(
        np.greater(s.overlap_gradients, 0.0), own.gradient_exposed_ratio, 1.0
    ) + gathers_s * np.where(
        np.greater(s.overlap_parameters, 0.0), own.parameter_exposed_ratio, 1.0
    )
    is_sharded, copies = np.greater(s.zero_stage, 0.0), num_copies(s)
    parts = of_one_copy(laid.shared, copies).ranks
    expert_parts = of_one_copy(laid.expert_data, copies).ranks
    local = np.where(is_sharded, dense / parts, dense)
    local = local + np.where(is_sharded, experts / expert_parts, experts)
    on_device = own.optimizer_bytes * (1.0 - s.optimizer_offload) / machine.memory_bytes_per_s
    on_host = OFFLOAD_BYTES * s.optimizer_offload / machine.host_bytes_per_s
    return visible_s + local * (on_device + on_host) + own.step_fixed_s


def of_all(shape: ModelShape, units: UnitCosts, name: str) -> Numbers:
    """Sum a cost over all layers and both ends of the model."""
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


def _sums_s(question: Question, s: Strategies, parameters: Numbers, group: Group) -> Numbers:
    total = parameters * s.gradient_bytes
    reduced = all_reduce_s(total, group, question.hardware, question.constants)
    copies = num_copies(s)
    near = of_one_copy(group, copies)
    scattered = all_gather_s(total, near, question.hardware, question.constants)
    if np.any(np.greater(copies, 1.0)):
        apart = between_copies(group, copies)
        scattered = scattered + all_reduce_s(
            total / near.ranks, apart, question.hardware, question.constants
        )
    moved = np.where(np.equal(s.zero_stage, 0.0), reduced, scattered)
    return np.where(np.less(s.zero_stage, 2.0) & np.greater(parameters, 0.0), moved, 0.0)


def _gathers_s(question: Question, s: Strategies, parameters: Numbers, group: Group) -> Numbers:
    total = parameters * np.minimum(s.weight_bytes, 2.0)
    near = of_one_copy(group, num_copies(s))
    gathered = all_gather_s(total, near, question.hardware, question.constants)
    once = np.equal(s.zero_stage, 1.0) | np.equal(s.zero_stage, 2.0)
    return np.where(once & np.greater(parameters, 0.0), gathered, 0.0)
