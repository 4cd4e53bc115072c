"""Candidates whose balanced layout is too full: priced in a lean one, bounded over those that fit.

A device that is too full gives layers to others, which slows the slowest of them down. The bound of
candidate_prices.py, over every layout, does not know that; `capped_least_s` looks for the fastest
slowest device (layouts.py) under the most layers that each device can hold (memory_feasibility.py).

Letters: P devices of a pipeline.
"""

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.candidate_prices import (
    Prices,
    batch_of,
    least_s,
    price,
    time_pieces,
    times_of_kinds,
)
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.layouts import least_peak_s, peak_under
from tuner.planner.analytic.memory_feasibility import most_layers
from tuner.planner.analytic.options import Ways
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.rules import Ints

Floats = npt.NDArray[np.float64]


def price_to_fit(question: Question, ways: Ways, candidates: Candidates) -> tuple[Prices, Ints]:
    """Price candidates in balanced layouts, and in lean ones those that are too full; say which."""
    found = price(question, ways, candidates)
    full = np.flatnonzero(found.peak_bytes > question.memory_limit_bytes)
    if len(full):
        moved = price(question, ways, candidates.taken(full), is_lean=True)
        found.step_s[full], found.peak_bytes[full] = moved.step_s, moved.peak_bytes
        found.layers_PC[: len(moved.layers_PC), full] = moved.layers_PC
    return found, full


def capped_least_s(question: Question, ways: Ways, candidates: Candidates) -> Floats:
    """Bound the step from below over the layouts that fit; infinite where none does.

    For candidates whose balanced layout does not fit.
    """
    batch = batch_of(question, ways, candidates)
    model = question.model
    most_PC = most_layers(question, ways, candidates)
    found = least_s(question, ways, candidates)
    for piece in time_pieces(ways, batch):
        s, p = piece.strategies, piece.pipeline
        times = times_of_kinds(question, piece)
        count = model.num_moe_layers or model.num_layers
        virtual = candidates.rows["virtual_pipeline"][piece.at]
        capped_s = peak_under(model, times, most_PC=most_PC[:p, piece.at], count=count)
        beyond_s = np.maximum(capped_s - least_peak_s(model, times, pipeline=p), 0.0)
        most_s = np.where(np.isinf(beyond_s), np.inf, 0.0)
        beyond_s = np.where(np.isinf(beyond_s), 0.0, beyond_s)
        more_s = (s.num_microbatches - 1.0 / s.virtual_pipeline) * beyond_s
        plain = np.asarray(s.zero_bubble) == 0.0
        more_s = np.where(plain, more_s, 0.0) + most_s
        # Interleaved stages have one layout, and it is known not to fit.
        found[piece.at] += np.where(virtual > 1, np.inf, more_s)
    return found
