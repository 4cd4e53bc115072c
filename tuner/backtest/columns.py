"""Turns published rows into columns of models, strategies and hardware, with their assumptions.

What a row leaves blank is chosen by one rule each (tuner/backtest/strategy.py), and named in
`PublishedRun.assumed`; unknown recomputation is none here, and chosen in
tuner/backtest/assumptions.py.

A row without a usable time or setup becomes no column and keeps its reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tuner.backtest.adapters import adapter_columns
from tuner.backtest.architecture import parse_shape
from tuner.backtest.engines import (
    engine_software,
    find_memory_family,
    identify_engine,
    parse_precision,
    states_memory,
)
from tuner.backtest.measured import measured_step_s
from tuner.backtest.rows import Row
from tuner.backtest.stages import stack_stages, stage_columns
from tuner.backtest.strategy import build_strategy
from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware, ModelShape, Stages, stacked, taken
from tuner.costs.train.columns_of import matmul_peak, matmul_share
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import UnknownDeviceError
from tuner.prices.train.constants import GemmPrecision, Software

_GBIT_BYTES: Final = 1e9 / 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedRun:
    """One row that can be predicted."""

    row: Row
    device: Datasheet
    precision: GemmPrecision
    software: Software
    family: str
    """Name of the software in the residuals."""
    memory_family: str
    """Name of the software in the memory constants."""
    release: str
    """Version of the software, empty where unknown."""
    shape: ModelShape
    strategy: Strategies
    hardware: Hardware
    counts: tuple[int, ...]
    """Layers per stage."""
    measured_s: float | None
    """Seconds of one step; None where the run ran out of memory."""
    peak_bytes: float | None
    assumed: tuple[str, ...]
    """Blank columns that a rule filled."""
    knows_recompute: bool
    reports_reserved: bool
    """The stated peak is what the allocator reserved, not what tensors took."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunColumns:
    """Runs as columns; C runs."""

    runs: tuple[PublishedRun, ...]
    shape: ModelShape
    strategy: Strategies
    hardware: Hardware
    stages: Stages
    measured_s_C: npt.NDArray[np.float64]
    """NaN where the run ran out of memory."""

    def taken(self, chosen: npt.NDArray[np.intp]) -> "RunColumns":
        """Keep or repeat the chosen columns."""
        grids: dict[str, Any] = {}
        for field in fields(Stages):
            grid_SC = getattr(self.stages, field.name)
            grids[field.name] = None if grid_SC is None else grid_SC[:, chosen]
        return RunColumns(
            runs=tuple(self.runs[int(column)] for column in chosen),
            shape=taken(self.shape, chosen),
            strategy=taken(self.strategy, chosen),
            hardware=taken(self.hardware, chosen),
            stages=Stages(**grids),
            measured_s_C=self.measured_s_C[chosen],
        )


def stack_runs(runs: Sequence[PublishedRun]) -> RunColumns:
    """Stack runs into columns.

    Raises:
        ValueError: there are none.
    """
    if not runs:
        raise ValueError("no run to stack")
    return RunColumns(
        runs=tuple(runs),
        shape=stacked([run.shape for run in runs]),
        strategy=stacked([run.strategy for run in runs]),
        hardware=stacked([run.hardware for run in runs]),
        stages=stack_stages([stage_columns(run.shape, run.counts) for run in runs]),
        measured_s_C=np.array([np.nan if r.measured_s is None else r.measured_s for r in runs]),
    )


def build_runs(rows: Sequence[Row]) -> tuple[tuple[PublishedRun, ...], dict[int, str]]:
    """Return the runs that can be predicted, and by row number why the others cannot."""
    runs: list[PublishedRun] = []
    reasons: dict[int, str] = {}
    for row in rows:
        try:
            runs.append(build_run(row))
        except ValueError as error:
            reasons[row.number] = str(error)
    return tuple(runs), reasons


