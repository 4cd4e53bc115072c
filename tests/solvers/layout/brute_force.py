"""Try everything: the oracle that every other method must meet on tiny instances; for tests only.

All C(L + S - 1, S - 1) ways to cut L layers into S intervals times all O^S options, each judged by
the checker. Proves its answer by exhaustion, so the time limit is not looked at.
"""

import itertools
from collections.abc import Iterator

from solvers.layout import check
from solvers.layout.problem import Layout, LayoutProblem
from solvers.result import Claim
from tests.solvers.exhaustion import best_of


def solve(problem: LayoutProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Layout]:
    """Return the best allowed layout, or the proof that there is none."""
    return best_of(
        layouts(problem),
        violations=lambda each: check.violations(problem, each),
        objective=lambda each: check.objective(problem, each),
    )


def layouts(problem: LayoutProblem) -> Iterator[Layout]:
    """Every contiguous layout under every choice of options, allowed or not."""
    stages, runs = problem.num_stages, problem.num_runs
    run_of_layer = [run for run, length in enumerate(problem.run_lengths) for _ in range(length)]
    for inner in itertools.combinations_with_replacement(range(problem.num_layers + 1), stages - 1):
        ends = (0, *inner, problem.num_layers)
        layers_SR = tuple(
            tuple(run_of_layer[start:stop].count(run) for run in range(runs))
            for start, stop in itertools.pairwise(ends)
        )
        for option_S in itertools.product(range(problem.num_options), repeat=stages):
            yield Layout(layers_SR=layers_SR, option_S=option_S)
