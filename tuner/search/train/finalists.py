"""Integer program for layout, recomputation and chunks of the best rows, and their simulation.

The search uses one layout per decision. Interleaved stages have only one. For a row that came out
best, `layout_problem` states all layouts under all recomputation levels and chunk counts that could
still be faster as a problem of solvers/layout, with the analytic unit costs:

    resident      a layer's state; embedding, head, workspaces, weight gradients, context
    saved         per layer and micro-batch in flight, pools and unusable blocks included
    transient     the peak within one layer's backward pass

The solution is priced again in full; only one that fits and is faster replaces that of the search.
`simulated_s` simulates the schedule pass by pass (tuner/simulate/pipeline.py); the closed form is
too long where stages differ.

Letters: S stages, R runs of identical layers, O variants (recomputation and chunks). Not covered:
recomputation that differs between stages, which the analytic formulas cannot express.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.steps.config import LayerKind
from solvers.layout.problem import LayoutProblem
from solvers.registry import LAYOUT
from tuner.arrays import Floats, Ints
from tuner.costs.train.in_flight import warmup_in_flight
from tuner.costs.train.memory_units import MemoryUnits
from tuner.search.train.candidate_prices import (
    balanced_layers,
    candidate_bound_s,
    price_batch,
    time_pieces,
    times_of_kinds,
)
from tuner.search.train.candidates import Candidates, to_strategies
from tuner.search.train.layouts import PassTimes, layers_of_stages, to_stages
from tuner.search.train.memory import host_bytes, take_units, unit_memory
from tuner.search.train.options import RECOMPUTE_AXES
from tuner.search.train.search_result import (
    Detail,
    SearchOutcome,
    SimulatedRow,
    Solutions,
    price_in_layout,
    price_solution,
    stage_layers,
)
from tuner.search.train.space_size import by_facts
from tuner.simulate.pipeline import Pipeline, can_simulate, simulate_step
from tuner.simulate.rows import RowSteps, simulate_rows
from tuner.units import format_ratio, format_s

MOST_OPTIONS = 12
"""Variants that one program chooses from, those of the lowest bounds."""


NEGLIGIBLE_RATIO: Final = 1e-3
"""Share of a step below which the error of an extrapolated schedule is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimulatedOrder:
    """Rows of a search by the seconds of their simulated steps, best first."""

    order: tuple[int, ...]
    """Indices of the search's rows; those not simulated come last, in its order."""
    objective_s: tuple[float, ...]
    """Objective of each simulated row in seconds: the larger of closed form and simulation."""


def rank_by_simulation(
    search: SearchOutcome, *, time_limit_s: float, clock: Callable[[], float]
) -> SimulatedOrder:
    """Simulate rows in the order of their closed forms until those rule out the rest.

    The objective of a row is the larger of the two, so that every bound on the closed form bounds
    it; stages that differ make the simulated step of an interleaved schedule the longer one.
    """
    if search.solutions is None:
        return SimulatedOrder(order=(), objective_s=())
    start_s, simulated = clock(), dict[int, float]()
    best_s = np.inf
    for index, step_s in enumerate(search.solutions.step_s):
        if step_s >= best_s or (simulated and clock() - start_s > time_limit_s):
            break
        simulated[index] = max(float(step_s), simulated_s(price_solution(search, index)))
        best_s = min(best_s, simulated[index])
    order = sorted(simulated, key=lambda index: (simulated[index], index))
    rest = range(len(simulated), len(search.solutions))
    return SimulatedOrder(
        order=(*order, *rest), objective_s=tuple(simulated[index] for index in order)
    )


def refine_finalist(search: SearchOutcome, index: int, *, time_limit_s: float) -> SimulatedRow:
    """Solve the layout of one row of the search and simulate its schedule."""
    if search.solutions is None:
        raise ValueError("the search found nothing that fits")
    model, limit = search.problem.model, search.problem.memory_limit_bytes
    candidate = search.solutions.candidates.taken(np.array([index]))
    layers = stage_layers(search, index)
    detail = price_in_layout(search, candidate, to_stages(model, np.array(layers)[:, None]))
    variants = recompute_variants(search, candidate, step_s=_step_s(detail))
    program = layout_problem(search, variants)
    outcome = LAYOUT.solve(program, time_limit_s=time_limit_s)
    if outcome.solution is not None:
        chosen = variants.taken(np.array([outcome.solution.option_S[0]]))
        solved = tuple(sum(layers_R) for layers_R in outcome.solution.layers_SR)
        refined = price_in_layout(search, chosen, to_stages(model, np.array(solved)[:, None]))
        fits = float(refined.memory.total_PC.max()) <= limit
        if search.problem.host_limit_bytes is not None:
            layers_PC = _on_devices(solved, candidate)
            needed = host_bytes(search.problem, search.options, chosen, layers_PC)
            fits = fits and float(needed[0]) <= search.problem.host_limit_bytes
        if fits and _step_s(refined) < _step_s(detail):
            candidate, layers, detail = chosen, solved, refined
    row = Solutions(
        candidates=candidate,
        step_s=np.array([_step_s(detail)]),
        peak_bytes=np.array([float(detail.memory.total_PC.max())]),
        layers_PC=_on_devices(layers, candidate),
    )
    return SimulatedRow(row=row, detail=detail, simulated_s=simulated_s(detail))


