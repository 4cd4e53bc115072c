"""Gains of three all-to-all schemes that no target launches, on the best rows of a search.

    pipelined      dispatch, experts and combine of r pieces side by side (FSMoE,
                   tuner/costs/prices/pipelined_a2a.py), r of its own in forward and backward
                   passes; the experts' GEMMs are priced at the size of a piece
    hierarchical   one copy of a token per domain, then per rank (HierMoE,
                   tuner/costs/prices/hierarchical_a2a.py), in the depth that is fastest
    fp8 dispatch   dispatch (activations forward, gradients backward) in fp8 with a scale per block,
                   combine in bf16 (DeepSeek-V3, arXiv:2412.19437, section 3.3.3), where the experts
                   compute in fp8 anyway. DeepEP takes such a pair of values and scales; Megatron-LM
                   hands it one bf16 tensor (its issue 3578)

Each row keeps its degrees, option and layout. Only the exposed all-to-all changes and, with
pipelined pieces, the routed experts. Other rows are not checked, so a gain is a lower bound of what
a search with the feature would find.

Letters: C rows. Not covered: memory of the pieces; recomputation; that rows in fp8 are permuted
faster and quantised before they are copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.config.columns import Numbers, Strategies
from tuner.costs.prices.datasheet import DatasheetPrices
from tuner.costs.prices.hierarchical_a2a import best_depth, dispatch_s, two_levels
from tuner.costs.prices.pipelined_a2a import (
    PipelinedLayer,
    PipelinedPart,
    best_degree,
    overlapped_moe_s,
)
from tuner.costs.train.collectives import all_gather_s, all_to_all_latency_s, groups, latency_s
from tuner.costs.train.experts import expert_launches, isolated, moe_blocks
from tuner.costs.train.limited_routing import reached_places
from tuner.costs.train.parts import Block, BlockInputs
from tuner.costs.train.units import LayerCost
from tuner.search.train.candidate_prices import assemble_step, price_batch, time_pieces
from tuner.search.train.candidates import to_strategies
from tuner.search.train.incumbents import SearchOutcome
from tuner.search.train.layouts import to_stages
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import stage_layers

FP8_BYTES: Final = 1.0 + 4.0 / 128.0
"""Of one value and its part of a scale: fp32 per 128 values; MXFP8's byte per 32 is as much."""

