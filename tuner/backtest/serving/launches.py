"""Parses a row of published serving measurements into its launch.

The columns state what a recipe requested; some recipes state combinations that no engine runs.
These are corrected:

    TP or DP 16 or 64 with experts split 4 x 4 or 8 x 8   4 or 8 devices, EP 4 or 8 (the product of
                                                          both is stated)
    vLLM TP = DP = t, EP = t^2                            t devices, EP t
    vLLM MiniMax; TensorRT-LLM R1 on H200                 EP over all ranks
    attention data parallelism                            EP over all ranks
    blank degrees of experts                              MoE-TP over all tensor ranks
    blank attention data parallelism                      ranks of experts over tensor ranks

The load is a closed loop at the concurrency that `silicon_data_source` names. Rows of dated tables
and of the database follow the InferenceX harness (github.com/SemiAnalysisAI/InferenceX); others
come from drivers that are not documented, of which there are at least two: one sends prompts whose
lengths are powers of two, one prompts of round thousands of tokens.

A row that lacks a column that a prediction needs is refused, and the reason names the column; so is
one whose weights no device of its system holds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tuner.backtest.serving.decoders import checkpoint_formats, find_decoder
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.memory import weight_bytes
from tuner.costs.serve.speculative import Drafting, DraftMethod
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.engines.registry import serve_traits
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

MOST_CONCURRENCY: Final = 65_536
LONGEST_TOKENS: Final = 1_048_576
MOST_DRAFTS: Final = 16
ROUND_TOKENS: Final = 1000
"""Prompts of multiples of this distinguish two undocumented load drivers."""
BLANK: Final = ("", "0", "0.0")
"""Cells that mean a degree is not set."""
_CONCURRENCY: Final = re.compile(r"silicon_concurrency=(\d{1,7})\b")
_INFERENCEX: Final = re.compile(r"^(db-dump|source_file=(\d{4}-\d\d-\d\d|kimi|qwen3\.5)[^/]*\.csv)")


class Harness(StrEnum):
    """What drove the load."""

    INFERENCEX = "inferencex"
    """Ten times the concurrency in all, lengths even in 0.8 to 1 of the nominal."""
    OTHER = "other"
    """Not documented; its lengths are powers of two."""
    ROUND = "round"
    """Not documented; its lengths are round thousands."""


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
    harness: Harness
    sides: tuple[RoleWorkers, ...]
    """One of an aggregated launch; prefill and decode of a disaggregated one."""
    ttft_s: float
    tpot_s: float
    prefix_ratio: float = 0.0
    """Share of every prompt that is in the prefix cache."""
    drafting: Drafting | None = None

    @property
    def is_disaggregated(self) -> bool:
        """Prefill and decode run on different workers."""
        return len(self.sides) == 2

    @property
    def generation(self) -> str:
        """Of the device."""
        return find_device(SYSTEMS[self.system]).generation.value

    @property
    def is_blackwell(self) -> bool:
        """On a B or GB system."""
        return self.generation == Generation.BLACKWELL

    @property
    def devices(self) -> int:
        """In all."""
        return sum(side.degrees.devices * side.workers for side in self.sides)

    @property
    def source(self) -> str:
        """What its errors are reported under."""
        mode = "disagg" if self.is_disaggregated else "agg"
        return f"{self.system}|{self.engine}|{mode}"


class MissingError(ValueError):
    """A row cannot be read; the message says which column is missing or odd."""


class OddError(MissingError):
    """Every column is there, and no engine runs what they say together."""


Cells = Mapping[str, str]


def parse_launch(cells: Cells, *, number: int) -> PublishedLaunch:
    """Read one row.

    Raises:
        MissingError: a column that a prediction needs is blank, odd or not known.
    """
    engine = _text(cells, "backend")
    if engine not in serve_traits():
        raise MissingError(f"backend {engine[:40]!r} is none that is modelled")
    system = _text(cells, "system")
    if system not in SYSTEMS:
        raise MissingError(f"system {system[:40]!r} is not known")
    path = _text(cells, "model_path")
    decoder = find_decoder(path)
    if decoder is None:
        raise MissingError(f"model_path {path[:60]!r} is not known")
    precision = cells.get("precision", "").strip().lower()
    formats = checkpoint_formats(
        decoder,
        precision=precision,
        engine=engine,
        is_blackwell=find_device(SYSTEMS[system]).generation is Generation.BLACKWELL,
    )
    if formats is None:
        raise MissingError(f"precision {precision[:20]!r} is not known")
    provenance = cells.get("silicon_data_source", "")
    stated_concurrency = _CONCURRENCY.search(provenance)
    if stated_concurrency is None or not 1 <= int(stated_concurrency.group(1)) <= MOST_CONCURRENCY:
        raise MissingError(
            f"silicon_data_source states no silicon_concurrency of 1 to {MOST_CONCURRENCY}"
        )
    is_split = _text(cells, "mode") == "disagg"
    sides = _sides(cells, decoder, engine) if is_split else (_side(cells, "", decoder, engine),)
    _check_weights(sides, decoder, formats, system)
    return PublishedLaunch(
        id=cells.get("id", "") or f"row-{number}",
        system=system,
        engine=engine,
        release=cells.get("backend_version", ""),
        decoder=decoder,
        formats=formats,
        input_tokens=_length(cells, "isl"),
        output_tokens=_length(cells, "osl"),
        concurrency=int(stated_concurrency.group(1)),
        harness=_harness(provenance, input_tokens=_length(cells, "isl")),
        sides=sides,
        ttft_s=_number(cells, "silicon_ttft_ms") * 1e-3,
        tpot_s=_number(cells, "silicon_tpot_ms") * 1e-3,
        prefix_ratio=_ratio(cells, "prefix_hit"),
        drafting=_drafting(cells),
    )


def _harness(provenance: str, *, input_tokens: int) -> Harness:
    if _INFERENCEX.match(provenance):
        return Harness.INFERENCEX
    return Harness.OTHER if input_tokens % ROUND_TOKENS else Harness.ROUND


def _drafting(cells: Cells) -> Drafting | None:
    """Drafts that a row states; most tables do not say, and a blank is none."""
    drafts = _whole(cells, "draft_tokens", default=0)
    if drafts == 0:
        return None
    if drafts > MOST_DRAFTS:
        raise MissingError(f"draft_tokens {drafts} is more than {MOST_DRAFTS}")
    _text(cells, "draft_acceptance")
    method = cells.get("draft_method", "").strip().lower() or DraftMethod.MTP.value
    if method not in {known.value for known in DraftMethod}:
        raise MissingError(f"draft_method {method[:20]!r} is none that is modelled")
    acceptance = _ratio(cells, "draft_acceptance")
    return Drafting(draft_tokens=drafts, acceptance=acceptance, method=DraftMethod(method))


def _sides(cells: Cells, decoder: Decoder, engine: str) -> tuple[RoleWorkers, ...]:
    sides = []
    for role in ("prefill_", "decode_"):
        workers = _count(cells, f"{role}num_workers")
        side = _side(cells, role, decoder, engine)
        sides.append(RoleWorkers(degrees=side.degrees, workers=workers))
    return tuple(sides)


def _side(cells: Cells, role: str, decoder: Decoder, engine: str) -> RoleWorkers:
    system = cells.get("system", "")
    tensor = _count(cells, f"{role}tp_size")
    data = _data(cells, role, decoder, tensor=tensor)
    pipeline = max(_whole(cells, f"{role}pp_size", default=1), 1)
    moe_tensor = max(_whole(cells, f"{role}moe_tp_size", default=tensor), 1)
    expert = max(_whole(cells, f"{role}moe_ep_size", default=1), 1)
    if moe_tensor == expert > 1 and max(tensor, data) == moe_tensor * expert:
        tensor, data = min(tensor, moe_tensor), min(data, moe_tensor)
        moe_tensor = 1
    elif engine == "vllm" and tensor == data > 1 and expert == tensor * data:
        data, expert, moe_tensor = 1, tensor, 1
    heads = max(group.attention.heads for group in decoder.layers)
    if heads % tensor:
        raise OddError(f"{role}tp_size {tensor} does not divide {heads} heads")
    ranks = tensor * data
    if decoder.experts is None:
        moe_tensor, expert = ranks, 1
    elif _splits_experts_whole(decoder, engine, system, is_worker=bool(role)):
        moe_tensor, expert = 1, ranks
    elif data > 1:
        # Under attention data parallelism experts are split by EP.
        moe_tensor, expert = 1, ranks
    elif moe_tensor * expert != ranks:
        # Copies of one measurement disagree; experts are spread over all ranks of the worker.
        expert = min(expert, ranks) if expert > 1 or data > 1 else 1
        moe_tensor = max(ranks // expert, 1)
    return RoleWorkers(
        degrees=InstanceDegrees(
            attention_tensor=tensor,
            attention_data=data,
            moe_tensor=moe_tensor,
            expert=expert,
            pipeline=pipeline,
        )
    )


def _data(cells: Cells, role: str, decoder: Decoder, *, tensor: int) -> int:
    """Attention-data ranks; a blank follows from the ranks that share the experts."""
    if cells.get(f"{role}attention_dp_size", "").strip() not in BLANK:
        return _count(cells, f"{role}attention_dp_size")
    if decoder.experts is None:
        return 1
    sliced = _whole(cells, f"{role}moe_tp_size", default=1)
    ranks = sliced * _whole(cells, f"{role}moe_ep_size", default=1)
    if ranks <= tensor:
        return 1
    if ranks % tensor:
        raise OddError(
            f"{role}attention_dp_size is blank, and {ranks} ranks of experts are no multiple of"
            f" {role}tp_size {tensor}"
        )
    return ranks // tensor


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


def _splits_experts_whole(decoder: Decoder, engine: str, system: str, *, is_worker: bool) -> bool:
    """Whether the recipe splits experts by EP whatever the columns say."""
    if engine == "vllm":
        return decoder.name == "minimax-m2"
    is_recipe = engine == "trtllm" and decoder.name == "deepseek-v3" and not is_worker
    return is_recipe and system == "h200_sxm"


def _text(cells: Cells, name: str) -> str:
    value = cells.get(name, "").strip()
    if not value:
        raise MissingError(f"{name} is blank")
    return value


def _number(cells: Cells, name: str) -> float:
    text = _text(cells, name)
    try:
        value = float(text)
    except ValueError:
        raise MissingError(f"{name} {text[:40]!r} is not a number") from None
    if not 0.0 < value < 1e9:
        raise MissingError(f"{name} {text[:40]!r} is not above 0")
    return value


def _count(cells: Cells, name: str) -> int:
    value = _number(cells, name)
    if value != int(value):
        raise MissingError(f"{name} {value:g} is not a whole number")
    return int(value)


def _length(cells: Cells, name: str) -> int:
    value = _count(cells, name)
    if value > LONGEST_TOKENS:
        raise MissingError(f"{name} {value} is more than {LONGEST_TOKENS}")
    return value


def _ratio(cells: Cells, name: str) -> float:
    """A share from 0 to 1; blank: 0."""
    value = 0.0 if cells.get(name, "").strip() in BLANK else _number(cells, name)
    if value > 1.0:
        raise MissingError(f"{name} {value:g} is not a share of 0 to 1")
    return value


def _whole(cells: Cells, name: str, *, default: int) -> int:
    return default if cells.get(name, "").strip() in BLANK else _count(cells, name)
