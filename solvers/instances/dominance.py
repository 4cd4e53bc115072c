"""Remove dominated columns of each group; no optimum is lost.

Column a beats b when some number k of instances of a, in place of one of b, takes no more devices
of any pool, costs no more, and serves no less: in every plan each b can be replaced by k of a
without breaking a row, raising a weight, or using more kinds of instances (all of b at once).
Latency does not matter here: every column meets its SLO targets.

Between columns that beat each other the first in order stays. Dominance is transitive, so every
removed column is dominated by one that stays. O(J^2) over the columns of a group.
"""

import math
from collections import defaultdict

from solvers.instances.problem import Column, InstancesProblem


def undominated(problem: InstancesProblem) -> tuple[int, ...]:
    """The columns that an optimum may need, in order; those that no pool can hold are not."""
    of_group: defaultdict[int, list[int]] = defaultdict(list)
    for number, column in enumerate(problem.columns):
        if problem.most_instances(number):
            of_group[column.group].append(number)
    return tuple(
        sorted(
            number
            for members in of_group.values()
            for number in members
            if not any(_is_preferred(problem, rival, number) for rival in members)
        )
    )


def _is_preferred(problem: InstancesProblem, rival: int, number: int) -> bool:
    if rival == number or not _beats(problem.columns[rival], problem.columns[number]):
        return False
    return rival < number or not _beats(problem.columns[number], problem.columns[rival])


def _beats(better: Column, worse: Column) -> bool:
    times = max(1, math.ceil(worse.rate_per_s / better.rate_per_s))
    if times * better.rate_per_s < worse.rate_per_s:
        times += 1  # the quotient was rounded down
    takes_no_more = all(
        times * devices <= limit
        for devices, limit in zip(better.devices_P, worse.devices_P, strict=True)
    )
    return takes_no_more and times * better.price_per_hour <= worse.price_per_hour