MOST_ROWS: Final = 16
"""Best rows that are priced with each feature."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Saved:
    """Seconds that a MoE layer saves per micro-batch, and the name of the feature."""

    forward_C: Floats
    backward_C: Floats
    words_C: tuple[str, ...]


def dispatch_gains(outcome: SearchOutcome) -> Iterator[tuple[str, float]]:
    """Yield each feature in words, with the step of the best row that would have it."""
    if outcome.solutions is None or not outcome.problem.model.num_moe_layers:
        return
    rows = outcome.solutions.candidates
    rows = rows.taken(np.arange(min(MOST_ROWS, len(rows))))
    strategies = to_strategies(outcome.problem, outcome.options, rows)
    features = [_pipelined(outcome.problem, strategies), _hierarchical(outcome.problem, strategies)]
    if "fp8" in outcome.problem.precision:
        features.append(_fp8_dispatch(outcome.problem, strategies))
    for saved in features:
        step_C = [
            _step_s(outcome, index, forward_s=forward_s, backward_s=backward_s)
            for index, (forward_s, backward_s) in enumerate(
                zip(saved.forward_C, saved.backward_C, strict=True)
            )
        ]
        best = int(np.argmin(step_C))
        yield saved.words_C[best], step_C[best]


def _step_s(outcome: SearchOutcome, index: int, *, forward_s: float, backward_s: float) -> float:
    """Seconds of a row whose MoE layers take so much less."""
    problem = outcome.problem
    assert outcome.solutions is not None
    one = outcome.solutions.candidates.taken(np.array([index]))
    piece = next(time_pieces(outcome.options, price_batch(problem, outcome.options, one)))
    units = piece.units

    def faster(cost: LayerCost) -> LayerCost:
        return replace(
            cost,
            forward_s=cost.forward_s - forward_s,
            backward_s=cost.backward_s - backward_s,
        )

    mtp = faster(units.mtp) if np.any(problem.shape.mtp_layers) else units.mtp
    piece = replace(piece, units=replace(units, moe=faster(units.moe), mtp=mtp))
    stages = to_stages(problem.model, np.array(stage_layers(outcome, index))[:, None])
    return float(np.ravel(assemble_step(problem, piece, stages).step_s)[0])


def _setting(problem: TrainProblem, strategies: Strategies) -> BlockInputs:
    return BlockInputs(
        model=problem.shape,
        strategies=strategies,
        hardware=problem.hardware,
        constants=problem.constants,
        prices=problem.prices
        or DatasheetPrices(hardware=problem.hardware, constants=problem.constants),
        groups=groups(strategies, problem.hardware),
    )


def _routed(problem: TrainProblem, strategies: Strategies, **changes: Numbers) -> Block:
    return moe_blocks(_setting(problem, replace(strategies, **changes)))[1]


def _gather_s(setting: BlockInputs) -> Numbers:
    """Seconds of one all-gather between the ranks of one expert."""
    s, m = setting.strategies, setting.model
    row_bytes = s.element_bytes * m.hidden * s.expert_imbalance
    moved = s.tokens / s.tensor * m.top_k * s.expert_tensor * row_bytes
    group = setting.groups.expert_tensor
    once_s = all_gather_s(moved, group, setting.hardware, setting.constants)
    return np.where(s.expert_tensor > 1.0, once_s, 0.0)


def _pipelined(problem: TrainProblem, strategies: Strategies) -> _Saved:
    setting, own = _setting(problem, strategies), problem.constants
    now, exposed = _routed(problem, strategies), _routed(problem, isolated(strategies))
    gather_s = _gather_s(setting)
    start_s = all_to_all_latency_s(setting.groups.expert, own)
    all_to_all = _part(exposed.expert_s / 2.0 - gather_s, start_s)
    inside = _part(gather_s, latency_s(setting.groups.expert_tensor, own))
    launched_s = own.launch_s * expert_launches(setting)
    by_pass = []
    for name in ("forward_s", "backward_s"):
        layer = PipelinedLayer(
            all_to_all=all_to_all,
            gather=inside,
            scatter=inside,
            experts=PipelinedPart(start_s=launched_s, work_s=getattr(exposed, name)),
        )
        pieces_C, _ = best_degree(layer)
        small = _routed(
            problem, strategies, chunks=np.maximum(strategies.chunks, pieces_C.astype(np.float64))
        )
        layer = replace(
            layer, experts=PipelinedPart(start_s=launched_s, work_s=getattr(small, name))
        )
        taken_s = overlapped_moe_s(layer, pieces=pieces_C.astype(np.float64))
        saved_s = np.maximum(getattr(now, name) + now.expert_s - taken_s, 0.0)
        by_pass.append((pieces_C, saved_s * own.straggler_factor))
    (forward_C, saved_C), (backward_C, saved_back_C) = by_pass
    return _Saved(
        forward_C=saved_C,
        backward_C=saved_back_C,
        words_C=tuple(
            f"pipelined experts in {forward} pieces forward and {backward} backward (FSMoE)"
            for forward, backward in zip(forward_C, backward_C, strict=True)
        ),
    )


def _part(whole_s: Numbers, start_s: Numbers) -> PipelinedPart:
    return PipelinedPart(
        start_s=np.minimum(start_s, whole_s), work_s=np.maximum(whole_s - start_s, 0.0)
    )


def _hierarchical(problem: TrainProblem, strategies: Strategies) -> _Saved:
    setting, s, m = _setting(problem, strategies), strategies, problem.shape
    now, exposed = _routed(problem, s), _routed(problem, isolated(s))
    levels = two_levels(
        setting.groups.expert, hardware=problem.hardware, constants=problem.constants
    )
    depth_C, once_s = best_depth(
        dispatch_s(
            levels,
            reached=[reached_places(m, places) for places in levels.places],
            tokens=s.tokens / s.tensor,
            row_bytes=s.element_bytes * m.hidden * s.expert_imbalance,
        )
    )
    visible = now.expert_s / np.maximum(exposed.expert_s, 1e-30)
    saved_s = np.maximum(now.expert_s - visible * 2.0 * (once_s + _gather_s(setting)), 0.0)
    saved_C = np.broadcast_to(saved_s, np.shape(depth_C)) * problem.constants.straggler_factor
    return _Saved(
        forward_C=saved_C,
        backward_C=saved_C,
        words_C=tuple(
            f"de-duplicated all-to-all in {depth} level{'s' * int(depth > 1)} (HierMoE)"
            for depth in depth_C
        ),
    )


def _fp8_dispatch(problem: TrainProblem, strategies: Strategies) -> _Saved:
    """Half of each pass's all-to-all, its all-gather included, at the bytes of fp8."""
    now_s = _routed(problem, strategies).expert_s
    fp8_s = _routed(problem, strategies, element_bytes=FP8_BYTES).expert_s
    saved_s = np.maximum(np.asarray(now_s) - fp8_s, 0.0) / 2.0 * problem.constants.straggler_factor
    rows = len(np.atleast_1d(strategies.expert))
    saved_C = np.broadcast_to(saved_s, rows)
    words = "dispatch in fp8 with block scales, combine in bf16 (DeepSeek-V3)"
    return _Saved(forward_C=saved_C, backward_C=saved_C, words_C=(words,) * rows)
