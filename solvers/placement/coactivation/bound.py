"""What no co-activation placement costs less than, layer by layer.

    L layers   T tokens   K experts of a token   J groups of a level

A token touches at least as many groups of a level as its K experts need slots for, taking the
groups with most slots first: n. The total is then at least T n, and the busiest group gets at least
the mean, T n / J rounded up.
"""

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Floats


def lower_bound_L(problem: CoactivationProblem) -> Floats:
    """Return what each layer costs at least."""
    _, num_tokens, num_chosen = problem.expert_LTK.shape
    least = 0.0
    for level in problem.levels:
        touched = num_tokens * fewest_groups(problem, level, num_chosen)
        busiest = -(-touched // level.num_groups)
        least += level.total_cost * touched
        least += level.busiest_cost * level.num_groups * busiest
    return np.full(problem.num_layers, least)


def fewest_groups(problem: CoactivationProblem, level: Level, num_chosen: int) -> int:
    """Return how many groups of a level hold that many experts at best."""
    slots_J = np.bincount(level.group_G, problem.ranks.slots_G, minlength=level.num_groups)
    held_J = np.cumsum(np.sort(slots_J)[::-1])
    return int(np.searchsorted(held_J, num_chosen)) + 1
