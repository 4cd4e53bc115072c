"""Patterns of a stage: what the integer program of `cp_sat.py` chooses from.

A pattern is how many layers of each run a stage holds and under which option. Identical layers make
most intervals the same pattern, so there are few: the program picks one per stage, counts
layers, and keeps the runs in order. Patterns that do not fit an empty device are not made, nor
those that another pattern with the same layers dominates in time and memory.

Letters: R runs, O options, C distinct contents, N patterns of one stage.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.layout.problem import Bytes, Layout, LayoutProblem, Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePatterns:
    """The patterns of one stage, row by row."""

    layers_NR: npt.NDArray[np.int64]
    option_N: npt.NDArray[np.int64]
    time_s_N: Seconds
    resident_bytes_N: Bytes
    transient_bytes_N: Bytes

    def __len__(self) -> int:
        return len(self.option_N)


def patterns_of_stages(problem: LayoutProblem) -> tuple[StagePatterns, ...]:
    """Tabulate the patterns of every stage, in execution order."""
    layers_CR = _contents(problem)
    return tuple(
        _patterns_of_stage(problem, stage, layers_CR) for stage in range(problem.num_stages)
    )


def layout_of_choice(patterns: tuple[StagePatterns, ...], chosen: list[int]) -> Layout:
    """The layout in which stage s is pattern chosen[s]."""
    picked = list(zip(patterns, chosen, strict=True))
    return Layout(
        layers_SR=tuple(tuple(stage.layers_NR[n].tolist()) for stage, n in picked),
        option_S=tuple(int(stage.option_N[n]) for stage, n in picked),
    )


def least_objective_s(problem: LayoutProblem) -> float:
    """Seconds that no layout can beat: every layer at its fastest, devices perfectly even.

    The total work W is then fixed, the slowest of D devices has at least W / D, and the objective
    grows with its share; memory and the rules of a layout can only make it larger.
    """
    total_s = float(problem.time_s_RO.min(axis=1) @ np.array(problem.run_lengths))
    total_s += float(problem.fixed_time_s_S.sum())
    per_device = problem.stages_per_device
    weight_of_peak = problem.num_microbatches - 1 / per_device
    return weight_of_peak * total_s / problem.num_devices + total_s / per_device


def _contents(problem: LayoutProblem) -> npt.NDArray[np.int64]:
    """The distinct layer counts [C, R] that a stage may hold."""
    run_of_layer = np.repeat(np.arange(problem.num_runs), problem.run_lengths)
    before_BR = np.zeros((problem.num_layers + 1, problem.num_runs), dtype=np.int64)
    before_BR[1:] = np.cumsum(run_of_layer[:, None] == np.arange(problem.num_runs), axis=0)
    start, stop = np.triu_indices(len(before_BR), k=problem.min_layers_per_stage)
    return np.unique(before_BR[stop] - before_BR[start], axis=0)


def _patterns_of_stage(
    problem: LayoutProblem, stage: int, layers_CR: npt.NDArray[np.int64]
) -> StagePatterns:
    in_flight = problem.in_flight_S[stage]
    stage_bytes = problem.fixed_bytes_S[stage] + in_flight * problem.fixed_saved_bytes_S[stage]
    static_bytes_C1 = (layers_CR @ problem.static_bytes_R)[:, None]
    resident_CO = stage_bytes + static_bytes_C1 + in_flight * (layers_CR @ problem.saved_bytes_RO)
    transient_CO = ((layers_CR > 0)[..., None] * problem.transient_bytes_RO).max(axis=1)
    time_s_CO = problem.fixed_time_s_S[stage] + layers_CR @ problem.time_s_RO
    limit = problem.memory_limit_bytes_D[problem.device_of_stage[stage]]
    kept_CO = resident_CO + transient_CO <= limit
    if not problem.uniform_option:
        kept_CO &= ~_beaten_CO(problem, kept_CO, time_s_CO, resident_CO, transient_CO)
    content_N, option_N = np.nonzero(kept_CO)
    return StagePatterns(
        layers_NR=layers_CR[content_N],
        option_N=option_N.astype(np.int64),
        time_s_N=time_s_CO[kept_CO],
        resident_bytes_N=resident_CO[kept_CO],
        transient_bytes_N=transient_CO[kept_CO],
    )


def _beaten_CO(
    problem: LayoutProblem,
    fits_CO: npt.NDArray[np.bool_],
    time_s_CO: Seconds,
    resident_CO: Bytes,
    transient_CO: Bytes,
) -> npt.NDArray[np.bool_]:
    """Mark options than which another that fits is nowhere worse; the first of equals is kept."""
    beaten_CO = np.zeros_like(fits_CO)
    for rival in range(problem.num_options):
        others = np.s_[:, rival : rival + 1]
        no_worse, better = fits_CO[others], rival < np.arange(problem.num_options)
        for cost_CO in (time_s_CO, resident_CO, transient_CO):
            no_worse = no_worse & (cost_CO[others] <= cost_CO)
            better = better | (cost_CO[others] < cost_CO)
        beaten_CO |= no_worse & better
    return beaten_CO
