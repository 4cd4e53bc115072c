"""Stores a calibration: only residuals, or a profile's files with the residuals.

`datasheets` means every device whose description ships; a profile limits the runs to its device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.files import read_bounded
from tuner.backtest.rows import Row, table_digest
from tuner.calibrate.calibration import calibrate
from tuner.calibrate.records import CalibrationReport
from tuner.calibrate.report import build_report
from tuner.devices.catalogue import find_device, profile_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.output import entries_json, write_directory, write_files
from tuner.plans.folder import MAX_PROFILE_FILE_BYTES

DATASHEETS: Final = "datasheets"
RESIDUALS: Final = "residuals.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationFiles:
    """The report and the files to write."""

    report: CalibrationReport
    files: Mapping[str, bytes]
    """Contents by name: the residuals and, for a profile, its own files."""


def select_rows(rows: Sequence[Row], *, profile: str) -> tuple[Row, ...]:
    """Return the rows of the profile's device.

    Raises:
        SpecError: there are none.
    """
    if profile == DATASHEETS:
        return tuple(rows)
    device = profile_device(Path(profile))
    selected = tuple(row for row in rows if _device_name(row) == device)
    if not selected:
        raise SpecError(f"no row was measured on {device}, the device of {profile!r}")
    return selected


def calibration_files(profile: str, rows: Sequence[Row], *, runs: Path) -> CalibrationFiles:
    """Fit the rows and return what to write.

    Raises:
        SpecError: too few rows can be fitted.
    """
    digest = table_digest(runs)
    sources = ", ".join(sorted({row.source for row in rows}))
    made = calibrate(rows, origin=f"fitted to {runs.name}: {sources}", data_sha256=digest)
    report = build_report(made, num_rows=len(rows))
    text = entries_json(report.residuals.model_dump(mode="json"))
    files = {} if profile == DATASHEETS else profile_files(Path(profile))
    return CalibrationFiles(report=report, files={**files, RESIDUALS: text.encode()})


def write_calibration(out: Path, made: CalibrationFiles) -> None:
    """Write a file of residuals, or a folder.

    Raises:
        SpecError: a profile cannot go into one file.
        OutputError: the place cannot be written to.
    """
    if out.suffix != ".json":
        write_directory(out, made.files)
        return
    if len(made.files) > 1:
        raise SpecError(f"{str(out)!r} is a file, and a calibrated profile is a folder; name one")
    write_files(out.parent, {out.name: made.files[RESIDUALS]}, option="-o")


def profile_files(profile: Path) -> dict[str, bytes]:
    """Return the files of a stored profile by name."""
    return {
        path.name: read_bounded(path, most_bytes=MAX_PROFILE_FILE_BYTES)
        for path in sorted(profile.iterdir())
        if path.suffix in (".json", ".parquet") and path.is_file()
    }


def _device_name(row: Row) -> str:
    try:
        return find_device(row.text("gpu")).name
    except UnknownDeviceError:
        return ""
