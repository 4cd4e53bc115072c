"""Fitted corrections to the generic constants, and the error band of a prediction, per regime.

A regime is what kernels and hosts depend on: device, precision, software and its release. A
correction multiplies one constant by a factor wherever its `where` matches; several may match (a
generation's and a release's), and their factors multiply. A regime without published runs gets the
corrections of its family, else of its device's generation, else the generic constants. The band
comes from the narrowest `where` that matches; `band_of` is the only place where one is chosen, for
plans, estimates and backtests alike. Models with experts and dense ones are compared apart: the
runs of one kind say nothing of how far predictions of the other are off. Without runs of a family,
generation and kind the band is that of groups that were left out, and its note says so.

The corrections that ship, `residuals.json`, were written by

    python -m tests.benchmarks.published_training PUBLISHED.csv > RUNS.csv
    moetune calibrate datasheets RUNS.csv -o tuner/costs/train/residuals.json

over published runs; each states its number of runs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError, field_validator

from profilers.errors import first_problem
from profilers.files import TooLargeError, read_bounded
from profilers.records import Record
from tuner.costs.train.ratio_bands import RatioBands
from tuner.devices.datasheet import Generation
from tuner.errors import SpecError
from tuner.prices.train.constants import (
    FITTED,
    NAMES,
    Constants,
    GemmPrecision,
    Software,
    uncalibrated,
)

SCHEMA_VERSION: Final = 1
# 1: first release.
LARGEST_BYTES: Final = 4 * 2**20
GENERIC_BAND: Final = (0.45, 1.6)
"""Measured over predicted seconds where nothing was ever compared: on published runs the generic
constants are off by up to this much on the newest devices."""

ModelKind = Literal["dense", "experts"]

Factor = Annotated[float, Field(gt=0.0, lt=1e6, allow_inf_nan=False)]
Factors = npt.NDArray[np.float64]


def kind_of_model(*, has_experts: bool) -> ModelKind:
    """Name the kind of a model that bands distinguish."""
    return "experts" if has_experts else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Device, precision and software: all that kernels and hosts depend on."""

    device: str
    """Name of a datasheet."""
    generation: Generation
    precision: GemmPrecision
    software: Software
    family: str
    """Training software, e.g. `nemo`, `megatron-lm`, `torchtitan`; empty where no run is of it."""
    model_kind: ModelKind
    """Whether the model has experts, which decides the band and no constant."""
    release: str = ""
    """Version of the training software, empty where unknown."""

    @property
    def group(self) -> str:
        """Key of the published runs that a band needs: family, generation and kind of model."""
        return f"{self.family}|{self.generation}|{self.model_kind}"

    def __str__(self) -> str:
        """Name it on one line."""
        named = f"{self.family} {self.release}".strip()
        return f"{self.device} {self.precision} {named}"


class Where(Record):
    """The regimes that an entry applies to; an empty field matches any."""

    device: str = ""
    generation: str = ""
    precision: str = ""
    family: str = ""
    release: str = ""
    model_kind: str = ""

    def holds(self, regime: Regime) -> bool:
        """Return whether every named field equals the regime's."""
        return all(
            not (required := getattr(self, name)) or required == str(getattr(regime, name))
            for name in type(self).model_fields
        )

    @property
    def narrowness(self) -> int:
        """Count the fields that are named."""
        return sum(bool(getattr(self, name)) for name in type(self).model_fields)


class Correction(Record):
    """Factors on constants, wherever `where` matches."""

    where: Where
    factors: dict[str, Factor]
    """Factors by name of the constant."""

    @field_validator("factors")
    @classmethod
    def _known(cls, value: dict[str, float]) -> dict[str, float]:
        unknown = sorted(set(value) - set(FITTED))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no constant; known: {', '.join(FITTED)}")
        return value


class Band(Record):
    """Measured over predicted seconds: where runs that were held out fell."""

    where: Where
    low: Factor
    high: Factor
    groups: int
    """Recipes that were held out in turn."""
    rows: int


