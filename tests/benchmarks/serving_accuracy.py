"""How far predicted TTFT and TPOT are from published runs, beside the figures that are aimed at.

    python tests/benchmarks/serving_accuracy.py RUNS.csv [TABLES]

Reads a table in the layout of `moetune backtest`, and kernels from TABLES (profiles or a folder of
aiconfigurator's tables) or the installed aiconfigurator-core. Prints errors of the model as it
ships, then with residuals of other models alone, then after three launches of the same model,
system and engine; last the order of strategies, seconds and memory. Figures that miss their aim
are marked, and the end is 1 if any does.
"""

import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tuner.backtest.records import Errors
from tuner.backtest.serving.backtest import pairs_of
from tuner.backtest.serving.launches import Harness
from tuner.backtest.serving.rows import read_cells
from tuner.backtest.serving.scoring import Pair, metric_of, tpot, ttft
from tuner.calibrate.serving import after_launches, held_out

MIB = 2**20
Chosen = Callable[[Pair], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Largest errors that are asked for; None where none is."""

    tpot_median: float | None = None
    tpot_p90: float | None = None
    tpot_bias: float | None = None
    ttft_median: float | None = None
    ttft_p90: float | None = None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main(arguments: Sequence[str]) -> int:
    """Print every figure and return 1 if any misses its aim."""
    started_s, cpu_s = time.perf_counter(), time.process_time()
    judged = pairs_of(read_cells(Path(arguments[0])), profiles=[Path(a) for a in arguments[1:]])
    pairs = [pair for pair in judged.pairs if not pair.launch.is_disaggregated]
    hopper = [pair for pair in pairs if pair.launch.generation == "hopper"]
    blackwell = [pair for pair in pairs if pair.launch.generation == "blackwell"]
    aim = Aim(tpot_median=0.11, tpot_p90=0.30, tpot_bias=0.08, ttft_median=0.31)
    recipe = Aim(tpot_median=0.08, ttft_median=0.16, ttft_p90=0.60)
    missed = [*_judge("hopper, uncalibrated", hopper, aim)]
    missed += _judge("hopper, InferenceX, uncalibrated", _recipes(hopper), recipe)
    missed += _judge("hopper, other driver, uncalibrated", _others(hopper), Aim())
    missed += _judge("blackwell, uncalibrated", blackwell, Aim(tpot_median=0.11, ttft_median=0.28))
    plain = _errors(hopper)[0].median_ape or 0.0
    without = held_out(pairs)
    old = [pair for pair in without if pair.launch.generation == "hopper"]
    worst = min(0.10, plain + 0.01)
    missed += _judge(
        "hopper, other models' residuals", old, Aim(tpot_median=worst, ttft_median=0.26)
    )
    missed += _judge(
        "hopper, InferenceX, other models' residuals", _recipes(old), Aim(ttft_median=0.19)
    )
    after = after_launches(hopper, launches=3, draws=5, seed=0)
    missed += _judge("hopper, after 3 launches", after, Aim(tpot_median=0.065, ttft_median=0.17))
    missed += _judge("hopper, InferenceX, after 3 launches", _recipes(after), Aim(ttft_median=0.13))
    missed += _order(pairs)
    eligible = len(judged.pairs) / max(judged.eligible, 1)
    missed.append(_check("eligible rows predicted", eligible, 0.98, is_most=False))
    for name in sorted({pair.launch.source for pair in judged.pairs}):
        _judge(name, [pair for pair in judged.pairs if pair.launch.source == name], Aim())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    _say(
        f"\n{time.perf_counter() - started_s:.1f} s, {time.process_time() - cpu_s:.1f} CPU-s, "
        f"{peak_bytes / MIB:.0f} MiB"
    )
    return int(any(missed))


def _recipes(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.launch.harness is Harness.INFERENCEX]


def _others(pairs: Sequence[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.launch.harness is Harness.OTHER]


def _errors(pairs: Sequence[Pair]) -> tuple[Errors, Errors]:
    return metric_of(pairs, read=tpot, refused=()), metric_of(pairs, read=ttft, refused=())


def _judge(name: str, pairs: Sequence[Pair], aim: Aim) -> list[bool]:
    if not pairs:
        _say(f"{name}: nothing to measure")
        return []
    found_tpot, found_ttft = _errors(pairs)
    _say(f"\n{name}: {len(pairs)} predictions")
    return [
        _check("  TPOT median", found_tpot.median_ape, aim.tpot_median),
        _check("  TPOT P90", found_tpot.p90_ape, aim.tpot_p90),
        _check("  TPOT bias", abs(found_tpot.bias or 0.0), aim.tpot_bias),
        _check("  TTFT median", found_ttft.median_ape, aim.ttft_median),
        _check("  TTFT P90", found_ttft.p90_ape, aim.ttft_p90),
        _check("  TTFT bias", abs(found_ttft.bias or 0.0), None),
    ]


def _order(pairs: Sequence[Pair]) -> list[bool]:
    missed = []
    _say("\nstrategies at equal load, measured over 10 % apart")
    for name, read, aims in (
        ("TPOT", tpot, {"hopper": 0.97}),
        ("TTFT", ttft, {}),
    ):
        for generation, order in metric_of(pairs, read=read, refused=()).order.items():
            title = f"  {name}, {generation}, {order.pairs} pairs ordered right"
            aim = aims.get(generation)
            missed.append(_check(title, order.ordered_ratio, aim, is_most=False))
            title = f"  {name}, {generation}, {order.equal_pairs} of equally many devices"
            _check(title, order.equal_ordered_ratio, None)
    return missed


def _check(name: str, found: float | None, aim: float | None, *, is_most: bool = True) -> bool:
    """Print a figure beside its aim and return whether it misses it."""
    if found is None:
        _say(f"{name}: nothing to measure")
        return False
    if aim is None:
        _say(f"{name}: {100 * found:.1f} %")
        return False
    misses = found > aim if is_most else found < aim
    word = "MISSED" if misses else "reached"
    _say(f"{name}: {100 * found:.1f} %, aim {100 * aim:.1f} %, {word}")
    return misses


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
