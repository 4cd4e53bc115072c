"""Throughput after one of four emulated nodes is lost and the others go on without it.

    python tests/benchmarks/fewer_nodes.py

The reference step of tests/benchmarks/checkpoint_faults.py with 32 micro-batches trains on four
nodes of one rank, then from its shared checkpoint on three, 11 + 11 + 10 micro-batches and experts
in three parts instead of four. The bound of the three is three quarters of what the four reached.
Needs root (control groups) and two idle cores for three minutes. Exit code 1: less than `LEAST` of
it, or another step than the next one.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.steps.config import StepConfig
from tests.benchmarks.checkpoint_faults import CONFIG, NODES, SCENARIO, node_groups
from tuner.verify.faults.measured import Step, steps_of
from tuner.verify.faults.nodes import emulated_nodes
from tuner.verify.faults.scenario import StatedPolicy
from tuner.verify.faults.supervisor import checkpointed, run_through_faults

STEPS: Final = 16
"""On four nodes, and again on three."""
WARM_UP: Final = 2
MICROBATCHES: Final = {4: (8, 8, 8, 8), 3: (11, 11, 10)}
LEAST: Final = 0.95
DEADLINE_S: Final = 900.0


def main() -> int:
    """Run both layouts and compare them."""
    with (
        tempfile.TemporaryDirectory(prefix="moetune-nodes-") as scratch,
        node_groups(cores=0.45) as groups,
    ):
        whole = _steps(NODES, STEPS, scratch=Path(scratch), groups=groups)
        rest = _steps(NODES - 1, 2 * STEPS, scratch=Path(scratch), groups=groups)
    before_s, after_s = map(_median_s, (whole, rest))
    bound_s = before_s * NODES / (NODES - 1)
    reached = bound_s / after_s
    first = rest[0]
    sys.stdout.write(
        f"{NODES} nodes {before_s:.3f} s a step, {NODES - 1} nodes {after_s:.3f} s, bound"
        f" {bound_s:.3f} s: {reached:.1%} of it (at least {LEAST:.0%})\n"
        f"loss of step {whole[-1].number}: {whole[-1].loss:.6f}, of step {first.number} on"
        f" {NODES - 1} nodes: {first.loss:.6f}\n"
    )
    return int(reached < LEAST or first.number != STEPS + 1)


def _steps(nodes: int, steps: int, *, scratch: Path, groups: Sequence[Path]) -> list[Step]:
    degrees = CONFIG.parallelism.model_copy(update={"data": nodes, "expert": nodes})
    counts = MICROBATCHES[nodes]
    layout = CONFIG.model_copy(
        update={
            "parallelism": degrees,
            "global_batch_size": sum(counts),
            "microbatches": counts,
        }
    )
    config = StepConfig.model_validate(layout.model_dump())
    with emulated_nodes(nodes, ranks=nodes, groups=groups) as emulated:
        (launch,) = run_through_faults(
            checkpointed(
                config, StatedPolicy(shared=STEPS), steps=steps, nodes=emulated, folder=scratch
            ),
            (),
            folder=scratch / f"{nodes}-nodes",
            nodes=emulated,
            scenario=SCENARIO.model_copy(update={"hang": 60.0}),
            deadline_s=DEADLINE_S,
        )
    return list(steps_of(launch))


def _median_s(steps: Sequence[Step]) -> float:
    return statistics.median(step.seconds for step in steps[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
