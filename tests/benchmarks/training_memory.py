"""How far predicted peak memory is from published runs, and which runs it wrongly calls too large.

    python tests/benchmarks/training_memory.py RUNS.csv

Reads a table in the layout of `moetune backtest`. Megatron-LM prints the largest bytes allocated,
torchtitan the largest reserved; each row is compared with what its software prints. Where a row
does not say what is recomputed, the public settings of its software are taken, or else nothing if
that fits, and everything if it does not.

Calibrated figures fit three constants by least squares on relative errors, pulled to their priors,
to all other groups than the row's. Ends with 1 if a figure exceeds the limits below.
"""

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tuner.backtest.columns import Run, batch_of, runs_of
from tuner.backtest.rows import Row, read_rows
from tuner.costs.analytic.constants import Software
from tuner.costs.analytic.memory import price_memory
from tuner.costs.analytic.memory_constants import FITTED, MemoryConstants, memory_constants
from tuner.costs.analytic.prices import MemoryPrice
from tuner.planner.analytic.memory_band import peak_band

Floats = npt.NDArray[np.float64]

GIB = 2.0**30
LARGEST_MEDIAN = 0.025
LARGEST_CALIBRATED_MEDIAN = 0.005
LARGEST_CALIBRATED = 0.03
LARGEST_SHARDED = 0.12
"""FSDP without a pipeline."""
LARGEST_REFUSED = 1
"""Runs that ran and are predicted not to fit. The one is a page's 70B model without sharding whose
weights and gradients alone, 263 GiB, leave no room on its device."""

NOISE = 0.005
"""Relative error that a run is expected to keep."""

PUBLIC = {
    "torchtitan": {"recompute_products": 1.0},
    "automodel": {"recompute_full": 1.0, "gradient_bytes": 2.0},
}
"""Of silent rows: torchtitan's default (train_configs/llama3_8b.toml), AutoModel's benchmarks
(examples/benchmark/configs/*.yaml: activation checkpointing, bf16 parameters and gradients)."""

STRONG_SCALING = {"gpu": "B200-SXM"}
"""The page of torchtitan-fork-pr names no device; 178 GiB of memory is a B200's. Local batches that
it does not print are the 8 of its fixed-batch rows, sequences are taken to have 4,096 tokens."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def rows_of(path: Path) -> tuple[Row, ...]:
    """Read the table, and complete one page's rows by what is known of them."""
    return tuple(
        replace(
            row,
            texts={**row.texts, **STRONG_SCALING},
            numbers={"mbs": 8.0, "seq": 4096.0, "ep": 8.0, **row.numbers},
        )
        if row.source == "torchtitan-fork-pr"
        else row
        for row in read_rows(path)
    )


def with_recompute(run: Run, *, full: bool) -> Run:
    """Fill what is recomputed where the row is silent."""
    if run.knows_recompute:
        return run
    usual = PUBLIC.get(run.family, {"recompute_full": 1.0} if full else {})
    return replace(run, strategy=replace(run.strategy, **usual))


def price(runs: Sequence[Run], constants: MemoryConstants) -> MemoryPrice:
    """Price all runs at once."""
    batch = batch_of(runs)
    return price_memory(
        batch.shape, batch.strategy, batch.hardware, batch.stages, constants=constants
    )


def constants_of(runs: Sequence[Run]) -> MemoryConstants:
    """Uncalibrated constants of every run's software."""
    return memory_constants([run.software for run in runs], [run.memory_family for run in runs])


def printed_bytes(runs: Sequence[Run], constants: MemoryConstants) -> Floats:
    """Predict what each run's software prints as its peak."""
    found = price(runs, constants)
    is_torch = np.array([run.software is Software.TORCH_FSDP for run in runs])
    peak: Floats = np.where(is_torch, found.reserved_PC.max(axis=0), found.allocated_PC.max(axis=0))
    return peak


def calibrated_errors(runs: Sequence[Run], constants: MemoryConstants) -> Floats:
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
        moved = np.linalg.lstsq(system, target, rcond=None)[0]
        left[out] = error[out] + slope[out] @ moved
    return left


