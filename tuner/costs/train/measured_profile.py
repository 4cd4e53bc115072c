"""A stored profile of accelerators, for the analytic model.

Measurements replace the formulas: kernels (tuner/prices/measured.py), collectives
(measured_links.py), memory. The datasheet is that of the pool's device, else of the device that the
profile names. Profiles of `moetune profile` and imported ones are read the same way; tables that
only inference uses are skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.interpolation import Curve, fit_rows
from profilers.records import Profile, Source
from profilers.series import Series
from profilers.store import read_profile
from tuner.config.shapes import Hardware
from tuner.costs.train.calibration import Residuals, read_residuals
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Datasheet
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.measured import MeasuredPrices
from tuner.prices.train.constants import Constants
from tuner.prices.train.measured_links import with_measured_links
from tuner.spec.cluster import Pool

READ_OPERATIONS: Final = frozenset(
    {
        "gemm",
        "grouped_gemm",
        "attention",
        "linear_scan",
        "memory_bound",
        "collective",
        "expert_all_to_all",
        "storage",
        "host_memory",
        "checkpoint_load",
    }
)
"""Tables that the analytic model reads."""

DTYPE_OF: Final[Mapping[str, str]] = {
    "bf16": "bf16",
    "fp32": "fp32",
    "fp8-delayed": "fp8",
    "fp8-tensorwise": "fp8",
    "fp8-blockwise": "fp8_block",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}
"""The GEMM dtype of a profile for each precision of tuner/spec/goal.py."""

RESIDUALS_NAME: Final = "residuals.json"
"""File of residuals beside the tables of a profile that `moetune calibrate` has fitted to runs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredProfile:
    """A profile and the curves through it."""

    path: Path
    profile: Profile
    curves: Mapping[Series, Curve]
    own_residuals: Residuals | None
    """Fitted to runs on this machine; None: those of its kind."""

    @property
    def memory_bytes(self) -> float | None:
        """Return the bytes of memory of one device; None where the profile does not say."""
        return float(self.profile.header.machine.memory_bytes_per_device) or None

    @property
    def source(self) -> str:
        """`measured`, `imported` or both."""
        sources = sorted({row.source.value for row in self.profile.measurements})
        return "+".join(sources) or Source.DATASHEET.value

    def sheet(self, pool: Pool) -> Datasheet:
        """Return the description of the device, for what was not measured.

        Raises:
            UnknownDeviceError: neither the pool nor the profile names a described device.
        """
        if pool.device is not None:
            return pool.sheet
        return find_device(self.profile.header.machine.device)

    def prices(self, hardware: Hardware, constants: Constants, *, precision: str) -> MeasuredPrices:
        """Return measured prices with the datasheet as fallback; all arguments of one column."""
        return MeasuredPrices(
            curves=self.curves,
            fallback=DatasheetPrices(hardware=hardware, constants=constants),
            dtype=DTYPE_OF[precision],
        )

    def linked(self, hardware: Hardware, constants: Constants) -> Hardware:
        """Return the machine with its measured collectives."""
        return with_measured_links(
            hardware, constants, self.curves, self.profile.rows("expert_all_to_all")
        )


def read_measured(path: Path, *, calibrated: bool = True) -> MeasuredProfile:
    """Read a stored profile and, unless not `calibrated`, what was fitted to runs beside it.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
        SpecError: its residuals are damaged.
    """
    profile = read_profile(path, operations=READ_OPERATIONS)
    has_own = calibrated and (path / RESIDUALS_NAME).is_file()
    return MeasuredProfile(
        path=path,
        profile=profile,
        curves=fit_rows(profile.measurements),
        own_residuals=read_residuals(path) if has_own else None,
    )