class Residuals(Record):
    """Fitted corrections and error bands, with the runs that they come from."""

    schema_version: int = SCHEMA_VERSION
    origin: str
    """Source of the runs."""
    data_sha256: str
    """SHA-256 of the table of runs."""
    rows: int
    groups: int
    stated_ratio: Annotated[float, Field(gt=0.0, lt=1.0)]
    """Share of unseen runs that a band is meant to hold."""
    covered_ratio: float | None
    """Share of groups, held out together with the making of the bands, that they did hold."""
    corrections: tuple[Correction, ...]
    bands: tuple[Band, ...]
    ratios: RatioBands | None = None
    """Bands of the ratio of two configurations' times; None: too few pairs, or an older file."""
    releases: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Releases that runs carry, by family, oldest first."""
    recipes: dict[str, int] = Field(default_factory=dict)
    """Number of recipes by `Regime.group`."""

    @field_validator("schema_version")
    @classmethod
    def _known_version(cls, value: Any) -> Any:
        if value != SCHEMA_VERSION:
            raise ValueError(f"schema_version {value} is not {SCHEMA_VERSION}")
        return value


def constants_of(regimes: Sequence[Regime], residuals: Residuals | None) -> Constants:
    """Return the constants of each regime, as columns; None leaves the generic ones."""
    values_KC = generic_values(regimes)
    for correction in residuals.corrections if residuals is not None else ():
        holds_C = np.array([correction.where.holds(regime) for regime in regimes])
        for name, factor in correction.factors.items():
            values_KC[NAMES.index(name), holds_C] *= factor
    return as_constants(values_KC)


def generic_values(regimes: Sequence[Regime]) -> Factors:
    """Return the generic constants of each regime, [K, C] in the order of `NAMES`."""
    of_kind = {
        kind: uncalibrated(kind[0], precision=kind[1], software=kind[2])
        for kind in {(regime.generation, regime.precision, regime.software) for regime in regimes}
    }
    chosen = [of_kind[regime.generation, regime.precision, regime.software] for regime in regimes]
    return np.array([[float(getattr(constants, name)) for constants in chosen] for name in NAMES])


def as_constants(values_KC: Factors) -> Constants:
    """Turn rows in the order of `NAMES` into columns of constants, held inside their bounds."""
    bounded = {
        name: np.clip(values_KC[index], FITTED[name].low, FITTED[name].high)
        if name in FITTED
        else values_KC[index]
        for index, name in enumerate(NAMES)
    }
    return Constants(**bounded)


class StepBand(NamedTuple):
    """Measured over predicted seconds of a step, and why the band is as wide as it is."""

    edges: tuple[float, float]
    """Lowest and highest that a prediction allows for."""
    note: str
    """Published runs that it lacks, in a line; empty where they are published or none is fitted."""


def band_of(regime: Regime, residuals: Residuals | None) -> StepBand:
    """Return the band of a regime's steps."""
    if residuals is None:
        return StepBand(GENERIC_BAND, "")
    if regime.precision is GemmPrecision.FP32:
        return StepBand(GENERIC_BAND, "no published run computes in fp32: the error band is wide")
    edges = narrowest_band(regime, residuals.bands)
    return StepBand(edges, _widening_note(regime, residuals))


def narrowest_band(regime: Regime, bands: Sequence[Band]) -> tuple[float, float]:
    """Return the band with the narrowest matching `where`; of two, the first."""
    narrowest = _narrowest(regime, bands)
    return GENERIC_BAND if narrowest is None else (narrowest.low, narrowest.high)


def _narrowest(regime: Regime, bands: Sequence[Band]) -> Band | None:
    holding = [band for band in bands if band.where.holds(regime)]
    return max(holding, key=lambda band: band.where.narrowness, default=None)


def _widening_note(regime: Regime, residuals: Residuals) -> str:
    """Say which runs a regime's band lacks; empty where they are published or nothing is fitted."""
    if not residuals.recipes:
        return ""
    chosen = _narrowest(regime, residuals.bands)
    if chosen is not None and chosen.where.family and chosen.where.generation:
        return ""
    count = residuals.recipes.get(regime.group, 0)
    model = "a model with experts" if regime.model_kind == "experts" else "a dense model"
    where = f"{regime.family or 'this software'} on {regime.generation}"
    runs = f"only {count} published recipes of" if count else "no published run of"
    return (
        f"{runs} {where} {'train' if count else 'trains'} {model}: the error band is widened by"
        " what leaving out such groups of runs costs"
    )


@cache
def shipped() -> Residuals | None:
    """Return the residuals that come with the program, None where it has none."""
    place = files("tuner.costs.train") / "residuals.json"
    if not place.is_file():
        return None
    return Residuals.model_validate(json.loads(place.read_text(encoding="utf-8")))


def read_residuals(path: Path) -> Residuals:
    """Read what `moetune calibrate` wrote: the file, or the folder that holds it.

    Raises:
        SpecError: there is none, or it cannot be used.
    """
    place = path / "residuals.json" if path.is_dir() else path
    try:
        data = read_bounded(place, most_bytes=LARGEST_BYTES)
    except TooLargeError as error:
        raise SpecError(
            f"{str(place)!r} is larger than residuals can be; run 'moetune calibrate'"
        ) from error
    except OSError as error:
        raise SpecError(f"cannot read {str(place)!r}: {error.strerror}") from error
    try:
        read: Mapping[str, object] = json.loads(data)
        return Residuals.model_validate(read)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{str(place)!r}: {_problem(error)}; run 'moetune calibrate'") from error


def _problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "not JSON"
    return first_problem(error)