def _on_devices(layers_S: Sequence[int], candidate: Candidates) -> Ints:
    """Layers of every device of a candidate, all of its stages together, [P, 1]."""
    layers: Ints = np.array(layers_S).reshape(-1, int(candidate.rows["pipeline"][0])).sum(axis=0)
    return layers[:, None]


def recompute_variants(
    search: SearchOutcome, candidate: Candidates, *, step_s: float
) -> Candidates:
    """Legal recomputation and chunk counts that may be no slower, the row's own first."""
    axes = tuple(search.options.choices)
    table = search.options.legal(next(by_facts(candidate.rows))[0])
    same = np.ones(len(table), dtype=np.bool_)
    for at, axis in enumerate(axes):
        if axis not in RECOMPUTE_AXES:
            same &= table[:, at] == candidate.options[axis][0]
    options = table[same]
    every = Candidates(
        rows={name: np.repeat(column, len(options)) for name, column in candidate.rows.items()},
        options={axis: options[:, at] for at, axis in enumerate(axes)},
    )
    bound_s = candidate_bound_s(search.problem, search.options, every)
    order = np.argsort(bound_s, kind="stable")
    kept = order[bound_s[order] <= step_s][:MOST_OPTIONS]
    return candidate.concat(every.taken(kept))


def layout_problem(search: SearchOutcome, variants: Candidates) -> LayoutProblem:
    """State all layouts of one row under several variants, one variant for all stages."""
    problem = search.problem
    model, target = problem.model, problem.capabilities
    pipeline = int(variants.rows["pipeline"][0])
    stages = pipeline * int(variants.rows["virtual_pipeline"][0])
    batch = price_batch(problem, search.options, variants)
    piece = next(time_pieces(search.options, batch))
    times = times_of_kinds(problem, piece)
    units = _units(search, variants)
    runs = [(kind, len(list(layers))) for kind, layers in groupby(model.layers)]
    kinds = [int(kind is LayerKind.MOE) for kind, _ in runs]
    pools_O = 1.0 + units.unused_ratio_C + units.pool_ratio_C
    unused_O = 1.0 + units.unused_ratio_C
    moments_O = (units.dense_moment_C * unused_O, units.moe_moment_C * unused_O)
    state_K = units.state_BKC[:3, :, 0].sum(axis=0)
    is_free = target.uneven_layout and stages == pipeline
    layers_PC = balanced_layers(batch, piece)[:, :1]
    layers_S = tuple(int(n) for n in layers_of_stages(layers_PC, virtual=stages // pipeline)[:, 0])
    return LayoutProblem(
        run_lengths=tuple(length for _, length in runs),
        device_of_stage=tuple(stage % pipeline for stage in range(stages)),
        options=tuple(f"option {index}" for index in range(len(variants))),
        time_s_RO=np.stack([(times.dense_s, times.moe_s)[kind] for kind in kinds]),
        fixed_time_s_S=_end_times(times, stages),
        static_bytes_R=_whole(np.array([state_K[kind] for kind in kinds])),
        fixed_bytes_S=_whole(_resident(search, units, pipeline, stages)),
        saved_bytes_RO=_whole(
            np.stack([np.broadcast_to(units.saved_KC[k] * pools_O, len(variants)) for k in kinds])
        ),
        fixed_saved_bytes_S=_whole(np.zeros(stages)),
        transient_bytes_RO=_whole(
            np.stack([np.broadcast_to(moments_O[kind], len(variants)) for kind in kinds])
        ),
        in_flight_S=_in_flight(search, variants, pipeline, stages // pipeline),
        memory_limit_bytes_D=np.full(pipeline, int(problem.memory_limit_bytes), dtype=np.int64),
        num_microbatches=int(np.asarray(piece.strategies.num_microbatches).ravel()[0]),
        uniform_option=True,
        fixed_layout=None if is_free else layers_S,
        min_layers_per_stage=0 if target.empty_stages or not is_free else 1,
    )


def simulated_s(detail: Detail) -> float:
    """Simulate the schedule of a decision, if possible; costs once per step come on top.

    So does what ranks wait for rows that cost more than the mean row.
    """
    pipeline, steps = _pipeline(detail), row_steps(detail)
    lost_s = 0.0 if steps is None else steps.lost_s
    if pipeline is None:
        return _step_s(detail) + lost_s
    return simulate_step(pipeline).step_s + float(np.max(detail.step.once_s)) + lost_s


def row_steps(detail: Detail, *, are_sorted: bool = False) -> RowSteps | None:
    """Simulate steps of rows that cost unequal seconds; None where all are alike.

    The schedule is 1F1B or interleaved, also where weight gradients fill the bubble.
    """
    if detail.rows is None:
        return None
    return simulate_rows(detail.rows, _schedule(detail), are_sorted=are_sorted)


def unsettled_notes(detail: Detail) -> tuple[str, ...]:
    """State the largest error of an extrapolated schedule, unless it is negligible.

    A schedule too long to simulate whole is extrapolated from its first cycles, which may not have
    settled yet.
    """
    pipeline = _pipeline(detail)
    if pipeline is None:
        return ()
    simulated = simulate_step(pipeline)
    if simulated.max_error_s <= NEGLIGIBLE_RATIO * simulated.step_s:
        return ()
    return (
        f"the schedule is extrapolated from its first micro-batches: the step may be off by "
        f"{format_s(simulated.max_error_s)} "
        f"({format_ratio(simulated.max_error_s / simulated.step_s)})",
    )


def _pipeline(detail: Detail) -> Pipeline | None:
    """The pipeline to simulate; None if the simulation does not cover it."""
    pipeline = _schedule(detail)
    # Only the closed form covers weight gradients in the bubble.
    has_bubble = not np.any(np.asarray(detail.strategies.zero_bubble) > 0.0)
    return pipeline if has_bubble and can_simulate(pipeline) else None


def _schedule(detail: Detail) -> Pipeline:
    """Return the pipeline without weight gradients of their own."""
    step, s = detail.step, detail.strategies
    devices = int(np.max(s.pipeline))
    return Pipeline(
        forward_s_S=tuple(float(t) for t in step.forward_s_SC[:, 0]),
        backward_s_S=tuple(float(t) for t in step.backward_s_SC[:, 0]),
        num_devices=devices,
        num_microbatches=int(np.max(s.num_microbatches)),
        send_s=float(np.max(step.boundary_s)) if devices > 1 else 0.0,
    )


def _units(search: SearchOutcome, variants: Candidates) -> MemoryUnits:
    strategies = to_strategies(search.problem, search.options, variants)
    units, unit_of = unit_memory(search.problem, strategies, variants)
    return take_units(units, unit_of)


def _end_times(times: PassTimes, stages: int) -> Floats:
    fixed_s = np.zeros(stages)
    fixed_s[0] += times.embedding_s[0]
    fixed_s[-1] += times.end_s[0]
    return fixed_s


def _resident(search: SearchOutcome, units: MemoryUnits, pipeline: int, stages: int) -> Floats:
    """Bytes of every stage besides its layers; what a device has once is on its first stage."""
    mtp = search.problem.shape.mtp_layers
    state_K = units.state_BKC[:3, :, 0].sum(axis=0)
    unused = 1.0 + units.unused_ratio_C[0]
    always = units.always_layer_C + np.maximum(units.always_dense_C, units.always_moe_C)
    once = always[0] + units.live_C[0] + units.dispatch_C.max() + units.boundary_C[0]
    resident_S = np.zeros(stages)
    resident_S[:pipeline] += unused * once + units.context_C[0]
    resident_S[0] += state_K[2]
    resident_S[-1] += state_K[2] * (2.0 if mtp else 1.0) + mtp * state_K[3]
    resident_S[-1] += unused * (1.0 + mtp) * units.head_saved_C[0]
    resident_S[-1] += mtp * unused * units.saved_KC[3].max()
    return resident_S


def _in_flight(
    search: SearchOutcome, variants: Candidates, pipeline: int, virtual: int
) -> tuple[int, ...]:
    """Micro-batches that every stage keeps before its device's first backward pass."""
    strategies = to_strategies(search.problem, search.options, variants)
    microbatches = np.atleast_1d(strategies.num_microbatches)[:1]
    zero_bubble = np.atleast_1d(strategies.zero_bubble)[:1]
    kept = warmup_in_flight(pipeline, virtual, microbatches=microbatches, zero_bubble=zero_bubble)
    return tuple(int(n) for n in kept.reshape(-1))


def _whole(values: Floats) -> npt.NDArray[np.int64]:
    whole: npt.NDArray[np.int64] = np.ceil(values).astype(np.int64)
    return whole


def _step_s(detail: Detail) -> float:
    return float(np.asarray(detail.step.step_s).ravel()[0])
