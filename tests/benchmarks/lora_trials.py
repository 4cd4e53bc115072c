"""Fine-tuning on one H200 against the analytic model: memory, fit or not, seconds of a step.

    python tests/benchmarks/lora_trials.py [--rows]

examples/profiles/h200-lora/runs.csv holds 53 timed runs and 84 under a limit on the allocator:
Transformers 5.17 and PEFT 0.21.2 on random weights, full, LoRA and QLoRA, of two dense models and
two with 64 experts, with 1 to 32 thousand tokens a step. Nothing here is fitted to a row. Peaks are
those of forward and backward pass. Of seconds, one factor is fitted to the models of one kind and
judged on the other. Exit code 1: a bound of `BOUNDS` is missed.

Runs that the model does not describe are listed and not judged: attention or experts without their
usual kernel, PEFT's `all-linear` on experts (it adapts the router and doubles the rank of gate and
up); and, of seconds, optimizers other than PyTorch's fused AdamW.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from profilers.interpolation import Curve
from profilers.series import Series
from tests.benchmarks.bars import errors_line, parse, say
from tuner.backtest.columns import device_hardware
from tuner.config.columns import Strategies
from tuner.config.shapes import Stages, number, single
from tuner.config.tune_columns import Stack, tune_columns
from tuner.costs.train.calibration import Regime, constants_of, kind_of_model
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants, constants_of_family
from tuner.costs.train.prices import MemoryPrice
from tuner.costs.train.step import price_step
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.lookups import Lookups, NotedPrices
from tuner.prices.measured import MeasuredPrices
from tuner.prices.ops import Prices
from tuner.prices.train.constants import GemmPrecision, Software
from tuner.prices.train.measured_links import with_measured_links
from tuner.spec.huggingface.read import read_model
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

FOLDER: Final = Path(__file__).parents[2] / "examples/profiles/h200-lora"
DEVICE: Final[Datasheet] = find_device("h200-sxm")
HARDWARE: Final = device_hardware(DEVICE, GemmPrecision.BF16)
TARGETS: Final = {
    "attention": ("attention",),
    "experts": ("experts",),
    "attention+mlp": ("attention", "mlp"),
    "all-linear": ("all-linear",),
}
MOMENTS: Final = {"param": None, "fp32": 8.0, "fp32_master": 12.0}
"""Bytes of the optimizer's state; None: two moments of the parameter's type."""
WORKSPACES: Final = 2.0 * 32.0 * 2**20
"""Of cuBLAS, in every static figure."""

BOUNDS: Final = {"static": 0.02, "peak": 0.05, "seconds": 0.12, "fits": 0.90}

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One run: what is predicted over what was measured, less one."""

    name: str
    is_dense: bool
    static: float
    peak: float
    seconds: float
    skipped: str
    untimed: str


def read_runs(path: Path = FOLDER / "runs.csv") -> tuple[Row, ...]:
    """Read the stored runs."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def name_of(row: Row) -> str:
    """Name a run by its settings."""
    parts = [row["model"], row["method"], row["rank"] and f"r{row['rank']}", row["targets"]]
    parts.append(f"b{row['batch']}s{row['sequence']}")
    parts.append("checkpointing" if row["checkpointing"] == "1" else "")
    parts.append("autocast" if row["autocast"] == "1" else "")
    parts.append("bf16 adapters" if row["adapter_dtype"] == "bfloat16" else "")
    parts.append("fp32 weights" if row["weight_dtype"] == "float32" else "")
    parts.append("fp32 frozen" if row["kbit_prepare"] == "1" else "")
    parts.append("" if row["optimizer_states"] == "param" else row["optimizer_states"])
    parts.append("" if row["optimizer"] == "fused" else row["optimizer"])
    parts += ["eager attention"] if row["attention"] == "eager" else []
    parts += ["eager experts"] if row["experts"] == "eager" else []
    return " ".join(part for part in parts if part)


def why_skipped(row: Row) -> str:
    """Say what the model does not describe; empty where it describes the run."""
    if "eager" in (row["attention"], row["experts"]):
        return "eager attention or experts"
    if row["targets"] == "all-linear" and model_of(row["model"]).moe is not None:
        return "PEFT's all-linear on experts"
    return ""


def why_untimed(row: Row) -> str:
    """Say why seconds are not judged."""
    is_usual = (row["optimizer"], row["optimizer_states"]) == ("fused", "param")
    return why_skipped(row) or ("" if is_usual else "another optimizer")


@cache
def model_of(name: str) -> ModelSpec:
    """Read a model's configuration."""
    (file,) = FOLDER.parent.glob(f"*-lora/models/{name}/config.json")
    return read_model(file)


def strategy_of(row: Row) -> Strategies:
    """Return a run's settings as a column."""
    wide = 4.0 if row["weight_dtype"] == "float32" else 2.0
    ranks = float(row.get("ranks", "1"))
    tune = None
    if row["method"] != "full":
        tune = Adapters(
            method="qlora" if row["method"] == "qlora" else "lora",
            rank=int(row["rank"]),
            targets=TARGETS[row["targets"]],
            dtype="bf16" if row["adapter_dtype"] == "bfloat16" else "fp32",
        )
    columns = tune_columns(tune, model_of(row["model"]), Stack.TRANSFORMERS)
    columns |= {"gradient_bytes": wide} if tune is None else {}
    columns |= {"unquantised_bytes": 4.0} if row["kbit_prepare"] == "1" else {}
    return Strategies(
        sequence=float(row["sequence"]),
        micro_batch=float(row["batch"]),
        num_microbatches=1.0,
        data=ranks,
        zero_stage=3.0 if ranks > 1.0 else 0.0,
        weight_bytes=wide,
        recompute_full=float(row["checkpointing"]),
        autocast=float(row["autocast"]),
        **columns,
    )


