"""Cost of the search for a deployment, each in its own process, as users start it.

    python tests/benchmarks/serving_search.py [--tables FOLDER]

DeepSeek-V3 on 32 H200, Mixtral on 16 H100, Qwen3-235B on 32 H100 and a pool of three kinds of
devices are planned by `moetune plan`, from datasheets and, where FOLDER (stored profiles or tables
of aiconfigurator) has kernels, from those. Printed are
processor seconds including imports, files and solvers, peak memory, the certificate and the plan.
Exit code 1: an aim is missed: a plan with a bound whose program is solved to optimality, one
engine's in 5 CPU-seconds and 400 MB, the mixed pool's in 10 CPU-seconds, all parts of the search
included.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
PACKAGE = "aiconfigurator_core"
MOST_CPU_S = 5.0
MOST_BYTES = 400e6
MOST_PROGRAM_S = 10.0
SOLVED_RATIO = 1e-6
"""Gap at which a program is solved."""

POOL = """
schema_version: 1
model: {model}
cluster: {{pools: [{{name: pool, device: {device}, nodes: {nodes}, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: {engine}}}
  traffic: {{rate: {rate}/s, input_tokens: 4000, output_tokens: 1000}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  quantization: {quantization}
  objective: goodput
emit: [{engine}]
"""
"""One kind of device, the traffic of examples/serving/deepseek-v3-32-h200.yaml."""

RUN = "import sys; {before}; from tuner.__main__ import main; sys.exit(main())"
HIDDEN = f"sys.modules[{PACKAGE!r}] = None"
"""Hides the package, so that datasheets are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A deployment to plan."""

    name: str
    spec: str
    is_one_engine: bool = True
    """Held to the aims of seconds and memory; else to that of the program."""


def cases() -> tuple[Case, ...]:
    """Those of the examples and two more."""
    models = EXAMPLES / "models"
    mixtral = POOL.format(
        model=models / "mixtral-8x7b",
        device="h100-sxm",
        nodes=2,
        engine="vllm",
        rate=10,
        quantization="bf16",
    )
    qwen = POOL.format(
        model=models / "qwen3-235b-a22b",
        device="h100-sxm",
        nodes=4,
        engine="sglang",
        rate=5,
        quantization="fp8_block",
    )
    own = [
        (EXAMPLES / "serving" / file).read_text(encoding="utf-8").replace("../models", str(models))
        for file in ("deepseek-v3-32-h200.yaml", "mixed-pool.yaml")
    ]
    return (
        Case(name="DeepSeek-V3 on 32 H200, SGLang", spec=own[0]),
        Case(name="Mixtral on 16 H100, vLLM", spec=mixtral),
        Case(name="Qwen3-235B on 32 H100, SGLang", spec=qwen),
        Case(name="Mixtral on 16 H100 + 32 L40S + 8 H20", spec=own[1], is_one_engine=False),
    )


def planned(case: Case, *, folder: Path, options: Sequence[str], is_hidden: bool) -> dict[str, Any]:
    """Plan in a child process; return its output and resource usage.

    Seconds and memory are the kernel's own account of the process and of those it waited for.
    """
    spec, out = folder / "spec.yaml", folder / "plan"
    spec.write_text(case.spec, encoding="utf-8")
    command = [sys.executable, "-c", RUN.format(before=HIDDEN if is_hidden else "pass")]
    command += ["plan", str(spec), "-o", str(out), "--json", *options]
    home = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(part for part in (str(EXAMPLES.parent), home) if part)
    printed = folder / "printed.json"
    with printed.open("wb") as stdout, (folder / "said.txt").open("wb") as stderr:
        child = subprocess.Popen(
            command,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    # An exception ends with 1 too, as a negative result does, but prints nothing.
    if child.returncode not in (0, 1) or not printed.stat().st_size:
        raise RuntimeError(f"{case.name}: {(folder / 'said.txt').read_text(encoding='utf-8')}")
    plan = json.loads(printed.read_text(encoding="utf-8"))
    instances = [] if plan["decision"] is None else plan["decision"]["instances"]
    modes = sorted({entry["decision"]["mode"] for entry in plan["alternatives"]})
    return {
        "name": case.name,
        "is_one_engine": case.is_one_engine,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "certificate": plan["certificate"],
        "mode": None if plan["decision"] is None else plan["decision"]["mode"],
        "devices": sum(one["count"] * one["devices"] for one in instances),
        "other_modes": modes,
        "sources": plan["provenance"]["profile_source"],
    }


def misses(result: dict[str, Any]) -> list[str]:
    """The aims that a search misses."""
    certificate, missed = result["certificate"], []
    if certificate["status"] not in ("optimal", "feasible"):
        missed.append(certificate["status"])
    elif certificate["program_gap_ratio"] > SOLVED_RATIO:
        missed.append(f"a gap of {certificate['program_gap_ratio']:.1e} in its program")
    if not result["is_one_engine"]:
        if result["cpu_s"] > MOST_PROGRAM_S:
            missed.append(f"over {MOST_PROGRAM_S:.0f} CPU-s")
        return missed
    if result["cpu_s"] > MOST_CPU_S:
        missed.append(f"over {MOST_CPU_S:.0f} CPU-s")
    if result["peak_bytes"] > MOST_BYTES:
        missed.append(f"over {MOST_BYTES / 1e6:.0f} MB")
    return missed


def lines(result: dict[str, Any]) -> str:
    """One search as a line."""
    certificate, missed = result["certificate"], misses(result)
    sources = ", ".join(sorted(set(result["sources"].values())))
    return (
        f"{result['name']}, {sources}: {result['cpu_s']:.2f} CPU-s, "
        f"{result['peak_bytes'] / 1e6:.0f} MB, {result['mode']} on {result['devices']} devices, "
        f"{certificate['status']}, gap {certificate['gap_ratio']:.0%} to what needs no waiting, "
        f"{certificate['program_gap_ratio']:.1e} in its program, "
        f"{certificate['space']['priced']} ways priced, {certificate['solve_s']:.1f} s of search: "
        + (f"MISSED: {', '.join(missed)}" if missed else "reached")
    )


def main() -> int:
    """Print the figures and return 1 if any misses its aim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    options = [word for path in given.tables for word in ("--profile", str(path.resolve()))]
    has_tables = bool(options) or importlib.util.find_spec(PACKAGE) is not None
    result = []
    for case in cases():
        for is_hidden in (True, False) if has_tables else (True,):
            with tempfile.TemporaryDirectory() as folder:
                result.append(
                    planned(
                        case,
                        folder=Path(folder),
                        options=() if is_hidden else options,
                        is_hidden=is_hidden,
                    )
                )
            if not given.json:
                sys.stdout.write(lines(result[-1]) + "\n")
                sys.stdout.flush()
    if given.json:
        sys.stdout.write(json.dumps({"searches": result}, indent=2) + "\n")
    return int(any(misses(one) for one in result))


if __name__ == "__main__":
    sys.exit(main())
