"""The integer program of layout, recomputation and chunks for the best rows, and their play.

The search draws one layout for every decision; that of interleaved stages is the only one. For a
row that came out best, `layout_problem` puts all layouts under all levels of recomputation and
chunk counts that could still be faster into the form of solvers/layout, with the analytic units of
time and bytes:

    resident      a layer's state; embedding, head, workspaces, weight gradients, context
    saved         per layer and micro-batch in flight, pools and unusable blocks included
    transient     the moment of one layer's backward pass

What the program says is priced again in full; only what fits there and is faster replaces the
search's own. `played_s` plays the schedule pass by pass (tuner/simulate/pipeline.py), which the
closed form overestimates where stages are unlike.

Letters: S stages, R runs of alike layers, O options. Not covered: levels that differ between
stages, which the columns of the analytic model cannot say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.steps.config import LayerKind
from solvers.layout.problem import LayoutProblem
from solvers.registry import LAYOUT
from tuner.costs.analytic.in_flight import held
from tuner.costs.analytic.memory_units import MemoryUnits
from tuner.planner.analytic.candidate_prices import (
    balanced_layers,
    batch_of,
    least_s,
    time_pieces,
    times_of_kinds,
)
from tuner.planner.analytic.candidates import Candidates, strategies_of
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.layouts import PassTimes, layers_of_stages, stages_of
from tuner.planner.analytic.memory import taken_bytes, unit_memory
from tuner.planner.analytic.option_table import AGAIN_AXES
from tuner.planner.analytic.search_result import Detail, detail_of, detailed, stage_layers
from tuner.planner.analytic.space_size import by_facts
from tuner.simulate.pipeline import Pipeline, can_be_played, play
from tuner.units import format_ratio, format_s

Floats = npt.NDArray[np.float64]

MOST_OPTIONS = 12
"""Levels of recomputation that one program chooses from, the most promising."""


NEGLIGIBLE_RATIO: Final = 1e-3
"""Of a step; what an extrapolated schedule may be off by less is not said."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranking:
    """Found rows by the seconds of a played step, best first."""

    order: tuple[int, ...]
    """Indices of the search's rows; those that were not played come last, in its order."""
    objective_s: tuple[float, ...]
    """Of each played row: the larger of closed form and play."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Finalist:
    """A row under the level and in the layout of the integer program."""

    candidate: Candidates
    """One column."""
    layers_S: tuple[int, ...]
    detail: Detail
    step_s: float
    played_s: float
    is_moved: bool
    """The program found something faster than the search had."""
    gap_ratio: float
    """Of the program; 1 where it found nothing in time."""


def ranked(search: Search, *, time_limit_s: float, clock: Callable[[], float]) -> Ranking:
    """Play the found rows in the order of their closed forms until these alone rule out the rest.

    The objective of a row is the larger of the two, so that every bound on the closed form bounds
    it; unlike stages of an interleaved schedule make the played step the longer one.
    """
    if search.found is None:
        return Ranking(order=(), objective_s=())
    start_s, played = clock(), dict[int, float]()
    best_s = np.inf
    for index, step_s in enumerate(search.found.step_s):
        if step_s >= best_s or (played and clock() - start_s > time_limit_s):
            break
        played[index] = max(float(step_s), played_s(detail_of(search, index)))
        best_s = min(best_s, played[index])
    order = sorted(played, key=lambda index: (played[index], index))
    rest = range(len(played), len(search.found))
    return Ranking(order=(*order, *rest), objective_s=tuple(played[index] for index in order))


def finalist(search: Search, index: int, *, time_limit_s: float) -> Finalist:
    """Solve the layout of one found row and play its schedule."""
    if search.found is None:
        raise ValueError("the search found nothing that fits")
    model, limit = search.question.model, search.question.memory_limit_bytes
    one = search.found.candidates.taken(np.array([index]))
    layers, moved = stage_layers(search, index), False
    detail = detailed(search, one, stages_of(model, np.array(layers)[:, None]))
    options = options_of(search, one, step_s=_step_s(detail))
    problem = layout_problem(search, options)
    outcome = LAYOUT.solve(problem, method="exact", time_limit_s=time_limit_s)
    if outcome.solution is not None:
        chosen = options.taken(np.array([outcome.solution.option_S[0]]))
        solved = tuple(sum(layers_R) for layers_R in outcome.solution.layers_SR)
        other = detailed(search, chosen, stages_of(model, np.array(solved)[:, None]))
        fits = float(other.memory.total_PC.max()) <= limit
        if fits and _step_s(other) < _step_s(detail):
            one, layers, detail, moved = chosen, solved, other, True
    return Finalist(
        candidate=one,
        layers_S=layers,
        detail=detail,
        step_s=_step_s(detail),
        played_s=played_s(detail),
        is_moved=moved,
        gap_ratio=outcome.gap_ratio,
    )


def options_of(search: Search, one: Candidates, *, step_s: float) -> Candidates:
    """The legal levels and chunk counts of a row's way that may be no slower, its own first."""
    axes = tuple(search.ways.choices)
    table = search.ways.legal(next(by_facts(one.rows))[0])
    same = np.ones(len(table), dtype=np.bool_)
    for at, axis in enumerate(axes):
        if axis not in AGAIN_AXES:
            same &= table[:, at] == one.ways[axis][0]
    ways = table[same]
    every = Candidates(
        rows={name: np.repeat(column, len(ways)) for name, column in one.rows.items()},
        ways={axis: ways[:, at] for at, axis in enumerate(axes)},
    )
    bound_s = least_s(search.question, search.ways, every)
    order = np.argsort(bound_s, kind="stable")
    kept = order[bound_s[order] <= step_s][:MOST_OPTIONS]
    return one.joined(every.taken(kept))


