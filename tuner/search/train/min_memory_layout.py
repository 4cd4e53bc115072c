"""Candidates whose balanced layout exceeds memory: another layout, and a bound over those that fit.

A device that is too full gives layers to others, which slows down the slowest of them. The bound of
candidate_prices.py, over every layout, does not cover that. `candidate_bound_in_memory_s` looks for
the fastest slowest device (layouts.py) under the most layers that each device can hold
(memory_feasibility.py).

Letters: P devices of a pipeline.
"""

import numpy as np
import numpy.typing as npt

from tuner.search.train.candidate_prices import (
    Prices,
    candidate_bound_s,
    price,
    price_batch,
    time_pieces,
    times_of_kinds,
)
from tuner.search.train.candidates import Candidates
from tuner.search.train.layouts import min_peak_s, peak_under
from tuner.search.train.memory_feasibility import layer_capacity
from tuner.search.train.options import OptionSpace
from tuner.search.train.problem import TrainProblem
from tuner.search.train.rules import Ints

Floats = npt.NDArray[np.float64]


def price_to_fit(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> tuple[Prices, Ints]:
    """Price candidates in balanced layouts; where those exceed memory, in one that fits."""
    prices = price(problem, options, candidates)
    full = np.flatnonzero(prices.peak_bytes > problem.memory_limit_bytes)
    if len(full):
        moved = price(problem, options, candidates.taken(full), is_moved_to_fit=True)
        prices.step_s[full], prices.peak_bytes[full] = moved.step_s, moved.peak_bytes
        prices.layers_PC[: len(moved.layers_PC), full] = moved.layers_PC
    return prices, full


def candidate_bound_in_memory_s(
    problem: TrainProblem, options: OptionSpace, candidates: Candidates
) -> Floats:
    """Lower bound on the step time over layouts that fit; infinite where none does.

    For candidates whose balanced layout does not fit.
    """
    batch = price_batch(problem, options, candidates)
    model = problem.model
    most_PC = layer_capacity(problem, options, candidates)
    bound_s = candidate_bound_s(problem, options, candidates)
    for piece in time_pieces(options, batch):
        s, p = piece.strategies, piece.pipeline
        times = times_of_kinds(problem, piece)
        count = model.num_moe_layers or model.num_layers
        virtual = candidates.rows["virtual_pipeline"][piece.at]
        capped_s = peak_under(model, times, most_PC=most_PC[:p, piece.at], count=count)
        beyond_s = np.maximum(capped_s - min_peak_s(model, times, pipeline=p), 0.0)
        most_s = np.where(np.isinf(beyond_s), np.inf, 0.0)
        beyond_s = np.where(np.isinf(beyond_s), 0.0, beyond_s)
        more_s = (s.num_microbatches - 1.0 / s.virtual_pipeline) * beyond_s
        plain = np.asarray(s.zero_bubble) == 0.0
        more_s = np.where(plain, more_s, 0.0) + most_s
        # Interleaved stages have one layout, and it is known not to fit.
        bound_s[piece.at] += np.where(virtual > 1, np.inf, more_s)
    return bound_s
