"""Errors of predicted step times on published runs, beside their aims.

    python tests/benchmarks/training_accuracy.py RUNS.csv

Reads a published table (published_training.py). Prints errors of the generic constants, then of
constants fitted without the runs that they predict, recipes (`group`) held out in turn, and models
and cells where the table requires them; last the coverage of error bands on held-out recipes.
Figures that miss their aim are marked. Exit code 1: a figure misses.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.bars import is_missed, say
from tests.benchmarks.published_training import read_published
from tuner.backtest.columns import PublishedRun
from tuner.backtest.errors import ScoredRow, summarise_errors
from tuner.backtest.prediction import ResidualSet, backtest, case_key, tokens_per_step
from tuner.backtest.records import Errors
from tuner.calibrate.calibration import Calibration, calibrate

Floats = npt.NDArray[np.float64]

NEWEST = (26, 2)
"""Containers of Megatron-Bridge from here on are reported separately."""
LEAST_COVERED = 0.85


def main(path: str) -> int:
    """Print every figure and return 1 if any misses its aim."""
    rows = read_published(Path(path))
    made = calibrate(rows, origin="benchmark", data_sha256="")
    generic = np.log(made.problem.price(made.problem.generic_KC) / made.problem.measured_C)
    missed = [*_uncalibrated(made, generic), *_calibrated(made), *_choice(made, generic)]
    plain = backtest(rows, residual_set=ResidualSet())
    missed += _memory(plain.sources.get("simumax-b200"), plain.total)
    name = "recipes inside bands made without them"
    missed.append(is_missed(name, made.residuals.covered_ratio, LEAST_COVERED, is_most=False))
    return int(any(missed))


def _uncalibrated(made: Calibration, residual: Floats) -> list[bool]:
    say("generic constants, nothing fitted")
    multi, single = _of(made, "vtrain-multi"), _of(made, "vtrain-single")
    eight = multi & np.array([float(run.strategy.tensor) == 8.0 for run in made.runs])
    for name in dict.fromkeys(run.row.source for run in made.runs):
        _show(made, name, _of(made, name), residual)
    _show(made, "models with experts", _with_experts(made), residual)
    return [
        is_missed("vtrain-multi mean", _errors(made, multi, residual).mean_ape, 0.10),
        is_missed("vtrain-multi P90", _errors(made, multi, residual).p90_ape, 0.21),
        is_missed("vtrain-multi TP 8 mean", _errors(made, eight, residual).mean_ape, 0.065),
        is_missed("vtrain-single mean", _errors(made, single, residual).mean_ape, 0.11),
    ]


def _calibrated(made: Calibration) -> list[bool]:
    experts, bridge = _with_experts(made), _of(made, "megatron-bridge")
    new = np.array([_version(run) >= NEWEST for run in made.runs])
    arguments = (
        ("group", "vtrain-multi", _of(made, "vtrain-multi"), 0.055, 0.17),
        ("cell", "vtrain-single", _of(made, "vtrain-single"), 0.05, 0.145),
        ("group", "simumax-b200", _of(made, "simumax-b200"), 0.04, 0.09),
        ("group", "megatron-bridge 26.02+ dense", bridge & new & ~experts, 0.045, 0.12),
        ("group", "megatron-bridge 26.02+ experts", bridge & new & experts, 0.07, 0.17),
        ("group", "hybrids", _hybrids(made), 0.08, 0.20),
        ("group", "megatron-bridge all", bridge, 0.06, 0.20),
        ("model", "megatron-bridge all", bridge, 0.08, None),
        ("group", "llm-foundry", _of(made, "llm-foundry"), 0.03, 0.095),
        ("model", "llm-foundry", _of(made, "llm-foundry"), 0.04, 0.11),
    )
    say("\nfitted without the recipes that are predicted")
    for name in dict.fromkeys(run.row.source for run in made.runs):
        _show(made, name, _of(made, name), made.held_out["group"])
    _show(made, "models with experts", experts, made.held_out["group"])
    for generation in dict.fromkeys(str(run.device.generation) for run in made.runs):
        here = np.array([run.device.generation == generation for run in made.runs])
        _show(made, generation, here, made.held_out["group"])
    _show(made, "vtrain-single, whole widths", _of(made, "vtrain-single"), made.held_out["hidden"])
    _show(made, "megatron-bridge, whole devices", bridge, made.held_out["device"])
    missed = []
    for key, name, chosen, median, p90 in arguments:
        result = _errors(made, chosen, made.held_out[key])
        missed.append(is_missed(f"{name} median, without its {key}", result.median_ape, median))
        if p90 is not None:
            missed.append(is_missed(f"{name} P90, without its {key}", result.p90_ape, p90))
    return missed


def _choice(made: Calibration, residual: Floats) -> list[bool]:
    single = _errors(made, _of(made, "vtrain-single"), residual)
    multi = _errors(made, _of(made, "vtrain-multi"), residual)
    return [
        is_missed("vtrain-single best of three, mean regret", single.choice_regret_top3, 0.005),
        is_missed("vtrain-multi best of three, largest regret", multi.choice_regret_top3_max, 0.06),
    ]


def _memory(simumax: Errors | None, total: Errors) -> list[bool]:
    result = simumax.memory_median_ape if simumax is not None else None
    missed = [is_missed("simumax-b200 peak memory, median", result, 0.025)]
    misfits = total.false_misfits
    if misfits is None:
        say("runs that ran and are said not to fit: nothing to measure")
        return missed
    say(f"runs that ran and are said not to fit: {misfits}, aim 0")
    return [*missed, misfits > 0]


def _of(made: Calibration, source: str) -> npt.NDArray[np.bool_]:
    return np.array([run.row.source == source for run in made.runs])


def _hybrids(made: Calibration) -> npt.NDArray[np.bool_]:
    return np.array([run.shape.has_linear for run in made.runs])


def _with_experts(made: Calibration) -> npt.NDArray[np.bool_]:
    return np.array([bool(run.shape.experts) for run in made.runs])


def _version(run: PublishedRun) -> tuple[int, ...]:
    return tuple(int(part) for part in run.release.split(".")[:2] if part.isdigit())


def _errors(made: Calibration, chosen: npt.NDArray[np.bool_], residual: Floats) -> Errors:
    return summarise_errors(_scored(made.runs, chosen, residual))


def _scored(
    runs: Sequence[PublishedRun], chosen: npt.NDArray[np.bool_], residual: Floats
) -> list[ScoredRow]:
    return [
        ScoredRow(
            predicted_s=(run.measured_s or 0.0) * float(np.exp(error)),
            measured_s=run.measured_s,
            tokens=tokens_per_step(run),
            case=case_key(run.row),
        )
        for run, is_chosen, error in zip(runs, chosen, residual, strict=True)
        if is_chosen
    ]


def _show(made: Calibration, name: str, chosen: npt.NDArray[np.bool_], residual: Floats) -> None:
    result = _errors(made, chosen, residual)
    if result.median_ape is None or result.mean_ape is None or result.p90_ape is None:
        return
    say(
        f"  {name:32s} {result.rows:5d} rows  median {100 * result.median_ape:5.1f}"
        f"  mean {100 * result.mean_ape:5.1f}  P90 {100 * result.p90_ape:5.1f}"
        f"  bias {100 * (result.bias or 0.0):+6.1f} %"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
