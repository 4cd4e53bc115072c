"""`corrections.json`: what the logs of a running server say of an engine on a device."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from tuner.costs.serve.engine_steps import read_beside
from tuner.costs.serve.residual import ServeResidual

NAME: Final = "corrections.json"
SCHEMA_VERSION: Final = 1
# 1: first release.

Ratio = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Coefficient(Record):
    """One factor of `StepCorrections`, with its 80 % interval."""

    name: str
    factor: Ratio
    low: Ratio
    high: Ratio
    is_identified: bool
    """The logs say what it is; else it stays 1."""
    minutes_needed: Ratio | None = None
    """Minutes of this load that would identify it; None: it is, or no length of this load would."""
    wanted_load: str = ""
    """Load that would identify it sooner; empty where it is."""


class HeldOut(Record):
    """Predicted over measured seconds of the last third of the logs, median; None: none there."""

    ttft_before: Ratio | None
    """Ratio of first tokens, or of steps that read prompts, predicted without corrections."""
    ttft_after: Ratio | None
    """The same, with corrections fitted to the first two thirds."""
    tpot_before: Ratio | None
    """Ratio of further tokens, or of steps without prompts, likewise."""
    tpot_after: Ratio | None


class ServerCalibration(Record):
    """Corrections of an engine on a device, and what they rest on."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    kernels: str
    """Source of the prices that the factors are over: `profile`, `tables` or `datasheet`."""
    steps: Annotated[int, Field(ge=0)]
    """Steps in the logs."""
    requests: Annotated[int, Field(ge=0)]
    minutes: Annotated[float, Field(ge=0.0)]
    coefficients: tuple[Coefficient, ...]
    errors: HeldOut
    residual: ServeResidual
    """The corrections as plans use them, and the bands that they leave."""
    notes: tuple[str, ...] = ()


def holds_server(profile: Path) -> bool:
    """Return whether a folder holds what a server's logs said."""
    return (profile / NAME).is_file()


def read_server_calibration(profile: Path) -> ServerCalibration | None:
    """Read what a profile's folder holds; None where no logs were learnt from.

    Raises:
        ProfileUnreadableError: it is damaged.
    """
    advice = "calibrate on the server's logs again"
    return read_beside(profile / NAME, ServerCalibration, version=SCHEMA_VERSION, advice=advice)
