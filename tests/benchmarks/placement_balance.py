"""Balance of expert placements; run as `python tests/benchmarks/placement_balance.py`.

    gap = sum over layers of the largest rank load / sum over layers of its lower bound - 1

with the load of an expert split evenly over its replicas; EPLB on the same loads is printed beside
every figure. Loads are the synthetic families of `tests/solvers/placement/balance/testing.py` and,
where `--routing` names a folder of recordings in the project's own layout, those of OLMoE and
Mixtral.

1. one workload of 58 layers of 256 experts;
2. one plan for four families, the gap of each against its own bound, averaged;
3. the same on a fifth family that the plan has not seen, every fold, against EPLB planned on the
   mean of the four and on the one of the four that is nearest to the fifth;
4. recordings: planned on two domains, tested on the third, every fold.

Both wall and processor seconds are printed; with other load on the machine only the latter are
comparable. Exit code 1: a bar is missed.
"""

import json
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from solvers.placement.balance import check
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Floats, Placement, Ranks
from solvers.registry import BALANCE
from tests.benchmarks.bars import machine, parse, say, timed
from tests.expect import present
from tests.solvers.placement.balance.testing import even_weights, families, gap_ratio

LAYERS, EXPERTS, SEED = 58, 256, 2024
ONE_WORKLOAD = ((32, 9), (72, 4), (64, 5))
ONE_WORKLOAD_BARS = ((2.0, 0.001), (10.0, 0.0005))
"""Seconds, and the gap allowed after them."""
FOUR_FAMILIES = ((32, 9, 0.01), (64, 5, 0.02))
FAMILIES_LIMIT_S = 10.0
MOST_BYTES = 200e6
WORST_FOLD_RATIO = 1.01
RECORDINGS = (("olmoe", 8, 9), ("olmoe", 16, 5), ("mixtral-8x7b", 4, 3))
DOMAINS = ("arxiv", "c4", "wikipedia")

Seconds = tuple[float, float]
"""Seconds by the clock and by the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure with its bar; None: reported only."""

    case: str
    figure: str
    value: float
    bar: float | None
    rule: float | None
    seconds: Seconds | None = None

    @property
    def is_met(self) -> bool:
        return self.bar is None or self.value <= self.bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of the run: the whole table, or a part in a test."""

    layers: int = LAYERS
    experts: int = EXPERTS
    one_workload: tuple[tuple[int, int], ...] = ONE_WORKLOAD
    four_families: tuple[tuple[int, int, float], ...] = FOUR_FAMILIES
    time_scale: float = 1.0
    threads: int = 2


def problem_of(load_WLE: Floats, ranks: Ranks) -> BalanceProblem:
    """Workloads with equal weights."""
    return BalanceProblem(load_WLE=load_WLE, weight_W=even_weights(len(load_WLE)), ranks=ranks)


def ruled(problem: BalanceProblem) -> Placement:
    """EPLB's placement for the mean of the workloads."""
    return present(BALANCE.solve(problem, method="eplb", time_limit_s=60.0).solution)


def placed(problem: BalanceProblem, size: Size, *, limit_s: float) -> tuple[Placement, Seconds]:
    """The default method's placement, its seconds by the clock and by the processor."""
    found, *seconds = timed(
        lambda: BALANCE.solve(problem, time_limit_s=limit_s * size.time_scale, threads=size.threads)
    )
    return present(found.solution), (seconds[0], seconds[1])


def one_workload(size: Size) -> Iterator[Line]:
    """Gap of one workload after the seconds of each bar."""
    for num_ranks, slots in size.one_workload:
        loads = families(
            np.random.default_rng(SEED),
            num_families=1,
            num_layers=size.layers,
            num_experts=size.experts,
        )
        problem = problem_of(loads, Ranks.uniform(ranks=num_ranks, slots_per_rank=slots))
        rule = gap_ratio(problem, ruled(problem))
        for limit_s, bar in ONE_WORKLOAD_BARS:
            placement, seconds = placed(problem, size, limit_s=limit_s)
            yield Line(
                case=f"one workload, {num_ranks} x {slots}, {limit_s:g} s",
                figure="gap",
                value=gap_ratio(problem, placement),
                bar=bar,
                rule=rule,
                seconds=seconds,
            )
    yield Line(
        case="one workload",
        figure="peak memory of the process, bytes",
        value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        bar=MOST_BYTES,
        rule=None,
    )


