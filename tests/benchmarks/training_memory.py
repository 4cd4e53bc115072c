"""Errors of predicted peak memory on published runs, and runs wrongly predicted not to fit.

    python tests/benchmarks/training_memory.py RUNS.csv

Reads a published table (published_training.py). Megatron-LM prints the largest bytes allocated,
torchtitan the largest reserved; each row is compared with what its software prints. Where a row
does not state recomputation, the public settings of its software are assumed, or else none if that
fits, and full if it does not.

Calibrated figures fit three constants by least squares on relative errors, shrunk to their priors,
to all groups other than the row's. Exit code 1: a figure exceeds the limits below.

Memory headroom: with each recipe held out, the probability of running out by the other recipes of
its kind of runtime (tuner/search/train/peak_errors.py), where the device has 0.98 and 1.10
times the measured peak; and, over many multiples of it, whether about a tenth of the runs with a
probability of a tenth run out. A run is accepted where it is likelier to run than not. The stated
probability includes the growth of peaks over a long run; the calibration does not, as those were
short.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.bars import say
from tests.benchmarks.published_training import documented
from tuner.backtest.columns import PublishedRun, build_runs, stack_runs
from tuner.backtest.rows import Row, read_rows
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import FITTED, MemoryConstants, memory_constants
from tuner.costs.train.prices import MemoryPrice
from tuner.prices.train.constants import Software
from tuner.search.train.memory_risk import GROWTH_RATIO, UNEVEN_RATIO
from tuner.search.train.peak_errors import RATIOS, ErrorKind, PeakErrors, error_kind, peak_band

Floats = npt.NDArray[np.float64]

GIB = 2.0**30
LARGEST_MEDIAN = 0.025
LARGEST_CALIBRATED_MEDIAN = 0.005
LARGEST_CALIBRATED = 0.03
LARGEST_SHARDED = 0.07
"""FSDP without a pipeline."""
LARGEST_REFUSED = 1
"""Runs that ran and are predicted not to fit: a page's 70B model without sharding, whose weights
and gradients alone, 263 GiB, leave no room on its device."""

NOISE = 0.005
"""Expected limit of a run's relative error."""

ROOMY = 0.25
LIKELY = 0.5
"""Probability from which on a run is likelier to run out than not."""
MOST_UNWARNED = 6
"""Runs whose chance of running out is smaller with 0.98 of what they took. Asked: none."""
MOST_REFUSED = 1
"""Published runs whose chance is not with 1.10 of it; asked: none."""
LARGEST_GAP = 0.17
"""Between a stated chance and how often runs ran out, of all kinds together."""
MULTIPLES = np.arange(0.70, 1.45, 0.01) + 0.005
BINS = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 1.01)

PUBLIC = {
    "torchtitan": {"recompute_by_op": 1.0},
    "automodel": {"recompute_full": 1.0, "gradient_bytes": 2.0},
}
"""For rows that do not state it: torchtitan's default (train_configs/llama3_8b.toml), AutoModel's
benchmarks (examples/benchmark/configs/*.yaml: activation checkpointing, bf16 parameters and
gradients)."""

STRONG_SCALING = {"gpu": "B200-SXM"}
"""The page of torchtitan-fork-pr names no device; 178 GiB of memory is a B200's. Local batches that
it does not print are the 8 of its fixed-batch rows, sequences are taken to have 4,096 tokens."""


def rows_of(path: Path) -> tuple[Row, ...]:
    """Read the table, and complete one page's rows by what is known of them."""
    completed = (
        replace(
            row,
            texts={**row.texts, **STRONG_SCALING},
            numbers={"mbs": 8.0, "seq": 4096.0, "ep": 8.0, **row.numbers},
        )
        if row.source == "torchtitan-fork-pr"
        else row
        for row in read_rows(path)
    )
    return tuple(map(documented, completed))


def with_recompute(run: PublishedRun, *, full: bool) -> PublishedRun:
    """Fill in recomputation where the row does not state it."""
    if run.knows_recompute:
        return run
    usual = PUBLIC.get(run.family, {"recompute_full": 1.0} if full else {})
    return replace(run, strategy=replace(run.strategy, **usual))


