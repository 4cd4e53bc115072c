"""Runs through faults on emulated nodes of this machine, against their prediction.

    python tests/benchmarks/checkpoint_faults.py [FILE ...]
    python tests/benchmarks/checkpoint_faults.py FILE --measure [--seed N]

A FILE, by default `FILES`, is what `--measure` writes: the reference step on four nodes of one rank
each suffers the same faults under every policy of `SCENARIO`, as `moetune verify --faults` does it.
A node has `CORES` of a core (a control group of the kernel, which needs root), a folder in memory
and a link of its own. The runs go on past most of their faults: 45 minutes on an idle machine of
two cores. With four or five restarts a run, chance decides between policies that are expected to be
equal, so that the overhead and the choice are those of all files together. Exit code 1: a bound of
`BOUNDS` is missed.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.steps.config import StepConfig
from tuner.cli.faults_text import faults_text
from tuner.verify.faults.comparison import Expectation, FaultReport
from tuner.verify.faults.runs import run_scenario
from tuner.verify.faults.scenario import Scenario

_FOLDER: Final = Path(__file__).parents[2] / "examples/profiles/epyc-faults"
FILES: Final = (_FOLDER / "seventh.json", _FOLDER / "eighth.json")
NODES: Final = 4
CORES: Final = 0.4
"""Four take 1.6 of two, so that what else runs, the supervisor first, slows no step."""
PERIOD_US: Final = 20_000
"""Of the kernel's accounting: short beside a step."""
GROUPS: Final = Path("/sys/fs/cgroup")
BOUNDS: Final = {"replay": 0.10, "deviations": 2.0, "choice": 0.02}

CONFIG: Final = StepConfig.model_validate(
    {
        "model": {
            "hidden_size": 192,
            "num_heads": 6,
            "num_kv_heads": 6,
            "head_dim": 32,
            "vocab_size": 2048,
            "layers": ["moe"] * 4,
            "num_experts": 12,
            "top_k": 2,
            "moe_ffn_size": 512,
        },
        "parallelism": {"data": 4, "expert": 4, "zero_stage": 1},
        "stages": [{"num_layers": 4}],
        "sequence_length": 64,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "precision": "fp32",
        "device": "cpu",
    }
)
SCENARIO: Final = Scenario.model_validate(
    {
        "steps": 460,
        "nodes": NODES,
        "seed": 20261204,
        "mean_interval": "25s",
        "most": 9,
        "faults": {"kill": 4, "freeze": 1, "lose_node": 3, "lose_together": 1, "slow_link": 4},
        "link": "500Mbit/s",
        "start_limit": "20s",
        "policies": [
            {"shared": 4},
            {"shared": 16},
            {"shared": 16, "asynchronous": True},
            {"shared": 48, "host": 4, "replicas": 1},
            {"shared": 48, "host": 4, "replicas": 1, "asynchronous": True},
        ],
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the stored runs and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=FILES)
    parser.add_argument("--measure", action="store_true", help="run everything again, into FILE")
    parser.add_argument("--seed", type=int, default=SCENARIO.seed, help="of the faults")
    options = parser.parse_args(arguments)
    if options.measure:
        if options.files is FILES or len(options.files) != 1:
            parser.error("--measure writes one FILE; name it")
        (file,) = options.files
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(measured(options.seed).model_dump_json(indent=1) + "\n", encoding="utf-8")
    reports = [
        FaultReport.model_validate_json(file.read_text(encoding="utf-8")) for file in options.files
    ]
    for file, report in zip(options.files, reports, strict=True):
        sys.stdout.write(f"{file.name}: {faults_text(report)}\n\n")
    together = sum_policies(reports)
    for one in together:
        sys.stdout.write(
            f"{one.words}: {one.effective_ratio:.1%} of {one.wall_s:.0f} s, expected"
            f" {one.expected_ratio:.1%}; overhead {one.deviations:+.1f} deviations\n"
        )
    misses = list(missed(reports, together))
    sys.stdout.write("".join(f"missed: {line}\n" for line in misses))
    return int(bool(misses))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySum:
    """One policy in all files."""

    words: str
    wall_s: float
    effective_ratio: float
    """Measured share of the wall clock that advanced training."""
    expected_ratio: float
    deviations: float
    """Of the measured overhead from the expected one; files are independent."""


def sum_policies(reports: Sequence[FaultReport]) -> list[PolicySum]:
    """Sum each policy's runs.

    Raises:
        ValueError: the files have other policies.
    """
    joined = []
    for results in zip(*(report.results for report in reports), strict=True):
        if len({one.policy.words for one in results}) > 1:
            raise ValueError("the files have other policies")
        wall_s = sum(one.measured.wall_s for one in results)
        expected_s = sum(one.expected_wall_s for one in results)
        # Sets before the sixth hold no expected overhead: all are judged by the wall clock then.
        overheads = [one.expected_overhead for one in results if one.expected_overhead]
        is_overhead = len(overheads) == len(results)
        if not is_overhead:
            overheads = [
                Expectation(mean_s=one.expected_wall_s, deviation_s=one.deviation_s)
                for one in results
            ]
        measured_s = sum(
            one.measured.overhead_s if is_overhead else one.measured.wall_s for one in results
        )
        expected = Expectation(
            mean_s=sum(one.mean_s for one in overheads),
            deviation_s=math.hypot(*(one.deviation_s for one in overheads)),
        )
        joined.append(
            PolicySum(
                words=results[0].policy.words,
                wall_s=wall_s,
                effective_ratio=sum(one.effective_ratio * one.measured.wall_s for one in results)
                / wall_s,
                expected_ratio=sum(one.expected_ratio * one.expected_wall_s for one in results)
                / expected_s,
                deviations=expected.deviations(measured_s),
            )
        )
    return joined


def measured(seed: int) -> FaultReport:
    """Run the scenario with the faults of a seed."""
    begin_s = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begin_s:6.0f} s  {line}\n")

    with node_groups() as groups:
        scenario = SCENARIO.model_copy(update={"seed": seed})
        return run_scenario(CONFIG, scenario, groups=groups, on_message=say)