def four_families(size: Size) -> Iterator[Line]:
    """Mean gap of four families under one plan."""
    for num_ranks, slots, bar in size.four_families:
        loads = _five(size)[:4]
        problem = problem_of(loads, Ranks.uniform(ranks=num_ranks, slots_per_rank=slots))
        placement, seconds = placed(problem, size, limit_s=FAMILIES_LIMIT_S)
        yield Line(
            case=f"four families, {num_ranks} x {slots}",
            figure="mean gap",
            value=gap_ratio(problem, placement),
            bar=bar,
            rule=gap_ratio(problem, ruled(problem)),
            seconds=seconds,
        )


def unseen_family(size: Size) -> Iterator[Line]:
    """Imbalance of the held-out family."""
    for num_ranks, slots, _ in size.four_families:
        ranks = Ranks.uniform(ranks=num_ranks, slots_per_rank=slots)
        yield from folds(f"unseen family, {num_ranks} x {slots}", _five(size), ranks, size)


def recordings(folder: Path, size: Size) -> Iterator[Line]:
    """Imbalance of the held-out domain."""
    for model, num_ranks, slots in RECORDINGS:
        loads = np.stack(
            [
                np.array(
                    json.loads((folder / f"{model}_{domain}.json").read_text())["logical_count"]
                )
                for domain in DOMAINS
            ]
        ).astype(np.float64)
        ranks = Ranks.uniform(ranks=num_ranks, slots_per_rank=slots)
        yield from folds(f"{model}, {num_ranks} x {slots}", loads, ranks, size, worst_fold_bar=None)


def folds(
    case: str,
    load_FLE: Floats,
    ranks: Ranks,
    size: Size,
    *,
    worst_fold_bar: float | None = WORST_FOLD_RATIO,
) -> Iterator[Line]:
    """Hold each workload out once; figures are imbalances over EPLB's."""
    share_FLE = load_FLE / load_FLE.sum(axis=2, keepdims=True)
    result = []
    for fold in range(len(load_FLE)):
        known = [other for other in range(len(load_FLE)) if other != fold]
        seen, unseen = problem_of(load_FLE[known], ranks), problem_of(load_FLE[[fold]], ranks)
        placement, seconds = placed(seen, size, limit_s=FAMILIES_LIMIT_S)
        distance_F = np.abs(share_FLE[known] - share_FLE[fold]).sum(axis=(1, 2))
        nearest = eplb(load_FLE[known[int(distance_F.argmin())]], ranks=ranks)
        ours, on_mean, on_nearest = (
            check.objective(unseen, one) for one in (placement, ruled(seen), nearest)
        )
        result.append((ours / on_mean, ours / on_nearest))
        yield Line(
            case=f"{case}, without {fold}",
            figure="imbalance (rule: planned on the mean)",
            value=ours,
            bar=None,
            rule=on_mean,
            seconds=seconds,
        )
        yield Line(
            case=f"{case}, without {fold}",
            figure="imbalance (rule: planned on the nearest)",
            value=ours,
            bar=None,
            rule=on_nearest,
        )
    ratio_F2 = np.array(result)
    for column, name in enumerate(("the rule on the mean", "the rule on the nearest")):
        ratio_F = ratio_F2[:, column]
        yield Line(
            case=case, figure=f"mean over {name}", value=float(ratio_F.mean()), bar=1.0, rule=1.0
        )
        yield Line(
            case=case,
            figure=f"worst over {name}",
            value=float(ratio_F.max()),
            bar=worst_fold_bar,
            rule=1.0,
        )


def _five(size: Size) -> Floats:
    return families(
        np.random.default_rng(SEED + 1),
        num_families=5,
        num_layers=size.layers,
        num_experts=size.experts,
    )


def lines(size: Size, folder: Path | None) -> Iterator[Line]:
    """The whole table."""
    yield from one_workload(size)
    yield from four_families(size)
    yield from unseen_family(size)
    if folder is not None:
        yield from recordings(folder, size)


def text_of(line: Line) -> str:
    """One figure as text."""
    said = "" if line.bar is None else f", bar {line.bar:.6g}"
    said += "" if line.is_met else " MISSED"
    said += "" if line.rule is None else f", rule {line.rule:.5g}"
    if line.seconds is not None:
        said += f" ({line.seconds[0]:.2f} s, {line.seconds[1]:.2f} s of the processor)"
    return f"{line.case}: {line.figure} {line.value:.5g}{said}"


def main() -> int:
    """Print the figures; 1 when one misses its bar."""
    chosen = parse(__doc__, {"--threads": 2, "--routing": (Path, None)})
    say(f"{machine()}, {chosen.threads} threads")
    missed = 0
    for line in lines(Size(threads=chosen.threads), chosen.routing):
        say(text_of(line))
        missed += not line.is_met
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
