"""The least additional memory per device under which a layout fits.

When no layout fits, the least uniform addition to the memory limits that lets one fit is

    extra = min over layouts and options of max over devices of (memory - limit), at least 0

One stage per device: a bottleneck path over interval tables, exact. A fixed layout: the
minimum-memory options of each device, exact. Otherwise CP-SAT minimises the addition as far as its
time lasts. The layout has minimum memory, not minimum time: solve `with_extra_memory` for the plan.

Letters: O options, S stages, D devices, A and B cut points 0..L.
"""

import dataclasses

import numpy as np

from solvers.arrays import LARGEST_BYTES
from solvers.errors import RejectedClaimError
from solvers.layout import check
from solvers.layout.fixed_cuts import (
    even_layout,
    fronts_by_cap,
    layout_of_devices,
    option_sets,
    stage_costs,
)
from solvers.layout.intervals import (
    allowed_AB,
    bottleneck_path,
    interval_tables,
    layout_of_cuts,
    memory_bytes_ABO,
)
from solvers.layout.problem import Layout, LayoutProblem

NEVER = 2 * LARGEST_BYTES
"""Overflow of an interval that the stage may not hold: above every real one."""


def least_extra_bytes(problem: LayoutProblem, *, time_limit_s: float) -> int:
    """Find the smallest addition to every device's memory under which a layout fits, checked."""
    if problem.stages_per_device == 1:
        return _checked(problem, _min_memory_cuts(problem))
    if problem.fixed_layout is not None:
        return _checked(problem, _min_memory_options(problem))
    return _search(problem, time_limit_s=time_limit_s)


def with_extra_memory(problem: LayoutProblem, *, extra_bytes: int) -> LayoutProblem:
    """Return the problem with this much more memory on every device."""
    limits = problem.memory_limit_bytes_D + extra_bytes
    return dataclasses.replace(problem, memory_limit_bytes_D=limits)


def _min_memory_cuts(problem: LayoutProblem) -> Layout:
    """Return the layout that needs the least added memory, with one stage per device.

    A uniform option is tried option by option.
    """
    tables = interval_tables(problem)
    shape = (problem.num_stages, *tables.static_bytes_AB.shape)
    candidates = []
    for options in option_sets(problem):
        over_SAB, option_SAB = np.empty(shape, np.int64), np.empty(shape, np.int64)
        for stage, device in enumerate(problem.device_of_stage):
            needed_ABO = memory_bytes_ABO(problem, tables, stage=stage)[:, :, options]
            over_AB = needed_ABO.min(axis=2) - problem.memory_limit_bytes_D[device]
            over_SAB[stage] = np.where(allowed_AB(problem, stage=stage), over_AB, NEVER)
            option_SAB[stage] = np.asarray(options)[needed_ABO.argmin(axis=2)]
        peak, cuts = bottleneck_path(over_SAB, never=NEVER)
        candidates.append((peak, layout_of_cuts(tables, option_SAB, cuts)))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _min_memory_options(problem: LayoutProblem) -> Layout:
    """Return the options that need the least added memory, with the cuts given.

    A uniform option is the one with the lowest peak overflow.
    """
    costs = stage_costs(problem)
    limit_D = problem.memory_limit_bytes_D.tolist()
    candidates = []
    for options in option_sets(problem):
        min_memory_D = [
            min(
                (
                    (int(front.bytes_N[0]) + cap - limit, front.option_NV[0].tolist())
                    for cap, front in fronts_by_cap(
                        costs, problem.stages_of_device(device), options
                    )
                ),
            )
            for device, limit in enumerate(limit_D)
        ]
        layout = layout_of_devices(problem, costs, [option_V for _, option_V in min_memory_D])
        candidates.append((max(over for over, _ in min_memory_D), layout))
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _search(problem: LayoutProblem, *, time_limit_s: float) -> int:
    """Search where devices couple the cuts: from even stages, which CP-SAT improves on."""
    from solvers.layout import cp_sat  # OR-Tools is loaded only where it is needed.

    start = _checked(problem, _min_memory_options(even_layout(problem)))
    if not start:
        return start
    claim = cp_sat.least_extra_bytes(problem, most_extra_bytes=start, time_limit_s=time_limit_s)
    return start if claim.solution is None else _checked(problem, claim.solution)


def _checked(problem: LayoutProblem, layout: Layout) -> int:
    """Return the additional memory of a layout by the checker's numbers."""
    overflow_D = [
        needed - int(limit)
        for needed, limit in zip(
            check.memory_bytes_D(problem, layout), problem.memory_limit_bytes_D, strict=True
        )
    ]
    extra = max(0, *overflow_D)
    broken = check.violations(with_extra_memory(problem, extra_bytes=extra), layout)
    if broken:
        raise RejectedClaimError(f"the relaxed layout is not allowed: {broken[0]}")
    return extra
