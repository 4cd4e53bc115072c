"""What several kinds of instances save where the router follows load, before and after waiting.

    python tests/benchmarks/instance_kinds.py [--tables FOLDER]

The pool of examples/serving/mixed-pool.yaml (16 H100, 32 L40S, 8 H20, Mixtral under vLLM) is
planned for several rates, one mode at a time: with one kind of instances a role, which routers
spread evenly, and with up to three, which the stack's router spreads by load. Printed are the money
an hour of the integer program, as if no request waited, and that of the instances with which the
simulated traffic keeps its targets; the router that was simulated; and the seconds of the
processor that each took. FOLDER holds stored profiles or tables of aiconfigurator; without it an
installed aiconfigurator-core answers, else datasheets. The end is 1 where several kinds would cost
more than one.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.planner.serve.routed_simulation import policy_of
from tuner.planner.serve.routers import choices_of
from tuner.planner.serve.solve_mode import (
    Found,
    Question,
    Settings,
    answer_with,
    least_spare,
    question_of,
    solved_with,
)
from tuner.serve_api import site_of
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.read import read_serve_spec

EXAMPLES = Path(__file__).parents[2] / "examples"
CASES: tuple[tuple[Mode, int], ...] = (
    *(("aggregated", rate) for rate in (14, 20, 27, 38, 47, 62)),
    *(("disaggregated", rate) for rate in (17, 23, 32, 41, 50, 53)),
)


def asked(rate: int, profiles: Sequence[Path]) -> Question:
    """The example's question at another rate."""
    text = (EXAMPLES / "serving" / "mixed-pool.yaml").read_text(encoding="utf-8")
    text = text.replace("../models", str(EXAMPLES / "models"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.yaml"
        path.write_text(text.replace("rate: 20/s", f"rate: {rate}/s"), encoding="utf-8")
        spec = read_serve_spec(path)
    sites = tuple(site_of(pool, profiles) for pool in spec.cluster.pools)
    return question_of(spec, sites, Settings())


def cpu_s() -> float:
    """Seconds of this process and of the solvers that it started."""
    return sum(os.times()[:4])


def told(found: Found) -> str:
    """Instances in a few words."""
    return " + ".join(
        f"{group.count} x {group.option.devices} {group.option.site.pool.name}"
        f"{'' if found.mode == 'aggregated' else f' {group.option.role.value}'}"
        for group in found.groups
    )


def compared(mode: Mode, rate: int, profiles: Sequence[Path]) -> dict[str, Any]:
    """One kind and several of one mode at one rate."""
    question = asked(rate, profiles)
    one_kind, by_load = choices_of(question.spec.goal, question.spec.emit, mode)
    answers: dict[str, Any] = {"mode": mode, "rate_per_s": rate}
    answers["sources"] = sorted({site.source for site in question.sites})
    found: Found | None = None
    for name, router in (("one", one_kind), ("several", by_load)):
        started_s = cpu_s()
        solved = solved_with(question, mode, least_spare(question), router=router, may_refuse=True)
        found = answer_with(question, mode, router, found)
        if solved is None or found is None:
            raise RuntimeError(f"{mode} at {rate}/s: nothing serves it")
        policy = policy_of(found.router, found.groups)
        decode = found.router.decode_policy
        answers[name] = {
            "program": solved.outcome.objective,
            "gap_ratio": solved.outcome.gap_ratio,
            "planned": found.objective,
            "missed": found.missed,
            "instances": told(found),
            "router": policy.value if decode is None else f"{policy.value}, {decode.value}",
            "cpu_s": cpu_s() - started_s,
        }
    return answers


def row(answers: dict[str, Any]) -> str:
    """One comparison in lines."""
    one, several = answers["one"], answers["several"]
    lines = [f"{answers['mode']}, {answers['rate_per_s']}/s ({', '.join(answers['sources'])})"]
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
    found = []
    for mode, rate in CASES:
        found.append(compared(mode, rate, given.tables))
        if not given.json:
            sys.stdout.write(row(found[-1]) + "\n")
            sys.stdout.flush()
    if given.json:
        sys.stdout.write(json.dumps({"kinds": found}, indent=2) + "\n")
    return int(
        any(
            one["several"][key] > one["one"][key] for one in found for key in ("program", "planned")
        )
    )


if __name__ == "__main__":
    sys.exit(main())
