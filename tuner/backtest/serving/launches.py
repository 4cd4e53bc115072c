"""Parses a row of a table of serving measurements into its launch.

The load is a closed loop at the concurrency that `silicon_data_source` names. What a recipe sets
beyond the degrees stands in columns of its own; a blank is the engine's usual setting. The model is
the one of `examples/models` that `model_path` names.

A row that lacks a column that a prediction needs is refused, and the reason names the column; so is
one whose ranks cannot share its experts, and one whose weights no device of its system holds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

from tuner.backtest.cells import (
    Cells,
    MissingError,
    count_of,
    number_of,
    optional_of,
    text_of,
    whole_of,
)
from tuner.backtest.known_models import find_model
from tuner.costs.serve.decoder import Decoder, Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.memory import weight_bytes
from tuner.costs.serve.speculative import Drafting, DraftMethod
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.work import BYTES
from tuner.units import format_bytes

SYSTEMS: Final[Mapping[str, str]] = {
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200-sxm",
    "b200_sxm": "b200-sxm",
    "b300_sxm": "b300-sxm",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
    "a100_sxm": "a100-80gb-sxm",
    "a100_pcie": "a100-80gb-pcie",
    "a30": "a30",
    "h100_pcie": "h100-pcie",
    "l4": "l4",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-server",
}
"""Device descriptions by system name."""

FORMATS: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8_block"),
    "fp4": ("nvfp4", "nvfp4"),
    "mxfp4": ("bf16", "mxfp4"),
    "int4": ("bf16", "int4_wo"),
}
"""Formats of dense layers and of experts, by precision, where `formats` is blank."""
CACHE_FORMATS: Final = ("bf16", "fp8")
USUAL_LENGTH_RATIO: Final = 0.95
"""Shortest length, as a share of the nominal one, where a row states none."""
SEQUENCE_S: Final = 25e-6
"""Host seconds per running sequence and step where nothing hides them; 20 to 45 us are seen."""
ASYNCHRONOUS: Final = (0, 14)
"""First release of vLLM that schedules the next step while one runs."""
MOST_CONCURRENCY: Final = 65_536
LONGEST_TOKENS: Final = 1_048_576
MOST_DRAFTS: Final = 16
_CONCURRENCY: Final = re.compile(r"silicon_concurrency=(\d{1,7})\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWorkers:
    """Workers of one role."""

    degrees: InstanceDegrees
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLaunch:
    """One row."""

    id: str
    system: str
    engine: str
    release: str
    decoder: Decoder
    formats: Formats
    input_tokens: int
    output_tokens: int
    concurrency: int
    harness: str
    """Name of the load driver."""
    sides: tuple[RoleWorkers, ...]
    """One of an aggregated launch; prefill and decode of a disaggregated one."""
    ttft_s: float
    tpot_s: float
    prefix_ratio: float = 0.0
    """Share of every prompt that is in the prefix cache."""
    drafting: Drafting | None = None
    length_ratio: float = USUAL_LENGTH_RATIO
    """Shortest length as a share of the nominal one; lengths are even between the two."""
    poll_steps: int = 1
    """Steps between two polls for new requests."""
    stream_steps: float = 0.0
    """Steps that a token waits to be streamed."""
    sequence_s: float = 0.0
    """Host seconds per running sequence and step."""
    step_tokens: int | None = None
    """Token budget of a step; None: the engine's usual one."""
    experts_table: str = ""
    """Table of the measured expert kernels; empty: the engine's newest."""

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode run on different workers."""
        return len(self.sides) == 2

    @property
    def generation(self) -> str:
        """Generation of the device."""
        return find_device(SYSTEMS[self.system]).generation.value

    @property
    def devices(self) -> int:
        """Devices of all sides."""
        return sum(side.degrees.devices * side.workers for side in self.sides)

    @property
    def source(self) -> str:
        """Name that its errors are reported under."""
        mode = "disagg" if self.is_disaggregated else "agg"
        return f"{self.system}|{self.engine}|{mode}"


class OddError(MissingError):
    """Every column is there, and no engine runs what they say together."""


def parse_launch(cells: Cells, *, number: int) -> PublishedLaunch:
    """Read one row.

    Raises:
        MissingError: a column that a prediction needs is blank, odd or not known.
    """
    engine = text_of(cells, "backend")
    if engine not in ENGINE_TRAITS:
        raise MissingError(f"backend {engine[:40]!r} is none that is modelled")
    system = text_of(cells, "system")
    if system not in SYSTEMS:
        raise MissingError(f"system {system[:40]!r} is not known")
    path = text_of(cells, "model_path")
    decoder = find_decoder(path)
    if decoder is None:
        raise MissingError(
            f"model_path {path[:60]!r} is none of examples/models; name the one of its architecture"
        )
    formats = _formats(cells, decoder)
    stated_concurrency = _CONCURRENCY.search(cells.get("silicon_data_source", ""))
    if stated_concurrency is None or not 1 <= int(stated_concurrency.group(1)) <= MOST_CONCURRENCY:
        raise MissingError(
            f"silicon_data_source states no silicon_concurrency of 1 to {MOST_CONCURRENCY}"
        )
    is_split = text_of(cells, "mode") == "disagg"
    sides = tuple(
        _side(cells, role, decoder) for role in (("prefill_", "decode_") if is_split else ("",))
    )
    _check_weights(sides, decoder, formats, system)
    release = cells.get("backend_version", "")
    return PublishedLaunch(
        id=cells.get("id", "") or f"row-{number}",
        system=system,
        engine=engine,
        release=release,
        decoder=decoder,
        formats=formats,
        input_tokens=_length(cells, "isl"),
        output_tokens=_length(cells, "osl"),
        concurrency=int(stated_concurrency.group(1)),
        harness=cells.get("harness", "").strip()[:40] or "other",
        sides=sides,
        ttft_s=number_of(cells, "silicon_ttft_ms") * 1e-3,
        tpot_s=number_of(cells, "silicon_tpot_ms") * 1e-3,
        prefix_ratio=_ratio(cells, "prefix_hit"),
        drafting=_drafting(cells),
        length_ratio=_ratio(cells, "length_ratio") or USUAL_LENGTH_RATIO,
        poll_steps=whole_of(cells, "poll_steps", default=1),
        stream_steps=optional_of(cells, "stream_steps"),
        sequence_s=optional_of(cells, "sequence_us") / 1e6 or _sequence_s(engine, release),
        step_tokens=whole_of(cells, "step_tokens", default=0) or None,
        experts_table=cells.get("experts_table", "").strip(),
    )


@cache
def find_decoder(path: str) -> Decoder | None:
    """Return the model of `examples/models` that a path names, or None."""
    model = find_model(path.rsplit("/", 1)[-1])
    return decoder_of(model) if model is not None else None


def _formats(cells: Cells, decoder: Decoder) -> Formats:
    """Return the formats that a row states, or those of its precision; a blank one is bf16."""
    precision = cells.get("precision", "").strip().lower() or "bf16"
    if precision not in FORMATS:
        raise MissingError(f"precision {precision[:20]!r} is not known")
    dense, experts = FORMATS[precision]
    if decoder.experts is not None and precision == "fp8":
        dense = experts
    text = cells.get("formats", "").strip()
    names = text.split("/") if text else [dense, dense, dense, experts, "bf16"]
    if len(names) != 5 or not set(names) <= set(BYTES) or names[-1] not in CACHE_FORMATS:
        raise MissingError(
            f"formats {text[:60]!r} are not four of {', '.join(BYTES)} and one of"
            f" {', '.join(CACHE_FORMATS)}, joined by /"
        )
    attention, output, ffn, of_experts, kv = names
    return Formats(attention=attention, output=output, ffn=ffn, experts=of_experts, kv=kv)


def release_version(release: str) -> tuple[int, ...]:
    """Return a release's numbers; nightly builds count as new, an unstated release as old."""
    if release.startswith("nightly"):
        return (999,)
    return tuple(int(word[:9]) for word in re.findall(r"\d+", release)[:2])


