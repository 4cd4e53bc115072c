"""A run that loses nodes of which each takes a while to repair: waiting against fewer nodes.

    python tests/benchmarks/lost_nodes.py [FILE]
    python tests/benchmarks/lost_nodes.py FILE --measure [--seed N]

A FILE, by default `FILE`, is what `--measure` writes: the reference step of
tests/benchmarks/checkpoint_faults.py, with two layers and in fp64, on four nodes loses some, once
waiting for each repair and once going on with three nodes, 4 + 3 + 3 instead of 3 + 3 + 2 + 2
micro-batches. Needs root (control groups): 15 minutes on an idle machine of two cores. Exit code 1:
a bound of `BOUNDS` is missed, or a loss is not on the curve.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.steps.config import StepConfig
from tests.benchmarks.checkpoint_faults import CONFIG, NODES, node_groups
from tuner.cli.faults_text import faults_text
from tuner.verify.faults.comparison import FaultReport
from tuner.verify.faults.runs import run_scenario
from tuner.verify.faults.scenario import Scenario

FILE: Final = Path(__file__).parents[2] / "examples/profiles/epyc-faults/lost-nodes.json"
BOUNDS: Final = {"replay": 0.10, "deviations": 2.0}
STEP: Final = StepConfig.model_validate(
    CONFIG.model_dump()
    | {
        "model": CONFIG.model.model_dump() | {"layers": ["moe"] * 2},
        "stages": [{"num_layers": 2}],
        "precision": "fp64",
        "sequence_length": 32,
        "global_batch_size": 10,
        "microbatches": (3, 3, 2, 2),
    }
)
SCENARIO: Final = Scenario.model_validate(
    {
        "steps": 300,
        "nodes": NODES,
        "seed": 20261128,
        "mean_interval": "35s",
        "most": 9,
        "faults": {"lose_node": 6, "kill": 1},
        "repair": "40s",
        "without_spare": "both",
        "hang": "30s",
        "policies": [{"shared": 10}],
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stored runs and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--measure", action="store_true", help="run everything again, into FILE")
    parser.add_argument("--seed", type=int, default=SCENARIO.seed, help="of the faults")
    options = parser.parse_args(arguments)
    if options.measure:
        report = measured(options.seed)
        options.file.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    report = FaultReport.model_validate_json(options.file.read_text(encoding="utf-8"))
    sys.stdout.write(f"{faults_text(report)}\n")
    misses = list(missed(report))
    sys.stdout.write("".join(f"missed: {line}\n" for line in misses))
    return int(bool(misses))


def measured(seed: int) -> FaultReport:
    """Run the scenario with the faults of a seed."""
    begin_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begin_s:6.0f} s  {line}\n")

    with node_groups() as groups:
        scenario = SCENARIO.model_copy(update={"seed": seed})
        return run_scenario(STEP, scenario, groups=groups, on_message=say)


def missed(report: FaultReport) -> Iterator[str]:
    """Name what is beyond its bound."""
    for result in report.results:
        words = result.policy.words
        if abs(result.replay_error) > BOUNDS["replay"]:
            yield f"{words}: replayed {result.replay_error:+.1%}"
        if abs(result.deviations) > BOUNDS["deviations"]:
            yield f"{words}: {result.deviations:+.1f} deviations from what is expected"
        if not result.is_on_curve:
            yield f"{words}: losses differ"


if __name__ == "__main__":
    sys.exit(main())
