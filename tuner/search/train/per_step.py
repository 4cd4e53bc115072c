"""Lower bound on costs once per step in any layout: data-parallel collectives and the optimizer.

Follows tuner/costs/train/step.py, with two differences that can only lower it: parameters are
those of the mean device, and overlap leaves no more than its share exposed, however little there is
to overlap with.

Letters: C candidates.
"""

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.costs.train.hybrid_sharding import between_copies, num_copies, of_one_copy
from tuner.costs.train.links import Group, all_gather_s, all_reduce_s, groups
from tuner.costs.train.shapes import ModelShape
from tuner.costs.train.step import OFFLOAD_BYTES
from tuner.costs.train.units import UnitCosts
from tuner.search.train.problem import TrainProblem


def per_step_bound_s(
    problem: TrainProblem, strategies: Strategies, units: UnitCosts, order: tuple[str, ...]
) -> Numbers:
    """Lower bound on the costs once per step of every candidate, in seconds."""
    s, own, machine = strategies, problem.constants, problem.hardware
    laid = groups(s, machine, order=order)
    dense = sum_over_layers(problem.shape, units, "parameters") / s.pipeline
    experts = sum_over_layers(problem.shape, units, "expert_parameters") / s.pipeline
    reduction_s = _gradient_reduction_s(problem, s, dense, laid.shared)
    reduction_s = reduction_s + _gradient_reduction_s(problem, s, experts, laid.expert_data)
    all_gather_total_s = _parameter_all_gather_s(problem, s, dense, laid.shared)
    all_gather_total_s = all_gather_total_s + _parameter_all_gather_s(
        problem, s, experts, laid.expert_data
    )
    visible_s = reduction_s * np.where(
        np.greater(s.overlap_gradients, 0.0), own.gradient_exposed_ratio, 1.0
    ) + all_gather_total_s * np.where(
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
    total = parameters * np.minimum(s.weight_bytes, 2.0)
    near = of_one_copy(group, num_copies(s))
    gathered = all_gather_s(total, near, problem.hardware, problem.constants)
    once = np.equal(s.zero_stage, 1.0) | np.equal(s.zero_stage, 2.0)
    return np.where(once & np.greater(parameters, 0.0), gathered, 0.0)
