"""Published measurements that apply to a launch target: by family, generation and release.

Residuals are stored under the software that was measured (tuner/costs/train/calibration.py). A
target without published runs takes those of its nearest relative: Megatron-LM's layers are those
that NeMo's containers run, the reference step is plain PyTorch under FSDP. On a device that the
relative never ran on, only what holds for the device's generation applies.

The errors of a relative say nothing about a target that runs other layers: DeepSpeed and the
reference step get the band of their device's generation, for which whole families were held out.
A plan and an estimate take a step's band from `step_band` alone, and print its note.

Published runs carry the release of their software (tuner/costs/train/residuals.json lists them),
and the same recipe has moved by up to 1.8 times between two. `goal.engine` names the release that
will run. Without it the newest one that the launch target covers is priced, and the note says so.
The error band follows: with a stated release that of its own runs where there are enough, without
one that of releases that nothing was fitted to. Megatron-LM's targets are versioned by
megatron-core, which no published row carries: they are priced over all containers unless the goal
names the container that they run in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from tuner.catalog.capabilities import programs
from tuner.catalog.registry import train_targets
from tuner.costs.train.calibration import (
    Regime,
    Residuals,
    StepBand,
    band_of,
    kind_of_model,
)
from tuner.costs.train.columns_of import PRECISION_OF
from tuner.devices.datasheet import Datasheet
from tuner.errors import SpecError
from tuner.prices.train.constants import Software, software_of_container, version_of
from tuner.spec.goal import TrainEngine

CONTAINER: Final = "nemo"
"""The family whose releases are NeMo's containers."""


class Relative(NamedTuple):
    """Software whose published runs a target takes its residuals from."""

    family: str
    software: Software
    runs_same_layers: bool = True
    """Whether its published runs are of the target's layers, so that their band holds for the
    target."""
    memory_family: str = ""
    """Family of its memory constants."""


OF_TARGET: Final[Mapping[str, Relative]] = {
    target.name: Relative(
        target.family,
        Software(target.software),
        target.runs_same_layers,
        target.memory_family or target.family,
    )
    for _, target in train_targets()
}


def step_band(
    targets: Sequence[str],
    sheet: Datasheet,
    residuals: Residuals | None,
    *,
    precision: str,
    has_experts: bool,
    release: str = "",
) -> StepBand:
    """Return the band of a step of the first program among the targets.

    The release is one that is known to run. Where it is only assumed to be the newest, the band is
    that of any.
    """
    regime = regime_of(
        targets, sheet, precision=precision, has_experts=has_experts, release=release
    )
    if not OF_TARGET[programs(targets)[0]].runs_same_layers:
        regime = replace(regime, family="")
    return band_of(regime, residuals)


def regime_of(
    targets: Sequence[str],
    sheet: Datasheet,
    *,
    precision: str,
    has_experts: bool,
    release: str = "",
) -> Regime:
    """Return the regime of the first program among the targets; no release stands for all."""
    relative = OF_TARGET[programs(targets)[0]]
    is_container = relative.family == CONTAINER and bool(release)
    return Regime(
        device=sheet.name,
        generation=sheet.generation,
        precision=PRECISION_OF[precision],
        software=software_of_container(release) if is_container else relative.software,
        family=relative.family,
        model_kind=kind_of_model(has_experts=has_experts),
        release=release,
    )


ANY: Final = ((), (10**6,))
SPAN: Final[Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "megatron-bridge": ((26, 6), (10**6,)),
    "megatron-bridge-26.04": ((26, 4), (26, 6)),
    "megatron-bridge-26.02": ((), (26, 4)),
    "torchtitan": ANY,
}
"""Releases that a target covers: the first, and the first that it does not. Versions of other
targets are not those that rows carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRelease:
    """The release that prices are for, and what to say of it."""

    release: str = ""
    """Release that prices are for; empty: all that are known, together."""
    stated: str = ""
    """Release that the goal names; empty: it names none."""
    note: str = ""
    """Note on the release in a line; may be empty."""


def priced_release(
    targets: Sequence[str], engine: TrainEngine | None, residuals: Residuals | None
) -> PricedRelease:
    """Return the release that the first program among the targets is priced for.

    Raises:
        SpecError: the goal names another engine, or a release that no published run carries.
    """
    target = programs(targets)[0]
    known, family = _known(target, residuals), OF_TARGET[target].family
    if engine is not None:
        _refuse(engine, target, known)
    if not known:
        notes = [] if OF_TARGET[target].runs_same_layers else [_relative_note(target)]
        if engine is not None:
            notes.append(f"goal.engine changes nothing: no release of {target} was compared")
        return PricedRelease(note="; ".join(notes))
    others = f"of {', '.join(known)}"
    if engine is not None:
        note = f"priced as {family} {engine.version}, {others}"
        return PricedRelease(release=engine.version, stated=engine.version, note=note)
    if target in SPAN:
        newest = known[-1]
        note = (
            f"priced as {family} {newest}, the newest published; set goal.engine for one {others}"
        )
        return PricedRelease(release=newest, note=note)
    note = f"calibrated on all published releases of {family}; set goal.engine for one {others}"
    return PricedRelease(note=note)


def _relative_note(target: str) -> str:
    """Name whose constants price a target without published runs."""
    family = OF_TARGET[target].family
    return f"priced with the time and memory constants of {family}: no run of {target} is published"


def _refuse(engine: TrainEngine, target: str, known: Sequence[str]) -> None:
    """Refuse an engine that the target does not launch, and a release that nobody published."""
    names = _names(target)
    if engine.name not in names:
        raise SpecError(
            f"goal.engine.name: {engine.name!r} is not what {target} launches; known: "
            f"{', '.join(names)}"
        )
    usual = "the newest" if target in SPAN else "all of them together"
    if known and engine.version not in known:
        raise SpecError(
            f"goal.engine.version: {engine.version!r} is no release of {target} that published "
            f"runs carry; known: {', '.join(known)}; leave goal.engine out for {usual}"
        )


def _names(target: str) -> tuple[str, ...]:
    """Return what the software of a target may be called."""
    relative = OF_TARGET[target]
    if not relative.runs_same_layers:
        return (target,)
    same_layers = [name for name, software in OF_TARGET.items() if software.runs_same_layers]
    return (
        *(name for name in same_layers if OF_TARGET[name].family == relative.family),
        relative.family,
    )


def _known(target: str, residuals: Residuals | None) -> tuple[str, ...]:
    """Return the releases that rows of the target's software carry, oldest first."""
    relative = OF_TARGET[target]
    if residuals is None or not relative.runs_same_layers:
        return ()
    first, end = SPAN.get(target, ANY)
    known = residuals.releases.get(relative.family, ())
    return tuple(release for release in known if first <= version_of(release) < end)
