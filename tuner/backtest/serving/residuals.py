"""Factors on predicted latencies, by engine and harness, fitted to measured runs.

A factor multiplies a prediction. Where the file names no factor for a launch, the prediction stays.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from profilers.errors import first_problem
from profilers.records import Record
from tuner.backtest.rows import read_bytes
from tuner.backtest.serving.launches import PublishedLaunch
from tuner.backtest.serving.prediction import MeanLatency
from tuner.errors import SpecError

SCHEMA_VERSION = 1
# 1: first release.

Factor = Annotated[float, Field(gt=0.0, lt=100.0, allow_inf_nan=False)]


class ServingFactors(Record):
    """Measured over predicted latency of one engine under one harness."""

    tpot: Factor
    ttft: Factor
    models: Annotated[int, Field(ge=1)]
    """Models in the rows that the factors are fitted to."""
    rows: Annotated[int, Field(ge=1)]


class ServingResiduals(Record):
    """Written by `moetune calibrate` from a table of serving runs."""

    kind: str = "serving-residuals"
    schema_version: int = SCHEMA_VERSION
    origin: str
    """Name and SHA-256 of the table."""
    factors: Mapping[str, ServingFactors]
    """Factors by `engine|harness`."""


def factor_key(launch: PublishedLaunch) -> str:
    """Key of a launch's factors."""
    return f"{launch.engine}|{launch.harness}"


def scale_latency(latency: MeanLatency, *, tpot: float, ttft: float) -> MeanLatency:
    """Return the prediction with each latency times its factor."""
    return MeanLatency(
        ttft_s=latency.ttft_s * ttft, tpot_s=latency.tpot_s * tpot, estimated=latency.estimated
    )


def apply_residuals(
    latency: MeanLatency, launch: PublishedLaunch, residuals: ServingResiduals | None
) -> MeanLatency:
    """Apply a launch's factors."""
    factors = residuals.factors.get(factor_key(launch)) if residuals is not None else None
    if factors is None:
        return latency
    return scale_latency(latency, tpot=factors.tpot, ttft=factors.ttft)


def read_serving_residuals(path: Path) -> ServingResiduals:
    """Read what `moetune calibrate` wrote.

    Raises:
        SpecError: the file is absent, too large or not such residuals.
    """
    try:
        return ServingResiduals.model_validate_json(read_bytes(path))
    except ValidationError as error:
        raise SpecError(f"{str(path)!r}: {first_problem(error)}") from error
