"""Which published measurements apply to a launch target: family, generation and release.

Residuals are stored under the software that was measured (tuner/costs/train/calibration.py). A
target without published runs takes those of its nearest relative: Megatron-LM's layers are those
that NeMo's containers run, the reference step is plain PyTorch under FSDP. On a device that the
relative never ran on, only what holds for the device's generation applies.

The errors of a relative say nothing about a target that runs other layers: DeepSpeed and the
reference step get the band of their device's generation, for which whole families were held out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tuner.costs.train.calibration import Regime, Residuals, band_of
from tuner.costs.train.columns_of import PRECISION_OF
from tuner.costs.train.constants import Software, software_of_container
from tuner.devices.datasheet import Datasheet
from tuner.engines.capabilities import programs
from tuner.engines.registry import train_targets

CONTAINER: Final = "nemo"
"""The family whose releases are NeMo's containers."""


class Relative(NamedTuple):
    """Where a target's residuals come from."""

    family: str
    software: Software
    runs_same_layers: bool = True
    """Its published runs are of the target's layers, so that their band holds for the target."""


OF_TARGET: Final[Mapping[str, Relative]] = {
    target.name: Relative(target.family, Software(target.software), target.runs_same_layers)
    for _, target in train_targets()
}


def regime_of(
    targets: Sequence[str], sheet: Datasheet, *, precision: str, release: str = ""
) -> Regime:
    """Return the regime of the first program among the targets; no release stands for all."""
    relative = OF_TARGET[programs(targets)[0]]
    return regime_as(relative, sheet, precision=precision, release=release)


def band_for(
    targets: Sequence[str],
    sheet: Datasheet,
    residuals: Residuals | None,
    *,
    precision: str,
    release: str = "",
) -> tuple[float, float]:
    """Return measured over predicted seconds of the first program, lowest and highest.

    The release is one that is known to run. Where it is only assumed to be the newest, the band is
    that of any.
    """
    relative = OF_TARGET[programs(targets)[0]]
    regime = regime_as(relative, sheet, precision=precision, release=release)
    return band_as(relative, regime, residuals)


def band_as(relative: Relative, regime: Regime, residuals: Residuals | None) -> tuple[float, float]:
    """Return the band of a regime for a target of this relative."""
    return band_of(regime if relative.runs_same_layers else replace(regime, family=""), residuals)


def regime_as(relative: Relative, sheet: Datasheet, *, precision: str, release: str = "") -> Regime:
    """Return the regime of a relative on a device."""
    is_container = relative.family == CONTAINER and bool(release)
    return Regime(
        device=sheet.name,
        generation=sheet.generation,
        precision=PRECISION_OF[precision],
        software=software_of_container(release) if is_container else relative.software,
        family=relative.family,
        release=release,
    )
