"""The best option of every stage when its layers are given, however many stages a device runs.

With the cuts fixed, devices share nothing: the objective grows with each device's own time. (A
uniform option is tried option by option.) On one device every possible cap on the transient is
tried; the stages then keep their options under the cap, and the Pareto front of (bytes, seconds) is
merged stage by stage. Exact; the front holds at most O^v points for v stages on a device, far fewer
once dominated points are gone.

Letters: R runs, O options, S stages, D devices, V stages of one device, N points of a front.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.layout.problem import Bytes, Layout, LayoutProblem, Seconds
from solvers.result import Claim, Status


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCosts:
    """Time and memory of each stage under each option."""

    layers_SR: tuple[tuple[int, ...], ...]
    time_s_SO: Seconds
    resident_bytes_SO: Bytes
    transient_bytes_SO: Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Front:
    """Choices of options for one device: bytes grow, seconds fall, nothing is dominated."""

    bytes_N: Bytes
    time_s_N: Seconds
    option_NV: npt.NDArray[np.int64]


def stage_costs(problem: LayoutProblem) -> StageCosts:
    """Tabulate the stages of a problem whose layout is fixed."""
    if problem.fixed_layout is None:
        raise ValueError("stage_costs needs a problem with a fixed_layout")
    run_of_layer = np.repeat(np.arange(problem.num_runs), problem.run_lengths)
    cuts = np.cumsum(problem.fixed_layout)
    layers_SR = np.array(
        [
            np.bincount(run_of_layer[end - layers : end], minlength=problem.num_runs)
            for end, layers in zip(cuts, problem.fixed_layout, strict=True)
        ]
    )
    in_flight_S1 = np.array(problem.in_flight_S)[:, None]
    saved_SO = layers_SR @ problem.saved_bytes_RO + problem.fixed_saved_bytes_S[:, None]
    static_S = layers_SR @ problem.static_bytes_R + problem.fixed_bytes_S
    present_SRO = (layers_SR > 0)[..., None] * problem.transient_bytes_RO
    return StageCosts(
        layers_SR=tuple(tuple(layers_R) for layers_R in layers_SR.tolist()),
        time_s_SO=layers_SR @ problem.time_s_RO + problem.fixed_time_s_S[:, None],
        resident_bytes_SO=static_S[:, None] + in_flight_S1 * saved_SO,
        transient_bytes_SO=present_SRO.max(axis=1),
    )


def fastest_options(problem: LayoutProblem) -> Claim[Layout]:
    """Return the proven optimum of a problem whose layout is fixed."""
    costs = stage_costs(problem)
    best, best_objective = None, math.inf
    for options in option_sets(problem):
        chosen = [
            _fastest(problem, costs, device, options) for device in range(problem.num_devices)
        ]
        time_s_D = [time_s for time_s, _ in chosen]
        bubble_s = (sum(time_s_D) - max(time_s_D)) / problem.stages_per_device
        value = problem.num_microbatches * max(time_s_D) + bubble_s
        if value < best_objective:
            best_objective = value
            best = layout_of_devices(problem, costs, [option_V for _, option_V in chosen])
    status = Status.INFEASIBLE if best is None else Status.OPTIMAL
    return Claim(status=status, solution=best, bound=best_objective)


def even_layout(problem: LayoutProblem) -> LayoutProblem:
    """Return the problem with its layers spread evenly, the longer stages first."""
    per_stage, rest = divmod(problem.num_layers, problem.num_stages)
    even = tuple(per_stage + (stage < rest) for stage in range(problem.num_stages))
    return dataclasses.replace(problem, fixed_layout=even)


def option_sets(problem: LayoutProblem) -> list[list[int]]:
    """Return the options that may meet in one layout: all, or one at a time when uniform."""
    every = list(range(problem.num_options))
    return [[option] for option in every] if problem.uniform_option else [every]


def fronts_by_cap(
    costs: StageCosts, stages: tuple[int, ...], options: list[int]
) -> list[tuple[int, Front]]:
    """One front for every cap on the transient that the stages of a device can meet."""
    transient_VO = costs.transient_bytes_SO[np.ix_(stages, options)]
    caps = [int(cap) for cap in np.unique(transient_VO) if cap >= transient_VO.min(axis=1).max()]
    return [(cap, _front(costs, stages, options, cap)) for cap in caps]


def layout_of_devices(
    problem: LayoutProblem, costs: StageCosts, option_DV: list[list[int]]
) -> Layout:
    """Put the devices' options back in the order of the stages."""
    option_of_stage = {
        stage: option
        for device, option_V in enumerate(option_DV)
        for stage, option in zip(problem.stages_of_device(device), option_V, strict=True)
    }
    options = tuple(option_of_stage[stage] for stage in range(problem.num_stages))
    return Layout(layers_SR=costs.layers_SR, option_S=options)


def _fastest(
    problem: LayoutProblem, costs: StageCosts, device: int, options: list[int]
) -> tuple[float, list[int]]:
    """Smallest time of one device within its memory; `inf` when nothing fits."""
    limit = int(problem.memory_limit_bytes_D[device])
    best_s, best_V = math.inf, []
    for cap, front in fronts_by_cap(costs, problem.stages_of_device(device), options):
        fitting = int(np.searchsorted(front.bytes_N, limit - cap, side="right"))
        if fitting and front.time_s_N[fitting - 1] < best_s:
            best_s = float(front.time_s_N[fitting - 1])
            best_V = front.option_NV[fitting - 1].tolist()
    return best_s, best_V


def _front(costs: StageCosts, stages: tuple[int, ...], options: list[int], cap: int) -> Front:
    front = Front(
        bytes_N=np.zeros(1, dtype=np.int64),
        time_s_N=np.zeros(1),
        option_NV=np.zeros((1, 0), dtype=np.int64),
    )
    for stage in stages:
        kept = [option for option in options if costs.transient_bytes_SO[stage, option] <= cap]
        front = _merged(front, costs.resident_bytes_SO[stage], costs.time_s_SO[stage], kept)
    return front


def _merged(front: Front, resident_bytes_O: Bytes, time_s_O: Seconds, options: list[int]) -> Front:
    """Add one stage to a front and drop what is dominated."""
    bytes_M = (front.bytes_N[:, None] + resident_bytes_O[options]).ravel()
    time_s_M = (front.time_s_N[:, None] + time_s_O[options]).ravel()
    order = np.lexsort((time_s_M, bytes_M))
    sorted_s = time_s_M[order]
    fastest_before = np.concatenate(([np.inf], np.minimum.accumulate(sorted_s)[:-1]))
    kept = order[sorted_s < fastest_before]
    earlier, option = np.divmod(kept, len(options))
    option_NV = np.column_stack((front.option_NV[earlier], np.asarray(options)[option]))
    return Front(bytes_N=bytes_M[kept], time_s_N=time_s_M[kept], option_NV=option_NV)