def _sequence_s(engine: str, release: str) -> float:
    """Return host seconds per sequence and step that an engine pays without scheduling ahead."""
    return SEQUENCE_S if engine == "vllm" and release_version(release) < ASYNCHRONOUS else 0.0


def _drafting(cells: Cells) -> Drafting | None:
    """Return the drafts that a row states; a blank is none."""
    drafts = whole_of(cells, "draft_tokens", default=0)
    if drafts == 0:
        return None
    if drafts > MOST_DRAFTS:
        raise MissingError(f"draft_tokens {drafts} is more than {MOST_DRAFTS}")
    method = cells.get("draft_method", "").strip().lower() or DraftMethod.MTP.value
    if method not in {known.value for known in DraftMethod}:
        raise MissingError(f"draft_method {method[:20]!r} is none that is modelled")
    words = text_of(cells, "draft_acceptance").split(";")
    acceptance = tuple(_ratio({"draft_acceptance": word}, "draft_acceptance") for word in words)
    return Drafting(draft_tokens=drafts, acceptance=acceptance, method=DraftMethod(method))


def _side(cells: Cells, role: str, decoder: Decoder) -> RoleWorkers:
    workers = count_of(cells, f"{role}num_workers") if role else 1
    tensor = count_of(cells, f"{role}tp_size")
    data = whole_of(cells, f"{role}attention_dp_size", default=1)
    heads = max(group.attention.heads for group in decoder.layers)
    if heads % tensor:
        raise OddError(f"{role}tp_size {tensor} does not divide {heads} heads")
    ranks = tensor * data
    expert = whole_of(cells, f"{role}moe_ep_size", default=1)
    moe_tensor = whole_of(cells, f"{role}moe_tp_size", default=max(ranks // expert, 1))
    if decoder.experts is None:
        moe_tensor, expert = ranks, 1
    elif moe_tensor * expert != ranks:
        raise OddError(
            f"{role}moe_tp_size {moe_tensor} * {role}moe_ep_size {expert} is not {role}tp_size"
            f" {tensor} * {role}attention_dp_size {data}"
        )
    return RoleWorkers(
        degrees=InstanceDegrees(
            attention_tensor=tensor,
            attention_data=data,
            moe_tensor=moe_tensor,
            expert=expert,
            pipeline=whole_of(cells, f"{role}pp_size", default=1),
        ),
        workers=workers,
    )


def _check_weights(
    sides: tuple[RoleWorkers, ...], decoder: Decoder, formats: Formats, system: str
) -> None:
    """Refuse a row that no device of the system holds.

    Raises:
        OddError: the weights are larger than a device's memory.
    """
    memory = find_device(SYSTEMS[system]).memory_bytes
    for side in sides:
        weights = weight_bytes(decoder, formats, side.degrees)
        if weights > memory:
            raise OddError(
                f"{format_bytes(int(weights))} of weights a device, {system} has"
                f" {format_bytes(memory)}"
            )


def _length(cells: Cells, name: str) -> int:
    value = count_of(cells, name)
    if value > LONGEST_TOKENS:
        raise MissingError(f"{name} {value} is more than {LONGEST_TOKENS}")
    return value


def _ratio(cells: Cells, name: str) -> float:
    """Return a share from 0 to 1; blank: 0."""
    value = optional_of(cells, name)
    if value > 1.0:
        raise MissingError(f"{name} {value:g} is not a share of 0 to 1")
    return value
