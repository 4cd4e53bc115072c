"""Seconds of whole commands; run as `python tests/benchmarks/whole_commands.py`.

Each command is its own process, as a user starts it, repeated; printed are medians:

    wall     wall time, start to end
    cpu      processor time of this process and its children
    start    processor time until all modules are imported
    search   processor time without start: the same plan without unlaunchable features
    lacking  processor time of the rest: searches for unlaunchable features, launch files, text

Commands plan DeepSeek-V3 on 2,048 H800 and Qwen3-235B on 512 H100 with nothing left out, and with
`--all` also the other specs of the examples that need no measured profile. With other load on the
machine only processor seconds are comparable.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"

QWEN = f"""
schema_version: 1
model: {EXAMPLES}/models/qwen3-235b-a22b/config.json
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 64, devices_per_node: 8, nic: 400Gbit/s}}]
goal: {{kind: train, sequence_length: 4096, global_batch_size: 2048, precision: bf16}}
emit: [megatron-lm, slurm]
"""

LARGE = "worked/deepseek-v3-2048-h800"

OTHERS = (
    "worked/mixtral-8x7b-64-a100",
    "worked/qwen3-30b-a3b-16-h100",
    "worked/two-pools",
    "slow-link",
    "checks/train-infeasible",
    "checks/train-llama-dense",
    "checks/serve-disaggregated",
    "checks/serve-mixed-pool",
    "checks/place-balance",
)

MODULES = ", ".join(
    (
        *("tuner.cli.plan", "tuner.cli.train", "tuner.cli.plan_text", "tuner.cli.progress"),
        *("tuner.goals.train_plan", "tuner.goals.train_folder", "tuner.search.train.plan_train"),
    )
)


def specs(folder: Path, *, every: bool) -> dict[str, Path]:
    """The specs to plan by name; what is no example is written to a folder."""
    qwen = folder / "qwen3-235b-512-h100.yaml"
    qwen.write_text(QWEN, encoding="utf-8")
    result = {LARGE: EXAMPLES / LARGE / "spec.yaml", qwen.stem: qwen}
    if every:
        result |= {name: EXAMPLES / name / "spec.yaml" for name in OTHERS}
    return result


ALONE = """
import sys
from tuner.goals.train_plan import plan_training
plan_training(sys.argv[1], with_unlaunchable=False)
"""


def run_timed(
    command: list[str], *, folder: Path, codes: tuple[int, ...] = (0, 1)
) -> dict[str, float]:
    """Run a command; return wall and processor seconds.

    Raises:
        RuntimeError: it ended with none of the codes: 0, and 1 where nothing fits.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = [
        (os.POSIX_SPAWN_OPEN, number, str(folder / name), os.O_WRONLY | os.O_CREAT, 0o600)
        for number, name in ((1, "stdout"), (2, "stderr"))
    ]
    started_s = time.perf_counter()
    child = os.posix_spawn(command[0], command, environment, file_actions=streams)
    _, status, usage = os.wait4(child, 0)
    wall_s = time.perf_counter() - started_s
    if os.waitstatus_to_exitcode(status) not in codes:
        raise RuntimeError(f"{' '.join(command)}: {(folder / 'stderr').read_text()[-2000:]}")
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def planned(spec: Path) -> dict[str, float]:
    """Plan a spec in a child process, and again without unlaunchable features."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = folder / "plan"
        command = [sys.executable, "-m", "tuner", "plan", str(spec), "-o", str(plan)]
        seconds = run_timed(command, folder=folder)
        launchable_only = run_timed([sys.executable, "-c", ALONE, str(spec)], folder=folder)
    return seconds | {"without_lacking_cpu_s": launchable_only["cpu_s"]}


def started() -> float:
    """Processor seconds until everything that planning a run needs has been imported."""
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-c", f"import {MODULES}"]
        return run_timed(command, folder=Path(name), codes=(0,))["cpu_s"]


def median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def report(*, repeats: int, every: bool) -> dict[str, Any]:
    """Time all commands."""
    start_s = statistics.median(started() for _ in range(repeats))
    with tempfile.TemporaryDirectory() as name:
        result = specs(Path(name), every=every)
        commands = {
            spec: median([planned(path) for _ in range(repeats)]) for spec, path in result.items()
        }
    return {"start_s": start_s, "commands": commands}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--all", action="store_true", help="the other examples, too")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    result = report(repeats=given.repeats, every=given.all)
    if given.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    start_s = result["start_s"]
    for name, one in result["commands"].items():
        search_s = one["without_lacking_cpu_s"] - start_s
        sys.stdout.write(
            f"{name}: wall {one['wall_s']:.1f} s, cpu {one['cpu_s']:.1f} s;"
            f" start {start_s:.1f} s, search {search_s:.1f} s,"
            f" lacking {one['cpu_s'] - start_s - search_s:.1f} s\n"
        )


if __name__ == "__main__":
    main()