def price(runs: Sequence[PublishedRun], constants: MemoryConstants) -> MemoryPrice:
    """Price all runs at once."""
    batch = stack_runs(runs)
    return price_memory(
        batch.shape, batch.strategy, batch.hardware, batch.stages, constants=constants
    )


def constants_of(runs: Sequence[PublishedRun]) -> MemoryConstants:
    """Uncalibrated constants of every run's software."""
    return memory_constants([run.software for run in runs], [run.memory_family for run in runs])


def printed_bytes(runs: Sequence[PublishedRun], constants: MemoryConstants) -> Floats:
    """Predict what each run's software prints as its peak."""
    result = price(runs, constants)
    is_torch = np.array([run.software is Software.TORCH_FSDP for run in runs])
    peak: Floats = np.where(
        is_torch, result.reserved_PC.max(axis=0), result.allocated_PC.max(axis=0)
    )
    return peak


def calibrated_errors(runs: Sequence[PublishedRun], constants: MemoryConstants) -> Floats:
    """Relative errors when the constants are fitted to the other groups."""
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    base = printed_bytes(runs, constants)
    slope = np.stack(
        [
            (printed_bytes(runs, _moved(constants, name, spread)) - base) / measured
            for name, spread in FITTED.items()
        ],
        axis=1,
    )
    error = base / measured - 1.0
    group = np.array([run.row.group for run in runs])
    left = np.empty(len(runs))
    for name in np.unique(group):
        out = group == name
        system = np.vstack([slope[~out] / NOISE, np.eye(len(FITTED))])
        target = np.concatenate([-error[~out] / NOISE, np.zeros(len(FITTED))])
        left[out] = error[out] + slope[out] @ np.linalg.lstsq(system, target, rcond=None)[0]
    return left


def _moved(constants: MemoryConstants, name: str, spread: float) -> MemoryConstants:
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    return MemoryConstants(**{**values, name: values[name] + spread})


def show_simumax(runs: Sequence[PublishedRun]) -> bool:
    """Print Megatron-LM's rows on one node and return whether they are inside the limits."""
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    constants = constants_of(runs)
    plain = printed_bytes(runs, constants) / measured - 1.0
    fitted = calibrated_errors(runs, constants)
    say("SimuMax's Megatron-LM runs            GiB   predicted  other groups fitted")
    seen = set()
    for run, gib, one, other in zip(runs, measured / GIB, plain, fitted, strict=True):
        if run.row.group not in seen:
            seen.add(run.row.group)
            name = run.row.group.replace("|B200-SXM|8|", " ")
            say(f"  {name:32} {gib:8.2f} {one:+9.2%} {other:+9.2%}")
    median, largest = np.median(np.abs(plain)), np.abs(plain).max()
    fitted_median, fitted_largest = np.median(np.abs(fitted)), np.abs(fitted).max()
    say(f"  uncalibrated median {median:.2%}, max {largest:.2%}")
    say(f"  calibrated   median {fitted_median:.2%}, max {fitted_largest:.2%}")
    return bool(
        median <= LARGEST_MEDIAN
        and fitted_median <= LARGEST_CALIBRATED_MEDIAN
        and fitted_largest <= LARGEST_CALIBRATED
    )


def show_others(runs: Sequence[PublishedRun]) -> bool:
    """Print the other measured rows and return whether they are inside their limits.

    Every row has to lie in the band that plans print, FSDP without a pipeline in `LARGEST_SHARDED`.
    """
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    predicted = printed_bytes(runs, constants_of(runs))
    error = predicted / measured - 1.0
    say("Other runs                            GiB   predicted  measured in the band of a plan")
    inside = True
    for run, gib, one, peak in zip(runs, measured / GIB, error, predicted / GIB, strict=True):
        strategy = run.strategy
        low, high = peak_band(peak)
        name = f"{run.row.text('model')} x{run.row.numbers['num_gpus']:g}"
        how = f"{strategy.sequence:g}x{strategy.micro_batch:g} {run.row.text('notes')[:14]}"
        band = f"{low:.1f} to {high:.1f}"
        say(f"  {name:18} {how:24} {gib:8.2f} {one:+8.1%}  {band}")
        is_plain_fsdp = strategy.zero_stage == 3.0 and strategy.pipeline == 1.0
        inside &= low <= gib <= high and (not is_plain_fsdp or abs(one) <= LARGEST_SHARDED)
    return inside


