"""Gain of choosing both roles together over two vendors.

Run as `python tests/benchmarks/vendor_pairs.py`.

For the examples of two vendors and several rates, cost per hour of the cheapest instances that
serve the traffic (integer program; without queueing, SLO targets hold for an isolated request):

    joint          both roles, strategies and counts at once, under the rules between vendors
    one router     the same without islands: any prefill may be paired with any decode
    prefill first  the cheapest prefill instances, then the cheapest decode on the rest
    decode first   the other way round
    no rules       joint and both heuristics as if every connector worked between vendors: the cost
                   of the rules
    each vendor    only its pool

Both heuristics take one kind a role, as the joint choice does in each island. "-" is a choice that
leaves nothing for the other role.

The idea of the comparison is that of "P-D disaggregated inference on multi-vendor GPUs"
(arXiv:2509.17542), whose own heuristics and figures are not public; both here are ours.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, Final

from tuner.config.serve import Role
from tuner.devices.catalogue import find_device
from tuner.engines.serve_capabilities import releases_by_pool
from tuner.engines.serve_rules.steps import cache_kind
from tuner.engines.serve_rules.vendor_pairs import connector_between, vendor_refusals
from tuner.goals.serve_plan import price_serving_pool
from tuner.search.serve.islands import island_layouts
from tuner.search.serve.options import Option
from tuner.search.serve.program import build_program, solve_program
from tuner.search.serve.solve_mode import (
    ServeProblem,
    at_traffic_share,
    build_serve_problem,
    goal_spare,
)
from tuner.search.settings import SearchSettings
from tuner.spec.serving.read import read_serve_spec

EXAMPLES: Final = Path(__file__).parents[2] / "examples/serving"
SPECS: Final = ("h100-ascend.yaml", "h100-mi300x.yaml")
SHARES: Final = (0.25, 0.5, 0.75, 1.0, 1.2)
TIME_LIMIT_S: Final = 20.0


def joint(
    problem: ServeProblem, *, may_refuse: bool, layouts: tuple[Mapping[str, str], ...]
) -> float:
    """Return the lowest cost per hour; infinite where nothing serves the traffic."""
    result = [math.inf]
    for islands in layouts:
        program = build_program(
            "disaggregated",
            problem.options.options,
            serving_pools=problem.serving_pools,
            kv_transfers=replace(problem.kv_transfers, refuses=may_refuse),
            demand=problem.demand,
            spare=goal_spare(problem),
            most_kinds=1,
            islands=islands,
        )
        if program is not None:
            outcome = solve_program(program, time_limit_s=TIME_LIMIT_S).outcome
            result.append(outcome.objective if outcome.solution is not None else math.inf)
    return min(result)


def heuristic(problem: ServeProblem, *, first: Role, may_refuse: bool = True) -> float:
    """Return the cost per hour of one role's cheapest instances and the other's on the rest."""
    last = Role.DECODE if first is Role.PREFILL else Role.PREFILL
    left = {
        serving_pool.pool.name: serving_pool.pool.num_devices
        for serving_pool in problem.serving_pools
    }
    one = cheapest(problem, first, left, lambda _: True)
    if one is None:
        return math.inf
    left[one[0].serving_pool.pool.name] -= one[1] * one[0].devices

    def meets(other: Option) -> bool:
        pair = (one[0], other) if first is Role.PREFILL else (other, one[0])
        reached = problem.kv_transfers.reach(pair[0].serving_pool, pair[1].serving_pool)
        return reached and not (may_refuse and problem.kv_transfers.refusals(*pair))

    other = cheapest(problem, last, left, meets)
    return math.inf if other is None else one[2] + other[2]


def cheapest(
    problem: ServeProblem, role: Role, left: Mapping[str, int], allowed: Callable[[Option], bool]
) -> tuple[Option, int, float] | None:
    """Return the cheapest instances of one kind that serve the rate, and their cost."""
    priced = [
        (
            count * option.devices * (option.serving_pool.pool.price_per_device_hour or 0.0),
            number,
            count,
        )
        for number, option in enumerate(problem.options.options)
        if option.role is role and allowed(option)
        for count in [math.ceil(problem.demand.rate_per_s / option.rate_per_s - 1e-9)]
        if count * option.devices <= left[option.serving_pool.pool.name]
    ]
    if not priced:
        return None
    cost, number, count = min(priced)
    return problem.options.options[number], count, cost


def single_pool(problem: ServeProblem, pool: str) -> float:
    """Return the lowest cost per hour on one pool."""
    kept = tuple(one for one in problem.options.options if one.serving_pool.pool.name == pool)
    only = replace(problem, options=replace(problem.options, options=kept))
    return joint(only, may_refuse=True, layouts=({},))


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a line for each rate."""
    spec = read_serve_spec(path)
    serving_pools = tuple(price_serving_pool(pool, ()) for pool in spec.cluster.pools)
    whole = build_serve_problem(spec, serving_pools, SearchSettings())
    layouts = island_layouts(spec, "disaggregated")
    for share in SHARES:
        problem = at_traffic_share(whole, share)
        yield {
            "spec": path.name,
            "rate_per_s": problem.demand.rate_per_s,
            "joint": joint(problem, may_refuse=True, layouts=layouts),
            "one_router": joint(problem, may_refuse=True, layouts=({},)),
            "prefill_first": heuristic(problem, first=Role.PREFILL),
            "decode_first": heuristic(problem, first=Role.DECODE),
            "no_rules": joint(problem, may_refuse=False, layouts=layouts),
            "no_rules_prefill_first": heuristic(problem, first=Role.PREFILL, may_refuse=False),
            "no_rules_decode_first": heuristic(problem, first=Role.DECODE, may_refuse=False),
            **{
                f"{serving_pool.pool.name} alone": single_pool(problem, serving_pool.pool.name)
                for serving_pool in problem.serving_pools
            },
        }


def broken_rules(path: Path) -> Iterator[str]:
    """Yield the rules between vendors that each ordered pair of pools breaks."""
    spec = read_serve_spec(path)
    releases = releases_by_pool(spec.goal, spec.cluster.pools)
    generations = {
        pool.name: find_device(pool.device or "").generation for pool in spec.cluster.pools
    }
    for sender, receiver in permutations(releases, 2):
        ends = releases[sender], releases[receiver]
        lines = vendor_refusals(
            *ends,
            connector=connector_between(*ends),
            cache=cache_kind(spec.model),
            kv_cache_dtype=spec.goal.kv_cache_dtype,
            generations=(generations[sender], generations[receiver]),
        )
        names = [line.removeprefix("rule ").partition(":")[0] for line in lines]
        yield f"{sender} to {receiver}: {', '.join(names) or 'no rule is broken'}"


def main() -> int:
    """Print a table for each example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result = [row for name in SPECS for row in rows(EXAMPLES / name)]
    if arguments.json:
        finite = [
            {name: None if value == math.inf else value for name, value in row.items()}
            for row in result
        ]
        sys.stdout.write(json.dumps(finite, indent=1) + "\n")
        return 0
    for name in SPECS:
        own = [row for row in result if row["spec"] == name]
        heads = [head for head in own[0] if head != "spec"]
        sys.stdout.write("\n" + "".join(f"{line}\n" for line in broken_rules(EXAMPLES / name)))
        sys.stdout.write(f"{name}\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}\n")
        for row in own:
            cells = ("-" if row[head] == math.inf else f"{row[head]:.4g}" for head in heads)
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
