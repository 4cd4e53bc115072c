"""What layouts of layers are held to, tests/solvers/contract.py."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.layout.problem import Layout, LayoutProblem
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.layout import brute_force
from tests.solvers.layout.testing import interleaved_problem, tiny_problem


def _features(problem: LayoutProblem, best: Outcome[Layout]) -> Iterable[str]:
    yield f"runs {problem.num_runs}"
    yield f"stages {problem.num_stages}"
    yield f"per device {problem.stages_per_device}"
    yield f"uniform {problem.uniform_option}"
    yield f"fixed {problem.fixed_layout is not None}"
    yield f"fewest {problem.min_layers_per_stage}"


def _broken(problem: LayoutProblem, layout: Layout) -> Layout:
    """One more layer of the first run than there is."""
    more, *others = layout.layers_SR
    return dataclasses.replace(layout, layers_SR=((more[0] + 1, *more[1:]), *others))


LAYOUT = Contract(
    family=registry.LAYOUT,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(
        *(3, 5, 6, 11, 16, 20, 22, 26, 27, 35, 38, 40),
        *(43, 44, 47, 49, 58, 65, 72, 77, 89, 91, 92, 95),
    ),
    count=96,
    features=_features,
    expected=frozenset(
        {
            *("runs 1", "runs 2", "stages 1", "stages 2", "stages 3", "stages 4"),
            *("per device 1", "per device 2", "uniform True", "uniform False"),
            *("fixed True", "fixed False", "fewest 0", "fewest 1", "optimal", "infeasible"),
        }
    ),
    often=6,
    exact=frozenset({"exact"}),
    broken=_broken,
    large=interleaved_problem,
    hurried={"exact": (Status.FEASIBLE,)},
)
