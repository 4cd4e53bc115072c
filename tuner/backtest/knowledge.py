"""Finds which residuals a prediction rests on: those that ship, those of profiles, or none."""

from collections.abc import Sequence
from pathlib import Path

from profilers.store import holds_profile, read_header
from tuner.backtest.prediction import Knowledge
from tuner.costs.analytic.calibration import Residuals, read_residuals, shipped
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError, UnknownDeviceError


def knowledge_of(profiles: Sequence[Path], *, uncalibrated: bool) -> Knowledge:
    """Read the residuals of profiles: for their device, or, of bare residuals, for all.

    Raises:
        SpecError: residuals were asked for and dropped at once, or cannot be read.
    """
    if uncalibrated and profiles:
        raise SpecError("--uncalibrated drops the residuals that --profile names; give one of them")
    usual = None if uncalibrated else shipped()
    of_device: dict[str, Residuals] = {}
    for path in profiles:
        residuals = read_residuals(path)
        if path.is_dir() and holds_profile(path):
            of_device[device_of(path)] = residuals
        else:
            usual = residuals
    return Knowledge(usual=usual, of_device=of_device)


def device_of(profile: Path) -> str:
    """Return the datasheet that a profile's device has.

    Raises:
        SpecError: its device has none.
    """
    name = read_header(profile).machine.device
    try:
        return find_device(name).name
    except UnknownDeviceError as error:
        raise SpecError(f"{str(profile)!r}: {error}") from error
