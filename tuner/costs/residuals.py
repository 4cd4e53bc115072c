"""Residuals of the model on an engine and device: two factors and an error band.

A residual multiplies the predicted computation and the predicted communication, each by one factor
for all sizes and layouts; nothing is fitted per configuration. The band is the relative error that
held nine of ten predictions of unseen configurations.

The factors that ship are in `SHIPPED`, each with the runs it comes from; their band comes from
leave-one-out predictions (tests/tuner/test_stored_runs.py). An engine and device without
comparisons, or without any on several nodes, gets factors of 1 and a wide band, and says so.
"""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from tuner.costs.reference.layer_time import PartSeconds
from tuner.costs.reference.operations import COMMUNICATION

Factor = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class Residual(Record):
    """Correction of one engine release on one kind of device."""

    engine: str
    release: str
    device_kind: Literal["cpu", "cuda"]
    computation: Factor = 1.0
    communication: Factor = 1.0
    band_ratio: Annotated[float, Field(gt=0.0, le=10.0)]
    """Nine of ten predictions lie within measured * (1 +- band_ratio)."""
    origin: str
    """Runs that the factors and the band come from."""
    num_runs: Annotated[int, Field(ge=0)]

    def factor(self, part: str) -> float:
        """Return the factor on the predicted seconds of a part."""
        return self.communication if part in COMMUNICATION else self.computation

    def applied(self, seconds: PartSeconds) -> PartSeconds:
        """Correct every part."""
        return {part: value * self.factor(part) for part, value in seconds.items()}


UNKNOWN_BAND: Final = 0.5
"""Error band where no run was ever compared."""

SHIPPED: Final[Mapping[tuple[str, str], Residual]] = {
    ("reference", "AMD EPYC"): Residual(
        engine="reference",
        release="2.13.0+cpu",
        device_kind="cpu",
        computation=1.02,
        communication=1.19,
        band_ratio=0.16,
        origin="24 trials of two gloo ranks on 2 cores, examples/profiles/epyc-quickstart-1 to -3",
        num_runs=24,
    ),
}
"""Residuals by engine and device; each names the release that it was compared on."""


def residual_for(
    engine: str, *, device: str, device_kind: Literal["cpu", "cuda"], nodes: int = 1
) -> Residual:
    """Look up the shipped residual; factors of 1 and a wide band when there is none.

    The runs behind the shipped ones used one node, so they do not apply to several.
    """
    known = SHIPPED.get((engine, device))
    if known is not None and nodes == 1:
        return known
    return Residual(
        engine=engine,
        release="",
        device_kind=device_kind,
        band_ratio=UNKNOWN_BAND,
        origin="no run of this engine on this device was compared yet"
        if known is None
        else "no run of this engine on several nodes of this device was compared yet",
        num_runs=0,
    )