def layout_problem(search: Search, options: Candidates) -> LayoutProblem:
    """State all layouts of one row under some levels of recomputation, one for all stages."""
    question = search.question
    model, target = question.model, question.capabilities
    pipeline = int(options.rows["pipeline"][0])
    stages = pipeline * int(options.rows["virtual_pipeline"][0])
    batch = batch_of(question, search.ways, options)
    piece = next(time_pieces(search.ways, batch))
    times = times_of_kinds(question, piece)
    units = _units(search, options)
    runs = [(kind, len(list(layers))) for kind, layers in groupby(model.layers)]
    kinds = [0 if kind is LayerKind.DENSE else 1 for kind, _ in runs]
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
        options=tuple(f"option {index}" for index in range(len(options))),
        time_s_RO=np.stack([(times.dense_s, times.moe_s)[kind] for kind in kinds]),
        fixed_time_s_S=_end_times(times, stages),
        static_bytes_R=_whole(np.array([state_K[kind] for kind in kinds])),
        fixed_bytes_S=_whole(_resident(search, units, pipeline, stages)),
        saved_bytes_RO=_whole(
            np.stack([np.broadcast_to(units.saved_KC[k] * pools_O, len(options)) for k in kinds])
        ),
        fixed_saved_bytes_S=_whole(np.zeros(stages)),
        transient_bytes_RO=_whole(
            np.stack([np.broadcast_to(moments_O[kind], len(options)) for kind in kinds])
        ),
        in_flight_S=_in_flight(search, options, pipeline, stages // pipeline),
        memory_limit_bytes_D=np.full(pipeline, int(question.memory_limit_bytes), dtype=np.int64),
        num_microbatches=int(np.asarray(piece.strategies.num_microbatches).ravel()[0]),
        uniform_option=True,
        fixed_layout=None if is_free else layers_S,
        min_layers_per_stage=0 if target.empty_stages or not is_free else 1,
    )


