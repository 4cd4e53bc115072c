"""Speed of choosing instances of a mixed pool: `python tests/benchmarks/instances.py`.

16 H100, 32 L40S and 8 H20; 306 columns, of which about a third is undominated; three roles, links
of 100 Gbit/s between every two pools, attention and experts on one pool or two. For every
objective, without and with a limit of one kind of instance a role: the objective, the gap and
the seconds. Columns are plausible numbers drawn by a seed, not measurements (solvers/instances/
testing.py). Both wall and processor seconds are printed, CBC's included; with other load on the
machine only the latter are comparable.
"""

import argparse
import json
import os
import resource
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from solvers.instances.alternatives import alternatives
from solvers.instances.dominance import undominated
from solvers.instances.problem import InstanceObjective
from solvers.registry import INSTANCES
from tests.solvers.instances.testing import mixed_pool

TIME_LIMIT_S = 10.0
BAND_RATIO = 0.02
MOST_ALTERNATIVES = 10


def processor_s() -> float:
    """Processor seconds of this process and its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def solved(
    objective: InstanceObjective,
    *,
    max_kinds: int | None,
    seed: int,
    time_limit_s: float,
) -> dict[str, Any]:
    """Choose instances once."""
    problem = mixed_pool(seed, objective=objective, max_kinds=max_kinds)
    wall_s, used_s = time.perf_counter(), processor_s()
    outcome = INSTANCES.solve(problem, time_limit_s=time_limit_s)
    return {
        "objective": objective.value,
        "max_kinds": max_kinds,
        "seed": seed,
        "columns": len(problem.columns),
        "undominated": len(undominated(problem)),
        "status": outcome.status.value,
        "value": outcome.objective,
        "gap_ratio": outcome.gap_ratio,
        "wall_s": time.perf_counter() - wall_s,
        "cpu_s": processor_s() - used_s,
    }


def ties(objective: InstanceObjective, *, seed: int) -> dict[str, Any]:
    """Count plans within the band of the best."""
    problem = mixed_pool(seed, objective=objective)
    best = INSTANCES.solve(problem, time_limit_s=TIME_LIMIT_S).solution
    if best is None:
        raise ValueError(f"nothing serves seed {seed}")
    wall_s = time.perf_counter()
    result = alternatives(
        problem, best, band_ratio=BAND_RATIO, most=MOST_ALTERNATIVES, time_limit_s=TIME_LIMIT_S
    )
    return {
        "objective": objective.value,
        "plans": len(result.plans),
        "is_complete": result.is_complete,
        "wall_s": time.perf_counter() - wall_s,
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S)
    given = parser.parse_args()
    solves = [
        solved(objective, max_kinds=max_kinds, seed=seed, time_limit_s=given.time_limit)
        for seed in range(given.seeds)
        for objective in InstanceObjective
        for max_kinds in (None, 1)
    ]
    bands = [ties(objective, seed=0) for objective in InstanceObjective]
    if given.json:
        sys.stdout.write(json.dumps({"solves": solves, "ties": bands}, indent=2) + "\n")
        return
    for one in solves:
        kinds = "any kinds" if one["max_kinds"] is None else f"{one['max_kinds']} kind a role"
        sys.stdout.write(
            f"{one['objective']:11} {kinds:13} seed {one['seed']}: "
            f"{one['undominated']} of {one['columns']} columns, {one['status']} "
            f"{one['value']:.6g}, gap {one['gap_ratio']:.1e}, {one['wall_s']:.2f} s, "
            f"{one['cpu_s']:.2f} s of the processor\n"
        )
    for band in bands:
        more = "" if band["is_complete"] else " at least"
        sys.stdout.write(
            f"within {BAND_RATIO:.0%} of the best {band['objective']}:{more} {band['plans']} "
            f"plans, {band['wall_s']:.2f} s\n"
        )


if __name__ == "__main__":
    main()
