"""What three ways to exchange tokens would gain that no target launches, on the best rows found.

    pipelined      dispatch, experts and combine of r pieces side by side (FSMoE,
                   tuner/costs/pipelined_a2a.py), r of its own in forward and backward passes; the
                   experts' products are priced at the size of a piece
    hierarchical   one copy of a token per domain, then per rank (HierMoE,
                   tuner/costs/hierarchical_a2a.py), in the depth that is fastest
    fp8 dispatch   what goes to the experts, activations forward and gradients backward, in fp8 with
                   a scale per block, what comes back in bf16 (DeepSeek-V3, arXiv:2412.19437,
                   section 3.3.3), where the experts compute in fp8 anyway. DeepEP takes such a pair
                   of values and scales; Megatron-LM hands it one bf16 tensor (its issue 3578)

Each row keeps its degrees, way and layout; only the exposed exchange and, of pipelined pieces, the
routed experts change. Rows that neither would have put first are not looked at, so a gain is a
lower bound of what a search with the feature would find.

Letters: C rows. Not covered: what pieces cost in memory; work done again; that rows in fp8 are
permuted faster and quantised before they are copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.experts import moe_blocks
from tuner.costs.analytic.kernels import DatasheetKernels
from tuner.costs.analytic.limited_routing import reached_places
from tuner.costs.analytic.links import all_gather_s, groups, latency_s
from tuner.costs.analytic.parts import Block, Setting
from tuner.costs.analytic.shapes import Numbers, Strategies
from tuner.costs.analytic.units import LayerCost
from tuner.costs.hierarchical_a2a import best_depth, dispatch_s, two_levels
from tuner.costs.pipelined_a2a import Part, PipelinedLayer, best_degree, overlapped_moe_s
from tuner.planner.analytic.candidate_prices import assembled, batch_of, time_pieces
from tuner.planner.analytic.candidates import strategies_of
from tuner.planner.analytic.incumbents import Search
from tuner.planner.analytic.layouts import stages_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.search_result import stage_layers

Floats = npt.NDArray[np.float64]

FP8_BYTES: Final = 1.0 + 4.0 / 128.0
"""Of one value and its part of a scale: fp32 per 128 values; MXFP8's byte per 32 is as much."""

