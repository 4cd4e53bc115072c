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
from typing import Final

from tuner.catalog.programs import Programs
from tuner.catalog.target import Target
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


def step_band(
    target: Target,
    sheet: Datasheet,
    residuals: Residuals | None,
    *,
    precision: str,
    has_experts: bool,
    release: str = "",
) -> StepBand:
    """Return the band of a step of a target.

    The release is one that is known to run. Where it is only assumed to be the newest, the band is
    that of any.
    """
    regime = regime_of(target, sheet, precision=precision, has_experts=has_experts, release=release)
    if not target.runs_same_layers:
        regime = replace(regime, family="")
    return band_of(regime, residuals)


def regime_of(
    target: Target,
    sheet: Datasheet,
    *,
    precision: str,
    has_experts: bool,
    release: str = "",
) -> Regime:
    """Return the regime of a target; no release stands for all."""
    is_container = target.family == CONTAINER and bool(release)
    return Regime(
        device=sheet.name,
        generation=sheet.generation,
        precision=PRECISION_OF[precision],
        software=software_of_container(release) if is_container else Software(target.software),
        family=target.family,
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
    programs: Programs, engine: TrainEngine | None, residuals: Residuals | None
) -> PricedRelease:
    """Return the release that the first of the programs is priced for.

    Raises:
        SpecError: the goal names another engine, or a release that no published run carries.
    """
    target = programs.first
    known, family = _known(target, residuals), target.family
    if engine is not None:
        _refuse(engine, programs, known)
    if not known:
        notes = [] if target.runs_same_layers else [_relative_note(target)]
        if engine is not None:
            notes.append(f"goal.engine changes nothing: no release of {target.name} was compared")
        return PricedRelease(note="; ".join(notes))
    others = f"of {', '.join(known)}"
    if engine is not None:
        note = f"priced as {family} {engine.version}, {others}"
        return PricedRelease(release=engine.version, stated=engine.version, note=note)
    if target.name in SPAN:
        newest = known[-1]
        note = (
            f"priced as {family} {newest}, the newest published; set goal.engine for one {others}"
        )
        return PricedRelease(release=newest, note=note)
    note = f"calibrated on all published releases of {family}; set goal.engine for one {others}"
    return PricedRelease(note=note)


def _relative_note(target: Target) -> str:
    """Name whose constants price a target without published runs."""
    return (
        f"priced with the time and memory constants of {target.family}: no run of {target.name} is"
        " published"
    )


def _refuse(engine: TrainEngine, programs: Programs, known: Sequence[str]) -> None:
    """Refuse an engine that the target does not launch, and a release that nobody published."""
    names, target = _names(programs), programs.first.name
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


def _names(programs: Programs) -> tuple[str, ...]:
    """Return what the software of the first program may be called."""
    target = programs.first
    if not target.runs_same_layers:
        return (target.name,)
    same_family = (
        name
        for name, known in programs.known.items()
        if known.runs_same_layers and known.family == target.family
    )
    return (*same_family, target.family)


def _known(target: Target, residuals: Residuals | None) -> tuple[str, ...]:
    """Return the releases that rows of the target's software carry, oldest first."""
    if residuals is None or not target.runs_same_layers:
        return ()
    first, end = SPAN.get(target.name, ANY)
    known = residuals.releases.get(target.family, ())
    return tuple(release for release in known if first <= version_of(release) < end)
