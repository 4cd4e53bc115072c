"""Selects the residuals of a prediction: the shipped ones, those of profiles, or none."""

from collections.abc import Sequence
from pathlib import Path

from profilers.store import holds_profile
from tuner.backtest.prediction import ResidualSet
from tuner.costs.train.calibration import Residuals, read_residuals, shipped
from tuner.devices.catalogue import profile_device
from tuner.errors import SpecError


def read_residual_set(profiles: Sequence[Path], *, uncalibrated: bool) -> ResidualSet:
    """Read the residuals of profiles: for their device, or, of bare residuals, for all.

    Raises:
        SpecError: residuals are both given and dropped, or cannot be read.
    """
    if uncalibrated and profiles:
        raise SpecError("--uncalibrated drops the residuals that --profile names; give one of them")
    default = None if uncalibrated else shipped()
    by_device: dict[str, Residuals] = {}
    for path in profiles:
        residuals = read_residuals(path)
        if path.is_dir() and holds_profile(path):
            by_device[profile_device(path)] = residuals
        else:
            default = residuals
    return ResidualSet(default=default, by_device=by_device)
