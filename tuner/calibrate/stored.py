"""Stores a calibration: residuals alone, or a profile's files with them beside.

`datasheets` stands for every device whose description ships; a profile limits the runs to its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.files import read_bounded
from tuner.backtest.knowledge import device_of
from tuner.backtest.rows import Row, digest_of
from tuner.calibrate.calibration import calibrate
from tuner.calibrate.records import CalibrationReport
from tuner.calibrate.report import report_of
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError
from tuner.output import write_directory, write_files
from tuner.plan_folder import MAX_PROFILE_FILE_BYTES

DATASHEETS: Final = "datasheets"
RESIDUALS: Final = "residuals.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What is written and what is said."""

    report: CalibrationReport
    files: Mapping[str, bytes]
    """By name; the residuals and, of a profile, its own files."""


def selected(rows: Sequence[Row], *, profile: str) -> tuple[Row, ...]:
    """Return the rows of the profile's device.

    Raises:
        SpecError: there are none.
    """
    if profile == DATASHEETS:
        return tuple(rows)
    device = device_of(Path(profile))
    found = tuple(row for row in rows if _device_name(row) == device)
    if not found:
        raise SpecError(f"no row was measured on {device}, the device of {profile!r}")
    return found


def calibrated_files(profile: str, rows: Sequence[Row], *, runs: Path) -> Calibrated:
    """Fit the rows and return what to write.

    Raises:
        SpecError: too few rows can be fitted.
    """
    digest = digest_of(runs)
    sources = ", ".join(sorted({row.source for row in rows}))
    made = calibrate(rows, origin=f"fitted to {runs.name}: {sources}", data_sha256=digest)
    report = report_of(made, num_rows=len(rows))
    text = report.residuals.model_dump_json(indent=1) + "\n"
    files = {} if profile == DATASHEETS else _files_of(Path(profile))
    return Calibrated(report=report, files={**files, RESIDUALS: text.encode()})


def write_calibrated(out: Path, made: Calibrated) -> None:
    """Write a file of residuals alone, or a folder.

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


def _files_of(profile: Path) -> dict[str, bytes]:
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