def stages_of(model: ModelSpec) -> Stages:
    """Return the only stage of a model."""
    one, moe = np.ones((1, 1)), float(model.num_moe_layers)
    return Stages(
        dense_SC=one * (model.num_layers - moe),
        moe_SC=one * moe,
        embedding_SC=one,
        head_SC=one,
        mtp_SC=0.0 * one,
    )


def memory_of(row: Row) -> MemoryPrice:
    """Predict a run's memory."""
    model = model_of(row["model"])
    return price_memory(
        shape_of_model(model, mtp_layers=0),
        strategy_of(row),
        HARDWARE,
        stages_of(model),
        constants=_memory_constants(row),
    )


def _memory_constants(row: Row) -> MemoryConstants:
    known = constants_of_family(Software.TRANSFORMERS, "transformers")
    wide = 8.0 if row["weight_dtype"] == "float32" else None
    moments = MOMENTS[row["optimizer_states"]] or wide
    return known if moments is None else replace(known, moments_bytes=moments)


def seconds_of(
    row: Row,
    device: Datasheet = DEVICE,
    *,
    curves: Mapping[Series, Curve] | None = None,
    lookups: Lookups | None = None,
) -> float:
    """Predict a run's step by the generic constants; by the curves of a profile, where given.

    What is looked up is noted in `lookups`.
    """
    model = model_of(row["model"])
    regime = Regime(
        device=device.name,
        generation=device.generation,
        precision=GemmPrecision.BF16,
        software=Software.TRANSFORMERS,
        family="transformers",
        model_kind=kind_of_model(has_experts=model.moe is not None),
    )
    hardware = device_hardware(device, GemmPrecision.BF16)
    constants = single(constants_of([regime], None))
    prices: Prices = DatasheetPrices(hardware=hardware, constants=constants)
    if curves is not None:
        prices = MeasuredPrices(curves=curves, fallback=prices)
        hardware = with_measured_links(hardware, constants, curves)
    price = price_step(
        shape_of_model(model, mtp_layers=0),
        strategy_of(row),
        hardware,
        constants,
        stages_of(model),
        prices=prices if lookups is None else NotedPrices(source=prices, lookups=lookups),
    )
    return number(price.step_s)


def judge(row: Row) -> Judged:
    """Compare one timed run."""
    memory = memory_of(row)
    static = number(memory.weights_PC) + number(memory.optimizer_PC) + WORKSPACES
    return Judged(
        name=name_of(row),
        is_dense=model_of(row["model"]).moe is None,
        static=static / float(row["static_bytes"]) - 1.0,
        peak=number(memory.allocated_PC) / float(row["peak_bytes"]) - 1.0,
        seconds=seconds_of(row) / float(row["step_s"]) - 1.0,
        skipped=why_skipped(row),
        untimed=why_untimed(row),
    )


def is_right(row: Row) -> bool:
    """Whether a run under a limit is predicted to end as it did."""
    fits = number(memory_of(row).reserved_PC) <= float(row["limit_bytes"])
    return fits == (row["outcome"] == "ok")


def held_out_errors(judged: Sequence[Judged], *, fit_on_dense: bool) -> tuple[float, list[float]]:
    """Return the factor fitted to one kind of model, and the errors on the other."""
    timed = [one for one in judged if not one.untimed]
    seen = [one.seconds + 1.0 for one in timed if one.is_dense is fit_on_dense]
    factor = 1.0 / float(np.median(seen))
    others = [one.seconds + 1.0 for one in timed if one.is_dense is not fit_on_dense]
    return factor, [abs(factor * ratio - 1.0) for ratio in others]


def lines(judged: Sequence[Judged], wrong: Sequence[Row], *, runs: int) -> tuple[list[str], bool]:
    """Return the table, and whether a bound is missed."""
    described = [one for one in judged if not one.skipped]
    found = {
        "static": [abs(one.static) for one in described],
        "peak": [abs(one.peak) for one in described],
    }
    for is_dense, kinds in ((True, "dense, on experts"), (False, "experts, on dense")):
        factor, errors = held_out_errors(judged, fit_on_dense=is_dense)
        found[f"seconds, factor {factor:.3f} of {kinds}"] = errors
    table = [f"predicted wrongly under {row['limit_bytes']} bytes: {name_of(row)}" for row in wrong]
    missed = False
    for what, errors in found.items():
        bound = BOUNDS[what.split(",")[0]]
        missed = missed or bool(np.median(errors) > bound)
        table.append(errors_line(what, errors, bound))
    share = 1.0 - len(wrong) / runs
    least = BOUNDS["fits"]
    table.append(f"{'fit or not':44} {runs:3} runs  right {share:.1%}  (at least {least:.0%})")
    return table, missed or share < least


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return whether a bound is missed."""
    options = parse(__doc__, {"--rows": False}, arguments)
    rows = read_runs()
    judged = [judge(row) for row in rows if row["kind"] == "trial"]
    limited = [row for row in rows if row["kind"] == "fit"]
    wrong = [row for row in limited if not is_right(row)]
    table, missed = lines(judged, wrong, runs=len(limited))
    of_rows = [
        f"{one.name:62} {one.static:+8.1%} {one.peak:+8.1%} {one.seconds:+8.1%}"
        f"  {one.skipped or one.untimed}".rstrip()
        for one in judged
    ]
    say(*(of_rows if options.rows else []), *table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
