"""Error bands of predicted latencies: ranges of measured over predicted that hold 4 launches of 5.

A band is [low, high] of measured over predicted seconds, made from published launches by
tests/benchmarks/serving_band_fit.py and stored beside this file by

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES] -o tuner/costs/serve/bands.json

`bands_of` is the only place where one is chosen, for plans, estimates and backtests alike:

    the pair (model, engine) has rows    its own rows weigh most
    it has none                          from every other pair, predicted by what their rows show
    the engine has none                  as wide as those bands of all engines together
    operations without kernels           the same, predicted from datasheets alone
    mode                                 aggregated or disaggregated launches

The bands of a pair hold under whatever load its launches were measured: two of three drivers are
not documented, and no spec says which of them it is like. Models of one network count as one,
whatever they are called. Residuals of TTFT lean upwards (wait for other prompts and warm-up
lengthen it more than anything shortens it), those of TPOT do not.

A release, a generation of devices or a mode without any row moves both edges apart by a factor
each: what it took to hold four of five rows of a published one that was left out, for four of five
of them, the worst of two (conformalised quantiles: Romano, Patterson and Candes, NeurIPS 2019).
`Bands.note` says what is lacking.

Runs of a pair on other devices do not say how it does on a generation that none is of: there its
band holds those of new pairs as well. A vendor without any run costs `NEW_VENDOR` besides, since
what its kernels reach of its datasheets is known from single GEMMs at most.

Ratios of two layouts of one model, engine, system and release at equal load have bands of their
own, narrower than either latency's: most of what a prediction misses is in both.

Nothing published covers other modes: theirs are as wide as those of both published ones together.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal, get_args

from pydantic import Field

from profilers.records import Record
from tuner.costs.serve.decoder import Decoder
from tuner.devices.datasheet import Generation
from tuner.spec.serving.goal import EngineName, Mode

SCHEMA_VERSION: Final = 2
# 1: first release. 2: no load; what lacking releases, generations and modes cost.

NAME: Final = "bands.json"
NEW_PAIR: Final = "no calibration row shares this model and engine"

MEASURED_STEPS: Final = 1.4
"""Measured over predicted either way where the engine's own steps were measured on the devices:
four of five deployments of vLLM on a processor (tests/benchmarks/README.md, real engines)."""

NEW_VENDOR: Final = 1.35
"""Factor on both edges where no run is of a vendor's devices: the best over the typical GEMM of
MI325X in bf16, 831 over 616 TFLOP/s (ROCm/rocm-blogs, Understanding TAF Alongside Peak FLOPs and
MAF, 2026), between which an engine's kernels may lie."""

Edge = Annotated[float, Field(gt=0.0, lt=1e6, allow_inf_nan=False)]
Edges = tuple[Edge, Edge]
Covered = Annotated[float, Field(ge=0.0, le=1.0)]
PublishedMode = Literal["aggregated", "disaggregated"]
PUBLISHED: Final[frozenset[Mode]] = frozenset(get_args(PublishedMode))
"""Modes whose bands are made from published runs of their own."""
Kernels = Literal["tables", "datasheet"]
Lacking = Literal["release", "generation", "mode"]


class StoredBand(Record):
    """Bands of one regime."""

    mode: PublishedMode
    kernels: Kernels
    engine: EngineName
    network: str = ""
    """Network of the model (`Decoder.network`); empty: any without rows of this engine."""
    ttft: Edges
    tpot: Edges
    rows: Annotated[int, Field(ge=0)]
    """Rows of the pair (model, engine) in this regime; for a new pair, rows of all pairs of the
    engine."""
    generations: tuple[str, ...]
    """Generations of devices of these rows."""


class Coverage(Record):
    """Coverage of the rows of a pair that was left out, by the bands of new pairs."""

    mode: PublishedMode
    kernels: Kernels
    ttft: Covered
    """Share of rows inside, every pair weighing the same."""
    tpot: Covered
    pairs: Annotated[int, Field(ge=1)]


class Widening(Record):
    """Factors that move both edges of a band apart for a group of launches without any row."""

    lacking: Lacking
    kernels: Kernels
    ttft: Annotated[float, Field(ge=1.0, lt=1e6)]
    tpot: Annotated[float, Field(ge=1.0, lt=1e6)]
    groups: Annotated[int, Field(ge=1)]
    """Releases, generations or modes that were left out in turn."""


class LatencyRatioBand(Record):
    """Measured over predicted ratio of two layouts of one model and machine at equal load."""

    ttft: Edges
    tpot: Edges
    ttft_covered: Covered
    """Share of the ratios of a pair (model, engine) inside the band that was made without it."""
    tpot_covered: Covered
    pairs: Annotated[int, Field(ge=1)]
    """Pairs (model, engine)."""
    ratios: Annotated[int, Field(ge=1)]


