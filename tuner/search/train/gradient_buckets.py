"""The gradient bucket size of a planned decision, where another size than the engine's pays off.

Every size of a short menu is priced at once (tuner/costs/train/gradient_buckets.py). The fastest
is taken if it saves more of a step than two runs of one launch differ by. The search and its
certificate price the engine's own size. Only the plan's decision and its runners-up are predicted
with their own buckets, which does not change their order.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.config.columns import Numbers
from tuner.config.shapes import number
from tuner.search.train.candidate_prices import TimePiece, assemble_step
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import Detail
from tuner.units import format_count, format_ratio, format_s

LEAST_GAIN_RATIO: Final = 0.01
"""Smallest gain that counts, as a share of a step: smaller gains are below what two runs of one
launch differ by."""

MENU: Final = tuple(
    1_000_000 * size for size in (10, 20, 40, 80, 120, 160, 240, 320, 480, 640, 960)
)
"""Parameters of one bucket."""


def with_best_bucket(problem: TrainProblem, detail: Detail) -> tuple[int | None, Detail]:
    """Return the size to state, None for the engine's own, and the decision priced with it."""
    piece = detail.piece
    if piece is None or not problem.capabilities.ddp_bucket_size:
        return None, detail
    s = piece.strategies
    if not np.any(s.overlap_gradients):
        return None, detail
    if np.all(s.data * s.context <= 1.0) or np.any(s.zero_stage > 1.0):
        return None, detail
    sizes = np.array((0, *MENU), dtype=np.float64)
    steps = assemble_step(problem, _with_bucket(piece, sizes), detail.stages)
    step_s = np.ravel(steps.step_s)
    index = int(step_s.argmin())
    if step_s[index] > step_s[0] * (1.0 - LEAST_GAIN_RATIO):
        return None, detail
    size = float(sizes[index])
    sized = _with_bucket(piece, size)
    return int(size), replace(
        detail,
        piece=sized,
        step=assemble_step(problem, sized, detail.stages),
        strategies=replace(detail.strategies, bucket_parameters=size),
    )


def saved_s(before: Detail, after: Detail) -> float:
    """Seconds of a step that a size saves."""
    return number(before.step.step_s) - number(after.step.step_s)


def bucket_note(bucket: int, *, objective_s: float, saved: float) -> str:
    """Say what a stated size is predicted to gain."""
    return (
        f"gradient buckets of {format_count(bucket)} parameters instead of the engine's own are "
        f"predicted to save {format_s(saved)} ({format_ratio(saved / objective_s)}) of a step; "
        "the search and its certificate price the engine's own"
    )


def _with_bucket(piece: TimePiece, sizes: Numbers) -> TimePiece:
    return replace(piece, strategies=replace(piece.strategies, bucket_parameters=sizes))
