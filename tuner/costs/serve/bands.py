"""How far measured latencies lie from predicted ones: bands that hold four launches of five.

A band is [low, high] of measured over predicted seconds, made from published launches by
tests/benchmarks/serving_band_fit.py and stored beside this file by

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES] -o tuner/costs/serve/bands.json

What is known decides which one counts:

    the pair (model, engine) has rows    its own rows weigh most
    it has none                          from every other pair, predicted by what their rows show
    the engine has none                  as wide as those bands of all engines together
    operations without kernels           the same, predicted from datasheets alone
    mode                                 aggregated or disaggregated launches
    load                                 documented, or one of two drivers that are not: the tool's
                                         own loads and launches are stated, which is the first

Models of one network count as one, whatever they are called. Residuals of TTFT lean upwards (wait
for other prompts and warm-up lengthen it more than anything shortens it), those of TPOT do not.

Ratios of two layouts of one model, engine, system and release at equal load have bands of their
own, narrower than either latency's: most of what a prediction misses is in both.

Nothing published covers other modes. Offloaded prompts pass prefill and decode instances: the band
of disaggregated launches is the nearest. AFD has that band twice as wide in ratio on both sides,
multiplexed devices that of aggregated launches likewise. All are guesses.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Annotated, Final, Literal

from pydantic import Field

from profilers.records import Record
from tuner.costs.serve.decoder import Decoder
from tuner.spec.serving.goal import EngineName, Mode

SCHEMA_VERSION: Final = 1
# 1: first release.

NAME: Final = "bands.json"
NEW_PAIR: Final = "no calibration row shares this model and engine"
SPLIT_MODES: Final[frozenset[Mode]] = frozenset(
    {"disaggregated", "prefill_offload", "attention_expert"}
)

MEASURED_STEPS: Final = 1.4
"""Measured over predicted either way where the engine's own steps were measured on the devices:
four of five deployments of vLLM on a processor (tests/benchmarks/README.md, real engines)."""

Edge = Annotated[float, Field(gt=0.0, lt=1e6, allow_inf_nan=False)]
Edges = tuple[Edge, Edge]
Covered = Annotated[float, Field(ge=0.0, le=1.0)]
PublishedMode = Literal["aggregated", "disaggregated"]
Kernels = Literal["tables", "datasheet"]


class Load(StrEnum):
    """What is known of the requests of a launch."""

    DOCUMENTED = "documented"
    """Lengths and arrivals are stated, as are the flags of the launch."""
    POWERS = "powers"
    """A driver that is not documented, with prompts of powers of two."""
    ROUND = "round"
    """Another one, with prompts of round thousands of tokens."""


class StoredBand(Record):
    """Bands of one regime."""

    mode: PublishedMode
    kernels: Kernels
    load: Load
    engine: EngineName
    network: str = ""
    """Of the model (`Decoder.network`); empty: any without rows of this engine."""
    ttft: Edges
    tpot: Edges
    rows: Annotated[int, Field(ge=0)]
    """Of the pair, or where it is new of the engine's pairs, in this regime."""


class Coverage(Record):
    """How well the bands of new pairs hold the rows of a pair that was left out."""

    mode: PublishedMode
    kernels: Kernels
    ttft: Covered
    """Share of rows inside, every pair weighing the same."""
    tpot: Covered
    pairs: Annotated[int, Field(ge=1)]


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
    """What tests/benchmarks/serving_bands.py writes."""

    schema_version: Literal[1] = SCHEMA_VERSION
    origin: str
    data_sha256: str
    stated_ratio: float
    """Share of launches that a band is to hold."""
    held: tuple[Coverage, ...]
    bands: tuple[StoredBand, ...]
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

    @property
    def doubled(self) -> "LatencyBand":
        """Twice as wide in ratio on both sides, for what no comparison covers."""
        return LatencyBand(low_ratio=self.low_ratio**2, high_ratio=self.high_ratio**2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Of one prediction."""

    ttft: LatencyBand
    tpot: LatencyBand
    is_new: bool
    """No calibration row shares its model and engine."""


def bands_of(
    engine: str,
    *,
    mode: Mode,
    has_kernels: bool,
    decoder: Decoder | None = None,
    load: Load = Load.DOCUMENTED,
) -> Bands:
    """Return the bands of TTFT and TPOT.

    Args:
        engine: that serves.
        mode: of the deployment.
        has_kernels: every operation was priced from measured kernels.
        decoder: the model; None: one without rows.
        load: what is known of the requests.
    """
    kept: PublishedMode = "disaggregated" if mode in SPLIT_MODES else "aggregated"
    kernels: Kernels = "tables" if has_kernels else "datasheet"
    published = {one for *_, one in _by_network()}
    if engine not in published:
        return joined(
            [bands_of(one, mode=mode, has_kernels=has_kernels, load=load) for one in published]
        )
    by_network = _by_network()[kept, kernels, load, engine]
    network = "" if decoder is None else decoder.network
    stored = by_network.get(network, by_network[""])
    ttft, tpot = _band(stored.ttft), _band(stored.tpot)
    if mode in ("shared_device", "attention_expert"):
        ttft, tpot = ttft.doubled, tpot.doubled
    return Bands(ttft=ttft, tpot=tpot, is_new=not stored.network)


def bands_of_steps() -> Bands:
    """Return the bands where the engine's own steps were measured on these devices."""
    band = LatencyBand(low_ratio=1.0 / MEASURED_STEPS, high_ratio=MEASURED_STEPS)
    return Bands(ttft=band, tpot=band, is_new=False)


def joined(bands: Sequence[Bands]) -> Bands:
    """Return bands as wide as all of some together."""

    def around(edges: Iterable[LatencyBand]) -> LatencyBand:
        lows, highs = zip(*((one.low_ratio, one.high_ratio) for one in edges), strict=True)
        return LatencyBand(low_ratio=min(lows), high_ratio=max(highs))

    return Bands(
        ttft=around(one.ttft for one in bands),
        tpot=around(one.tpot for one in bands),
        is_new=any(one.is_new for one in bands),
    )


def ratio_bands() -> tuple[LatencyBand, LatencyBand]:
    """Return the bands of ratios of TTFT and TPOT between two layouts at equal load."""
    stored = shipped().ratios
    return _band(stored.ttft), _band(stored.tpot)


@cache
def shipped() -> StoredBands:
    """Return the bands that come with the program."""
    text = (files("tuner.costs.serve") / NAME).read_text(encoding="utf-8")
    return StoredBands.model_validate(json.loads(text))


@cache
def _by_network() -> Mapping[tuple[str, str, Load, str], Mapping[str, StoredBand]]:
    stored: dict[tuple[str, str, Load, str], dict[str, StoredBand]] = {}
    for band in shipped().bands:
        regime = (band.mode, band.kernels, band.load, band.engine)
        stored.setdefault(regime, {})[band.network] = band
    return stored


def _band(edges: Edges) -> LatencyBand:
    return LatencyBand(low_ratio=edges[0], high_ratio=edges[1])