def missed(reports: Sequence[FaultReport], together: Sequence[PolicySum]) -> Iterator[str]:
    """Name what is beyond its bound."""
    for result in (one for report in reports for one in report.results):
        words = result.policy.words
        if abs(result.replay_error) > BOUNDS["replay"]:
            yield f"{words}: replayed {result.replay_error:+.1%}"
        if not result.is_on_curve:
            yield f"{words}: losses differ"
    for one in together:
        if abs(one.deviations) > BOUNDS["deviations"]:
            yield f"{one.words}: {one.deviations:+.1f} deviations from what is expected"
    chosen = max(together, key=lambda one: one.expected_ratio)
    lost = 1.0 - chosen.effective_ratio / max(one.effective_ratio for one in together)
    if lost > BOUNDS["choice"]:
        yield f"the choice, {chosen.words}, loses {lost:.1%} of goodput"


@contextmanager
def node_groups(cores: float = CORES) -> Iterator[tuple[Path, ...]]:
    """Make a control group for each node, of either version of the kernel's interface."""
    is_first = (GROUPS / "cpu").is_dir()
    root = Path(tempfile.mkdtemp(prefix="moetune-", dir=GROUPS / "cpu" if is_first else GROUPS))
    quota_us = round(cores * PERIOD_US)
    groups = tuple(root / f"node-{node}" for node in range(NODES))
    try:
        if not is_first:
            (root / "cgroup.subtree_control").write_text("+cpu", encoding="ascii")
        for group in groups:
            group.mkdir()
            if is_first:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
            else:
                (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}", encoding="ascii")
        yield groups
    finally:
        for group in (*groups, root):
            if group.is_dir():
                group.rmdir()


if __name__ == "__main__":
    sys.exit(main())