def show_refused(runs: Sequence[PublishedRun]) -> bool:
    """Print the runs that are predicted not to fit and return whether they are few enough."""
    least = np.minimum(
        *(
            price(
                [with_recompute(run, full=full) for run in runs], constants_of(runs)
            ).total_PC.max(axis=0)
            for full in (False, True)
        )
    )
    room = np.array([float(run.hardware.memory_bytes) for run in runs])
    refused = [index for index in range(len(runs)) if least[index] > room[index]]
    say(f"{len(runs)} runs that ran, {len(refused)} predicted not to fit")
    for index in refused:
        run = runs[index]
        say(
            f"  {run.row.id[:60]} {least[index] / GIB:.1f} of {room[index] / GIB:.1f} GiB"
            f" (recipe {run.row.text('recipe_match') or 'printed'})"
        )
    return len(refused) <= LARGEST_REFUSED


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A published run, with the errors of the other recipes of its kind."""

    run: PublishedRun
    kind: ErrorKind
    ratio: float
    """Measured over predicted peak."""
    growth_ratio: float
    """What a plan, which knows no routing, expects the peak to grow by."""
    others: PeakErrors

    def at_start(self, multiple: float) -> float:
        """Probability of running out at the start on a device with a multiple of the measured
        peak."""
        return float(self.others.at_start(np.array([multiple * self.ratio]))[0])

    def stated(self, multiple: float) -> float:
        """The same at any time, as stated by plans."""
        growth = np.array([self.growth_ratio])
        return float(self.others.ever(np.array([multiple * self.ratio]), growth_C=growth)[0])


def left_out(runs: Sequence[PublishedRun]) -> tuple[Left, ...]:
    """Every run with the errors of all recipes of its kind but its own."""
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    predicted = printed_bytes(runs, constants_of(runs))
    twice = [replace(run, strategy=replace(run.strategy, expert_imbalance_p99=2.0)) for run in runs]
    uneven = printed_bytes(twice, constants_of(runs)) - predicted
    growths = GROWTH_RATIO + UNEVEN_RATIO * uneven / predicted
    ratios = measured / predicted
    kinds = [
        error_kind(run.software, has_pipeline=float(run.strategy.pipeline) > 1) for run in runs
    ]
    result = []
    for run, kind, ratio, growth in zip(runs, kinds, ratios, growths, strict=True):
        sources: dict[str, dict[str, list[float]]] = {}
        for other, its_kind, its_ratio in zip(runs, kinds, ratios, strict=True):
            if its_kind is kind and _recipe(other) != _recipe(run):
                source, recipe = _recipe(other)
                sources.setdefault(source, {}).setdefault(recipe, []).append(float(its_ratio))
        others = PeakErrors.of([[tuple(r) for r in one.values()] for one in sources.values()])
        result.append(
            Left(
                run=run,
                kind=kind,
                ratio=float(ratio),
                growth_ratio=float(growth),
                others=others,
            )
        )
    return tuple(result)


def _recipe(run: PublishedRun) -> tuple[str, str]:
    """Its source, by page where there are several, and its recipe there."""
    return run.row.text("url") or run.row.source, run.row.group


def show_ratios(left: Sequence[Left]) -> bool:
    """Print measured over predicted peaks as peak_errors.py holds them; say whether it does."""
    shipped = sorted(
        (kind.value, tuple(round(ratio, 3) for ratio in recipe))
        for kind, sources in RATIOS.items()
        for recipes in sources.values()
        for recipe in recipes
    )
    recipes: dict[tuple[str, tuple[str, str]], list[float]] = {}
    for one in left:
        recipes.setdefault((one.kind.value, _recipe(one.run)), []).append(round(one.ratio, 4))
    say("Measured over predicted peaks by kind of runtime, source and recipe")
    for (kind, (source, recipe)), ratios in recipes.items():
        say(f"  {kind:17} {source.rsplit('/', 1)[-1][:36]:36} {recipe[:40]:40} {tuple(ratios)}")
    printed = sorted((kind, tuple(round(r, 3) for r in of)) for (kind, _), of in recipes.items())
    return printed == shipped


def show_room(left: Sequence[Left]) -> bool:
    """Print the chances at 0.98 and 1.10 of the measured peak, and whether few enough miss."""
    say("Stated chance of running out, its recipe left out, at 0.98 and 1.10 of the measured peak")
    warned = {one.run.row.id: one.stated(0.98) >= LIKELY for one in left}
    accepted = {one.run.row.id: one.stated(1.10) < LIKELY for one in left}
    for kind in ErrorKind:
        own = [one for one in left if one.kind is kind]
        say(
            f"  {kind.value:17} {len(own):3} rows: {sum(warned[one.run.row.id] for one in own):3}"
            f" warned of, {sum(accepted[one.run.row.id] for one in own):3} accepted, of them"
            f" {sum(one.stated(1.10) < ROOMY for one in own):3} below {ROOMY:.0%}"
        )
    say("  missed                measured of predicted   at 0.98   at 1.10   at start alone")
    for one in left:
        if not (warned[one.run.row.id] and accepted[one.run.row.id]):
            name = f"{one.run.row.text('model')} x{one.run.row.numbers['num_gpus']:g}"
            say(
                f"  {name:20} {one.run.row.text('notes')[:16]:16} {one.ratio:6.3f}"
                f" {one.stated(0.98):9.1%} {one.stated(1.10):9.1%}"
                f" {one.at_start(0.98):9.1%} {one.at_start(1.10):6.1%}"
            )
    say(f"  {sum(warned.values())} of {len(left)} warned of, {sum(accepted.values())} accepted")
    return (
        sum(not is_so for is_so in warned.values()) <= MOST_UNWARNED
        and sum(not is_so for is_so in accepted.values()) <= MOST_REFUSED
    )


def show_calibration(left: Sequence[Left]) -> bool:
    """Print by chance at the start how often runs ran out, every recipe weighing alike."""
    say("Chance at start against runs that ran out, memory 0.70 to 1.45 of the measured peak")
    share = [1.0 / sum(_recipe(o.run) == _recipe(one.run) for o in left) for one in left]
    worst = 0.0
    for kinds in (*((kind,) for kind in ErrorKind), tuple(ErrorKind)):
        cells = []
        for low, high in pairwise(BINS):
            weights, stated, out = 0.0, 0.0, 0.0
            for one, weight in zip(left, share, strict=True):
                if one.kind not in kinds:
                    continue
                for multiple in MULTIPLES:
                    chance = one.at_start(float(multiple))
                    if low <= chance < high:
                        weights += weight
                        stated += weight * chance
                        out += weight * (multiple < 1.0)
            cells.append(
                f"{stated / weights:4.0%} {out / weights:4.0%}" if weights else "        -"
            )
            if len(kinds) == len(ErrorKind) and weights:
                worst = max(worst, abs(stated - out) / weights)
        name = "all" if len(kinds) > 1 else kinds[0].value
        say(f"  {name:17} " + "  ".join(f"{cell:>9}" for cell in cells))
    say(f"  (a pair a bin of stated chance, stated and observed; largest gap of all {worst:.0%})")
    return worst <= LARGEST_GAP


def main(path: str) -> int:
    """Print the tables."""
    runs, reasons = build_runs(rows_of(Path(path)))
    runs = tuple(run for run in runs if not run.row.has_run_out_of_memory)
    say(f"{len(runs)} rows read, {len(reasons)} cannot be predicted")
    measured = [with_recompute(run, full=False) for run in runs if run.peak_bytes is not None]
    inside = [
        show_simumax([run for run in measured if run.family == "megatron-lm"]),
        show_others([run for run in measured if run.family != "megatron-lm"]),
        show_refused(runs),
    ]
    left = left_out(measured)
    inside += [show_ratios(left), show_room(left), show_calibration(left)]
    return 0 if all(inside) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