class StoredBands(Record):
    """Content of bands.json, which tests/benchmarks/serving_bands.py writes."""

    schema_version: Literal[2] = SCHEMA_VERSION
    origin: str
    data_sha256: str
    stated_ratio: float
    """Share of launches that a band is to hold."""
    coverages: tuple[Coverage, ...]
    bands: tuple[StoredBand, ...]
    widenings: tuple[Widening, ...]
    releases: dict[str, tuple[str, ...]]
    """Releases of the rows, by engine."""
    ratios: LatencyRatioBand


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBand:
    """Measured over predicted seconds, or over a predicted ratio."""

    low_ratio: float
    high_ratio: float

    def around(self, predicted: float) -> tuple[float, float]:
        """Within which a measurement is expected, in the unit given; the prediction lies inside."""
        low, high = min(self.low_ratio, 1.0), max(self.high_ratio, 1.0)
        return low * predicted, high * predicted

    def widened(self, factor: float) -> "LatencyBand":
        """Return it with both edges moved apart."""
        return LatencyBand(low_ratio=self.low_ratio / factor, high_ratio=self.high_ratio * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Error bands of TTFT and TPOT of one prediction."""

    ttft: LatencyBand
    tpot: LatencyBand
    is_new: bool
    """Whether no calibration row shares its model and engine."""
    lacking: tuple[str, ...] = ()
    """Properties of the prediction that no calibration row has, in words: its model on this engine,
    release, generation of devices, or mode."""

    @property
    def note(self) -> str:
        """Say in a line what widens them; empty where nothing does."""
        if not self.lacking:
            return ""
        return (
            f"no published run of {', of '.join(self.lacking)}: the bands are widened by what"
            " leaving out such runs costs"
        )


def bands_of(
    engine: str,
    *,
    release: str,
    generation: str,
    mode: Mode,
    has_kernels: bool,
    decoder: Decoder | None = None,
) -> Bands:
    """Return the bands of TTFT and TPOT.

    Args:
        engine: that serves.
        release: its version.
        generation: of the devices.
        mode: of the deployment.
        has_kernels: every operation was priced from measured kernels.
        decoder: the model; None: one without rows.
    """
    kernels: Kernels = "tables" if has_kernels else "datasheet"
    published = shipped().releases
    network = decoder.network if decoder is not None and engine in published else ""
    every = get_args(PublishedMode)
    known = [
        _by_network()[published_mode, kernels, name]
        for published_mode in ((mode,) if mode in every else every)
        for name in ((engine,) if engine in published else published)
    ]
    stored = [by_network.get(network, by_network[""]) for by_network in known]
    is_new = not all(band.network for band in stored)
    lacking: dict[Lacking, str] = {}
    vendor = 1.0
    if engine in published and release not in published[engine]:
        lacking["release"] = f"{engine} {release}".strip()
    generations = {name for band in stored for name in band.generations}
    if generation not in generations:
        lacking["generation"] = f"{generation} devices"
        stored += [by_network[""] for by_network in known]
        vendors = {Generation(name).vendor for name in generations}
        vendor = 1.0 if Generation(generation).vendor in vendors else NEW_VENDOR
    if mode not in every:
        lacking["mode"] = f"mode {mode}"
    costs = {(widening.lacking, widening.kernels): widening for widening in shipped().widenings}
    factors = [costs[name, kernels] for name in lacking]
    return Bands(
        ttft=_hull([band.ttft for band in stored]).widened(
            vendor * math.prod(factor.ttft for factor in factors)
        ),
        tpot=_hull([band.tpot for band in stored]).widened(
            vendor * math.prod(factor.tpot for factor in factors)
        ),
        is_new=is_new,
        lacking=((f"this model on {engine}",) if is_new else ()) + tuple(lacking.values()),
    )


def bands_of_steps() -> Bands:
    """Return the bands where the engine's own steps were measured on these devices."""
    band = LatencyBand(low_ratio=1.0 / MEASURED_STEPS, high_ratio=MEASURED_STEPS)
    return Bands(ttft=band, tpot=band, is_new=False)


def joined(bands: Sequence[Bands]) -> Bands:
    """Return bands as wide as all of some together."""
    return Bands(
        ttft=_hull([(band.ttft.low_ratio, band.ttft.high_ratio) for band in bands]),
        tpot=_hull([(band.tpot.low_ratio, band.tpot.high_ratio) for band in bands]),
        is_new=any(band.is_new for band in bands),
        lacking=tuple(dict.fromkeys(name for band in bands for name in band.lacking)),
    )


def ratio_bands() -> tuple[LatencyBand, LatencyBand]:
    """Return the bands of ratios of TTFT and TPOT between two layouts at equal load."""
    stored = shipped().ratios
    return _hull([stored.ttft]), _hull([stored.tpot])


@cache
def shipped() -> StoredBands:
    """Return the bands that come with the program."""
    text = (files("tuner.costs.serve") / NAME).read_text(encoding="utf-8")
    return StoredBands.model_validate(json.loads(text))


@cache
def _by_network() -> Mapping[tuple[str, str, str], Mapping[str, StoredBand]]:
    stored: dict[tuple[str, str, str], dict[str, StoredBand]] = {}
    for band in shipped().bands:
        stored.setdefault((band.mode, band.kernels, band.engine), {})[band.network] = band
    return stored


def _hull(edges: Sequence[Edges]) -> LatencyBand:
    lows, highs = zip(*edges, strict=True)
    return LatencyBand(low_ratio=min(lows), high_ratio=max(highs))