def build_run(row: Row) -> PublishedRun:
    """Build the run of one row.

    Raises:
        ValueError: it has no usable time or setup; the message is the reason.
    """
    if row.reason:
        raise ValueError(row.reason)
    shape = parse_shape(row)
    device = _device_of(row)
    engine, release = identify_engine(row)
    precision = parse_precision(row)
    strategy, counts, assumed = build_strategy(row, shape, device, engine)
    tokens = float(
        strategy.micro_batch * strategy.num_microbatches * strategy.data * strategy.sequence
    )
    # A run that did not fit has no time to compare; all others need one.
    is_timed = not row.has_run_out_of_memory
    peak = row.numbers.get("peak_mem_gib")
    knows_recompute = "recompute" not in assumed
    if not states_memory(engine, release):
        assumed += ("release",)
    return PublishedRun(
        row=row,
        device=device,
        precision=precision,
        software=engine_software(engine, release, row),
        family=engine.family,
        memory_family=find_memory_family(engine, release, row),
        release=release,
        shape=shape,
        strategy=replace(
            strategy,
            linear_bytes=float(engine.keeps_quantized and precision is not GemmPrecision.BF16),
            **adapter_columns(row, shape),
        ),
        hardware=replace(
            device_hardware(device, precision),
            matmul_flop_per_s=_mixed_peak(
                device, precision, bf16_share=row.number_or("bf16_share", 0.0)
            ),
            scale_out_bytes_per_s=_scale_out_bandwidth(row, device),
        ),
        counts=counts,
        measured_s=measured_step_s(
            row,
            shape=shape,
            sequence=float(strategy.sequence),
            tokens_per_device=tokens / float(strategy.world),
            device=device,
            is_causal=not engine.counts_full_square,
        )
        if is_timed
        else None,
        peak_bytes=None if peak is None else peak * 2.0**30,
        assumed=assumed,
        knows_recompute=knows_recompute,
        reports_reserved=engine.reports_reserved,
    )


def _device_of(row: Row) -> Datasheet:
    name = row.text("gpu")
    if not name:
        raise ValueError("gpu is missing")
    try:
        return find_device(name)
    except UnknownDeviceError as error:
        raise ValueError(str(error).split(";")[0]) from error


def device_hardware(device: Datasheet, precision: GemmPrecision) -> Hardware:
    """Return a device as numbers, with the peak that the linear layers run at."""
    return Hardware(
        matmul_flop_per_s=matmul_peak(device, precision),
        attention_flop_per_s=device.flop_per_s["bf16"],
        gemm_share=matmul_share(device, precision),
        bf16_share=matmul_share(device, GemmPrecision.BF16),
        exponential_ratio=device.exponential_ratio,
        matrix_ratio=device.matrix_ratio,
        compute_units=float(device.compute_units),
        memory_bytes=float(device.memory_bytes),
        memory_bytes_per_s=device.memory_bytes_per_s,
        scale_up_bytes_per_s=device.scale_up_bytes_per_s,
        domain=float(device.scale_up_domain),
        devices_per_node=float(device.devices_per_node),
        scale_out_bytes_per_s=device.scale_out_bytes_per_s,
        host_bytes_per_s=device.host_bytes_per_s,
        is_processor=float(device.generation is Generation.PROCESSOR),
    )


def _mixed_peak(device: Datasheet, precision: GemmPrecision, *, bf16_share: float) -> float:
    """Return the mean peak of linear layers, a share of which stays in bf16.

    Raises:
        ValueError: the share is above 1.
    """
    if bf16_share > 1.0:
        raise ValueError(f"bf16_share {bf16_share:g} is not a share of 0 to 1")
    narrow, wide = matmul_peak(device, precision), device.flop_per_s["bf16"]
    if not bf16_share:
        return narrow
    return 1.0 / ((1.0 - bf16_share) / narrow + bf16_share / wide)


def _scale_out_bandwidth(row: Row, device: Datasheet) -> float:
    """Return the network bandwidth of one device, in bytes per second and direction."""
    if "node_gbit_per_s" not in row.numbers:
        return device.scale_out_bytes_per_s
    return row.numbers["node_gbit_per_s"] * _GBIT_BYTES / device.devices_per_node