def _moved(constants: MemoryConstants, name: str, spread: float) -> MemoryConstants:
    values = {field.name: getattr(constants, field.name) for field in fields(constants)}
    return MemoryConstants(**{**values, name: values[name] + spread})


def show_simumax(runs: Sequence[Run]) -> bool:
    """Print Megatron-LM's rows on one node and say whether they are inside the limits."""
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    constants = constants_of(runs)
    plain = printed_bytes(runs, constants) / measured - 1.0
    fitted = calibrated_errors(runs, constants)
    _say("SimuMax's Megatron-LM runs            GiB   predicted  other groups fitted")
    seen = set()
    for run, gib, one, other in zip(runs, measured / GIB, plain, fitted, strict=True):
        if run.row.group not in seen:
            seen.add(run.row.group)
            name = run.row.group.replace("|B200-SXM|8|", " ")
            _say(f"  {name:32} {gib:8.2f} {one:+9.2%} {other:+9.2%}")
    median, largest = np.median(np.abs(plain)), np.abs(plain).max()
    fitted_median, fitted_largest = np.median(np.abs(fitted)), np.abs(fitted).max()
    _say(f"  uncalibrated median {median:.2%}, max {largest:.2%}")
    _say(f"  calibrated   median {fitted_median:.2%}, max {fitted_largest:.2%}")
    return bool(
        median <= LARGEST_MEDIAN
        and fitted_median <= LARGEST_CALIBRATED_MEDIAN
        and fitted_largest <= LARGEST_CALIBRATED
    )


def show_others(runs: Sequence[Run]) -> bool:
    """Print the other measured rows and say whether they are inside their limits.

    Every row has to lie in the band that plans print, FSDP without a pipeline in `LARGEST_SHARDED`.
    """
    measured = np.array([run.peak_bytes for run in runs], dtype=np.float64)
    predicted = printed_bytes(runs, constants_of(runs))
    error = predicted / measured - 1.0
    _say("Other runs                            GiB   predicted  measured in the band of a plan")
    inside = True
    for run, gib, one, peak in zip(runs, measured / GIB, error, predicted / GIB, strict=True):
        strategy = run.strategy
        low, high = peak_band(peak, software=run.software, pipeline=int(strategy.pipeline))
        name = f"{run.row.text('model')} x{run.row.numbers['num_gpus']:g}"
        how = f"{strategy.sequence:g}x{strategy.micro_batch:g} {run.row.text('notes')[:14]}"
        band = f"{low:.1f} to {high:.1f}"
        _say(f"  {name:18} {how:24} {gib:8.2f} {one:+8.1%}  {band}")
        is_plain_fsdp = strategy.zero_stage == 3.0 and strategy.pipeline == 1.0
        inside &= low <= gib <= high and (not is_plain_fsdp or abs(one) <= LARGEST_SHARDED)
    return inside


def show_refused(runs: Sequence[Run]) -> bool:
    """Print the runs that are predicted not to fit and say whether they are few enough."""
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
    _say(f"{len(runs)} runs that ran, {len(refused)} predicted not to fit")
    for index in refused:
        run = runs[index]
        _say(
            f"  {run.row.id[:60]} {least[index] / GIB:.1f} of {room[index] / GIB:.1f} GiB"
            f" (recipe {run.row.text('recipe_match') or 'printed'})"
        )
    return len(refused) <= LARGEST_REFUSED


def main(path: str) -> int:
    """Print three tables."""
    runs, reasons = runs_of(rows_of(Path(path)))
    runs = tuple(run for run in runs if not run.row.has_run_out_of_memory)
    _say(f"{len(runs)} rows read, {len(reasons)} cannot be predicted")
    measured = [with_recompute(run, full=False) for run in runs if run.peak_bytes is not None]
    inside = [
        show_simumax([run for run in measured if run.family == "megatron-lm"]),
        show_others([run for run in measured if run.family != "megatron-lm"]),
        show_refused(runs),
    ]
    return 0 if all(inside) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