MOST_ROWS: Final = 16
"""Best rows that are priced again."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Saved:
    """Seconds that a MoE layer saves per micro-batch, and in which words."""

    forward_C: Floats
    backward_C: Floats
    words_C: tuple[str, ...]


def exchange_gains(found: Search) -> Iterator[tuple[str, float]]:
    """Yield each feature in words with the step of the best row that would have it."""
    if found.found is None or not found.question.model.num_moe_layers:
        return
    rows = found.found.candidates
    rows = rows.taken(np.arange(min(MOST_ROWS, len(rows))))
    strategies = strategies_of(found.question, found.ways, rows)
    ways = [_pipelined(found.question, strategies), _hierarchical(found.question, strategies)]
    if "fp8" in found.question.precision:
        ways.append(_fp8_dispatch(found.question, strategies))
    for saved in ways:
        step_C = [
            _step_s(found, index, forward_s=forward_s, backward_s=backward_s)
            for index, (forward_s, backward_s) in enumerate(
                zip(saved.forward_C, saved.backward_C, strict=True)
            )
        ]
        best = int(np.argmin(step_C))
        yield saved.words_C[best], step_C[best]


def _step_s(found: Search, index: int, *, forward_s: float, backward_s: float) -> float:
    """Seconds of a found row whose MoE layers take so much less."""
    question = found.question
    assert found.found is not None
    one = found.found.candidates.taken(np.array([index]))
    piece = next(time_pieces(found.ways, batch_of(question, found.ways, one)))
    units = piece.units

    def faster(cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_s=cost.forward_s - forward_s,
            backward_s=cost.backward_s - backward_s,
        )

    mtp = faster(units.mtp) if np.any(question.shape.mtp_layers) else units.mtp
    piece = replace(piece, units=replace(units, moe=faster(units.moe), mtp=mtp))
    stages = stages_of(question.model, np.array(stage_layers(found, index))[:, None])
    return float(np.ravel(assembled(question, piece, stages).step_s)[0])


def _setting(question: Question, strategies: Strategies) -> Setting:
    return Setting(
        model=question.shape,
        strategies=strategies,
        hardware=question.hardware,
        constants=question.constants,
        kernels=question.kernels
        or DatasheetKernels(hardware=question.hardware, constants=question.constants),
        groups=groups(strategies, question.hardware),
    )


def _routed(question: Question, strategies: Strategies, **changes: Numbers) -> Block:
    return moe_blocks(_setting(question, replace(strategies, **changes)))[1]


def _gather_s(setting: Setting) -> Numbers:
    """Seconds of one gather between the ranks of one expert."""
    s, m = setting.strategies, setting.model
    row_bytes = s.element_bytes * m.hidden * s.busiest_ratio
    moved = s.tokens / s.tensor * m.top_k * s.expert_tensor * row_bytes
    group = setting.groups.expert_tensor
    once_s = all_gather_s(moved, group, setting.hardware, setting.constants)
    return np.where(s.expert_tensor > 1.0, once_s, 0.0)


def _pipelined(question: Question, strategies: Strategies) -> _Saved:
    setting, own = _setting(question, strategies), question.constants
    now, apart = _routed(question, strategies), _routed(question, strategies, a2a_overlap=0.0)
    gather_s = _gather_s(setting)
    start_s = latency_s(setting.groups.expert, own)
    exchange = _part(apart.expert_s / 2.0 - gather_s, start_s)
    inside = _part(gather_s, latency_s(setting.groups.expert_tensor, own))
    launched_s = own.launch_s * own.expert_launches * question.shape.experts / strategies.expert
    found = []
    for name in ("forward_s", "backward_s"):
        layer = PipelinedLayer(
            exchange=exchange,
            gather=inside,
            scatter=inside,
            experts=Part(start_s=launched_s, work_s=getattr(apart, name)),
        )
        pieces_C, _ = best_degree(layer)
        small = _routed(
            question, strategies, chunks=np.maximum(strategies.chunks, pieces_C.astype(np.float64))
        )
        layer = replace(layer, experts=Part(start_s=launched_s, work_s=getattr(small, name)))
        taken_s = overlapped_moe_s(layer, pieces=pieces_C.astype(np.float64))
        saved_s = np.maximum(getattr(now, name) + now.expert_s - taken_s, 0.0)
        found.append((pieces_C, saved_s * own.straggler_factor))
    (forward_C, saved_C), (backward_C, saved_back_C) = found
    return _Saved(
        forward_C=saved_C,
        backward_C=saved_back_C,
        words_C=tuple(
            f"pipelined experts in {forward} pieces forward and {backward} backward (FSMoE)"
            for forward, backward in zip(forward_C, backward_C, strict=True)
        ),
    )


def _part(whole_s: Numbers, start_s: Numbers) -> Part:
    return Part(start_s=np.minimum(start_s, whole_s), work_s=np.maximum(whole_s - start_s, 0.0))


def _hierarchical(question: Question, strategies: Strategies) -> _Saved:
    setting, s, m = _setting(question, strategies), strategies, question.shape
    now, apart = _routed(question, s), _routed(question, s, a2a_overlap=0.0)
    levels = two_levels(
        setting.groups.expert, hardware=question.hardware, constants=question.constants
    )
    depth_C, once_s = best_depth(
        dispatch_s(
            levels,
            reached=[reached_places(m, places) for places in levels.places],
            tokens=s.tokens / s.tensor,
            row_bytes=s.element_bytes * m.hidden * s.busiest_ratio,
        )
    )
    visible = now.expert_s / np.maximum(apart.expert_s, 1e-30)
    saved_s = np.maximum(now.expert_s - visible * 2.0 * (once_s + _gather_s(setting)), 0.0)
    saved_C = np.broadcast_to(saved_s, np.shape(depth_C)) * question.constants.straggler_factor
    return _Saved(
        forward_C=saved_C,
        backward_C=saved_C,
        words_C=tuple(
            f"de-duplicated all-to-all in {depth} level{'s' * int(depth > 1)} (HierMoE)"
            for depth in depth_C
        ),
    )


def _fp8_dispatch(question: Question, strategies: Strategies) -> _Saved:
    """Half of each pass's exchange, its gather included, at the bytes of fp8."""
    now_s = _routed(question, strategies).expert_s
    fp8_s = _routed(question, strategies, element_bytes=FP8_BYTES).expert_s
    saved_s = np.maximum(np.asarray(now_s) - fp8_s, 0.0) / 2.0 * question.constants.straggler_factor
    rows = len(np.atleast_1d(strategies.expert))
    saved_C = np.broadcast_to(saved_s, rows)
    words = "dispatch in fp8 with block scales, combine in bf16 (DeepSeek-V3)"
    return _Saved(forward_C=saved_C, backward_C=saved_C, words_C=(words,) * rows)
