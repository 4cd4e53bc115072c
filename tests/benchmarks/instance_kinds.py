"""Savings from several kinds of instances per role, before and after simulating queues.

    python tests/benchmarks/instance_kinds.py [--tables FOLDER]

The pool of examples/serving/mixed-pool.yaml (16 H100, 32 L40S, 8 H20, Mixtral under vLLM) is
planned for several rates, one mode at a time: with one kind of instances a role, which routers
balance evenly, and with up to three, which the stack's router balances by load. Printed are the
cost per hour of the integer program, without queueing, and of the instances with which the
simulated traffic meets its SLO; the simulated router; and the processor seconds of each. FOLDER
holds stored profiles or tables of aiconfigurator; without it datasheets are
used. Exit code 1: several kinds cost more than one.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.goals.serve_plan import price_serving_pool
from tuner.search.serve.routed_simulation import policy_of
from tuner.search.serve.routers import router_choices
from tuner.search.serve.solve_mode import (
    ModeSolution,
    ServeProblem,
    build_serve_problem,
    goal_spare,
    solve_instances,
    solve_with_router,
)
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.read import read_serve_spec

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES: tuple[tuple[Mode, int], ...] = (
    *(("aggregated", rate) for rate in (14, 20, 27, 38, 47, 62)),
    *(("disaggregated", rate) for rate in (17, 23, 32, 41, 50, 53)),
)


def arguments(rate: int, profiles: Sequence[Path]) -> ServeProblem:
    """The example's problem at another rate."""
    text = (EXAMPLES / "serving" / "mixed-pool.yaml").read_text(encoding="utf-8")
    text = text.replace("../models", str(EXAMPLES / "models"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(text.replace("rate: 20/s", f"rate: {rate}/s"), encoding="utf-8")
        spec = read_serve_spec(path)
    serving_pools = tuple(price_serving_pool(pool, profiles) for pool in spec.cluster.pools)
    return build_serve_problem(spec, serving_pools, SearchSettings())


def cpu_s() -> float:
    """Seconds of this process and of the solvers that it started."""
    return sum(os.times()[:4])


def instances_text(result: ModeSolution) -> str:
    """Instances as text."""
    return " + ".join(
        f"{group.count} x {group.option.devices} {group.option.serving_pool.pool.name}"
        f"{'' if result.mode == 'aggregated' else f' {group.option.role.value}'}"
        for group in result.groups
    )


def compare_kinds(mode: Mode, rate: int, profiles: Sequence[Path]) -> dict[str, Any]:
    """One kind and several of one mode at one rate."""
    problem = arguments(rate, profiles)
    one_kind, by_load = router_choices(problem.spec.goal, problem.spec.emit, mode)
    comparison: dict[str, Any] = {"mode": mode, "rate_per_s": rate}
    comparison["sources"] = sorted({serving_pool.source for serving_pool in problem.serving_pools})
    result: ModeSolution | None = None
    for name, router in (("one", one_kind), ("several", by_load)):
        started_s = cpu_s()
        solved = solve_instances(problem, mode, goal_spare(problem), router=router)
        result = solve_with_router(problem, mode, router, result)
        if solved is None or result is None:
            raise RuntimeError(f"{mode} at {rate}/s: nothing serves it")
        policy = policy_of(result.router, result.groups)
        decode = result.router.decode_policy
        comparison[name] = {
            "program": solved.outcome.objective,
            "gap_ratio": solved.outcome.gap_ratio,
            "planned": result.objective,
            "missed": result.missed,
            "instances": instances_text(result),
            "router": policy.value if decode is None else f"{policy.value}, {decode.value}",
            "cpu_s": cpu_s() - started_s,
        }
    return comparison


def row(comparison: dict[str, Any]) -> str:
    """One comparison in lines."""
    one, several = comparison["one"], comparison["several"]
    lines = [
        f"{comparison['mode']}, {comparison['rate_per_s']}/s ({', '.join(comparison['sources'])})"
    ]
    for name, said in (("program", "before waiting"), ("planned", "simulated")):
        saved = 1.0 - several[name] / one[name]
        lines.append(f"  {said:<15}{one[name]:6.4g} -> {several[name]:6.4g} an hour, {saved:.0%}")
    for name, entry in (("one kind", one), ("several", several)):
        missed = f", MISSED {', '.join(entry['missed'])}" if entry["missed"] else ""
        lines.append(
            f"  {name:<15}{entry['instances']}; {entry['router']};"
            f" program gap {entry['gap_ratio']:.1e}, {entry['cpu_s']:.2f} CPU-s{missed}"
        )
    return "\n".join(lines)


def main() -> int:
    """Print the figures and return 1 where several kinds cost more than one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = []
    for mode, rate in CASES:
        result.append(compare_kinds(mode, rate, given.tables))
        if not given.json:
            sys.stdout.write(row(result[-1]) + "\n")
            sys.stdout.flush()
    if given.json:
        sys.stdout.write(json.dumps({"kinds": result}, indent=2) + "\n")
    return int(
        any(
            one["several"][key] > one["one"][key]
            for one in result
            for key in ("program", "planned")
        )
    )


if __name__ == "__main__":
    sys.exit(main())