def played_s(detail: Detail) -> float:
    """Play the schedule of a priced decision, if it can be; what is paid once comes on top."""
    pipeline = _pipeline(detail)
    if pipeline is None:
        return _step_s(detail)
    return play(pipeline).step_s + float(np.max(detail.step.once_s))


def unsettled_notes(detail: Detail) -> tuple[str, ...]:
    """Say by how much at most the played step is off, where that is more than is negligible.

    A schedule too long to be played whole is extrapolated from its first cycles, which it may not
    yet repeat exactly.
    """
    pipeline = _pipeline(detail)
    if pipeline is None:
        return ()
    played = play(pipeline)
    if played.most_off_s <= NEGLIGIBLE_RATIO * played.step_s:
        return ()
    return (
        f"the schedule is extrapolated from its first micro-batches: the step may be off by "
        f"{format_s(played.most_off_s)} ({format_ratio(played.most_off_s / played.step_s)})",
    )


def _pipeline(detail: Detail) -> Pipeline | None:
    """What is played of a priced decision; None where it cannot be."""
    step, s = detail.step, detail.strategies
    if np.any(np.asarray(s.zero_bubble) > 0.0):
        # Which weight gradients fill which bubble is the closed form's to say.
        return None
    devices = int(np.max(s.pipeline))
    pipeline = Pipeline(
        forward_s_S=tuple(float(t) for t in step.forward_s_SC[:, 0]),
        backward_s_S=tuple(float(t) for t in step.backward_s_SC[:, 0]),
        num_devices=devices,
        num_microbatches=int(np.max(s.num_microbatches)),
        send_s=float(np.max(step.boundary_s)) if devices > 1 else 0.0,
    )
    return pipeline if can_be_played(pipeline) else None


def _units(search: Search, options: Candidates) -> MemoryUnits:
    strategies = strategies_of(search.question, search.ways, options)
    units, unit_of = unit_memory(search.question, strategies, options)
    return taken_bytes(units, unit_of)


def _end_times(times: PassTimes, stages: int) -> Floats:
    fixed_s = np.zeros(stages)
    fixed_s[0] += times.embedding_s[0]
    fixed_s[-1] += times.end_s[0]
    return fixed_s


def _resident(search: Search, units: MemoryUnits, pipeline: int, stages: int) -> Floats:
    """Bytes of every stage beside its layers; what a device has once lies on its first stage."""
    mtp = search.question.shape.mtp_layers
    state_K = units.state_BKC[:3, :, 0].sum(axis=0)
    unused = 1.0 + units.unused_ratio_C[0]
    always = units.always_layer_C + np.maximum(units.always_dense_C, units.always_moe_C)
    once = always[0] + units.live_C[0] + units.dispatch_C.max() + units.boundary_C[0]
    found = np.zeros(stages)
    found[:pipeline] += unused * once + units.context_C[0]
    found[0] += state_K[2]
    found[-1] += state_K[2] * (2.0 if mtp else 1.0) + mtp * state_K[3]
    found[-1] += unused * (1.0 + mtp) * units.head_saved_C[0]
    found[-1] += mtp * unused * units.saved_KC[3].max()
    return found


def _in_flight(search: Search, options: Candidates, pipeline: int, virtual: int) -> tuple[int, ...]:
    """Micro-batches that every stage keeps before its device's first backward pass."""
    strategies = strategies_of(search.question, search.ways, options)
    one = np.atleast_1d(strategies.num_microbatches)[:1]
    zero_bubble = np.atleast_1d(strategies.zero_bubble)[:1]
    kept = held(pipeline, virtual, microbatches=one, zero_bubble=zero_bubble)
    return tuple(int(n) for n in kept.reshape(-1))


def _whole(values: Floats) -> npt.NDArray[np.int64]:
    whole: npt.NDArray[np.int64] = np.ceil(values).astype(np.int64)
    return whole


def _step_s(detail: Detail) -> float:
    return float(np.asarray(detail.step.step_s).ravel()[0])
