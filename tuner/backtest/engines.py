"""Facts about the software of a row, beyond what its columns state.

The generation of training software determines what no table states: whether attention is fused,
whether gradients are fp32, what is overlapped. It follows from `release`, or from a `source` that
is named like it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.backtest.rows import Row
from tuner.costs.train.memory_constants import OF_FAMILY
from tuner.prices.train.constants import GemmPrecision, Software, software_of_container, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFamily:
    """One family of training software and its defaults."""

    family: str
    """Name that residuals are stored under."""
    software: Software
    has_flash_attention: bool = True
    sequence_parallel: bool = True
    """Sequence parallelism where TP > 1."""
    dropout: float = 0.0
    gradient_bytes: float = 4.0
    """Bytes of an element of the main gradient."""
    zero_stage: float = 1.0
    """ZeRO stage where the row states none."""
    recompute: str = ""
    """The field of `Strategies` that is on by default."""
    overlaps_gradients: bool = True
    """Reduces gradients and gathers parameters behind the passes of a micro-batch."""
    overlaps_tensor: frozenset[GemmPrecision] = frozenset()
    """Precisions in which dense models have userbuffers."""
    counts_full_square: bool = True
    """The TFLOP/s that it prints count attention over the full square of the sequence, not the
    causal half."""
    keeps_quantized: bool = False
    """Linear layers save their inputs in the GEMMs' precision for the backward pass."""
    reports_reserved: bool = False
    """Prints reserved memory of the allocator, not allocated memory."""


_MEGATRON_2022: Final = SoftwareFamily(
    family="megatron-2022",
    software=Software.MEGATRON_2021,
    has_flash_attention=False,
    sequence_parallel=False,
    dropout=0.1,
    zero_stage=0.0,
    overlaps_gradients=False,
)
"""Megatron-LM before flash attention and before the distributed optimizer was usual."""
_MEGATRON_DEEPSPEED: Final = replace(_MEGATRON_2022, family="megatron-deepspeed")
_VTRAIN: Final = replace(_MEGATRON_DEEPSPEED, family="vtrain", gradient_bytes=2.0)
"""Times of one node that vTrain's own predictor assembled from kernels traced on one device
(VIA-Research/vTrain, src/predictor.py); gradients are reduced in fp16 there. The host under a
profiler is not that of the runs on several nodes."""
_MEGATRON_LM: Final = SoftwareFamily(
    family="megatron-lm", software=Software.MEGATRON_2025, keeps_quantized=True
)
_BRIDGE: Final = SoftwareFamily(
    family="nemo",
    software=Software.MEGATRON_2025,
    keeps_quantized=True,
    gradient_bytes=2.0,
    overlaps_tensor=frozenset({GemmPrecision.BF16, GemmPrecision.FP8, GemmPrecision.MXFP8}),
)
"""Megatron-Bridge's performance recipes: gradients in bf16; userbuffers, which all recipes in NVFP4
of tags v0.2 to v0.5 switch off (scripts/performance/configs/llama)."""
_AUTOMODEL: Final = SoftwareFamily(
    family="automodel",
    software=Software.TORCH_FSDP,
    zero_stage=3.0,
    gradient_bytes=2.0,
    recompute="recompute_full",
)
"""NeMo AutoModel: its benchmarks train bf16 weights, most with activation checkpointing
(examples/llm_benchmark)."""
_TITAN: Final = SoftwareFamily(
    family="torchtitan",
    software=Software.TORCH_FSDP,
    zero_stage=3.0,
    reports_reserved=True,
    recompute="recompute_by_op",
)
_UNSTATED: Final = SoftwareFamily(family="unstated", software=Software.MEGATRON_2025)

OF_RELEASE: Final[Mapping[str, SoftwareFamily]] = {
    "nemo": _BRIDGE,
    "megatron-bridge": _BRIDGE,
    "megatron-lm": _MEGATRON_LM,
    "megatron-core": _MEGATRON_LM,
    "mcore": _MEGATRON_LM,
    "megatron-deepspeed": _MEGATRON_DEEPSPEED,
    "automodel": _AUTOMODEL,
    "torchtitan": _TITAN,
    "llm-foundry": SoftwareFamily(
        family="llm-foundry", software=Software.TORCH_FSDP, zero_stage=3.0
    ),
    "megatron-2022": _MEGATRON_2022,
    "megatron-2023": SoftwareFamily(family="megatron-2023", software=Software.MEGATRON_2025),
    "megascale": SoftwareFamily(family="megascale", software=Software.MEGATRON_2025),
    "vtrain": _VTRAIN,
    "llama3": SoftwareFamily(
        family="llama3", software=Software.MEGATRON_2025, counts_full_square=False
    ),
    "deepseek-v3": SoftwareFamily(family="deepseek-v3", software=Software.MEGATRON_2025),
}
"""Software by `release`, either the whole text or the name in `name-version`."""

_FIRST_YEAR: Final = 2024
"""Releases from here on are months, not versions; torchtitan was published in 2024."""
_RELEASE: Final = re.compile(r"([a-z][a-z0-9-]*?)[-=@: ]?v?(\d+(?:\.\d+){0,3})?")


def identify_engine(row: Row) -> tuple[SoftwareFamily, str]:
    """Return a row's engine and its release, which is empty where none is known."""
    text = row.text("release").lower() or row.source.lower()
    if text in OF_RELEASE or not row.text("release"):
        return OF_RELEASE.get(text, _UNSTATED), ""
    of_source = OF_RELEASE.get(row.source.lower(), _UNSTATED)
    match = _RELEASE.fullmatch(text)
    if match is None:
        return of_source, row.text("release")[:32]
    return OF_RELEASE.get(match.group(1), of_source), match.group(2) or ""


_TITAN_MEMORY: Final = (
    (version_of("2025.11"), version_of("0.2.1"), ""),
    (version_of("2025.06"), version_of("0.1.0"), "-2025"),
    (version_of("2024"), version_of("0"), "-2024"),
)
"""First month and first version of what torchtitan's stages keep, newest first
(tuner/costs/train/memory_constants.py). A month in which something changed counts as before it;
0.1.0 is of June, 0.2.0 of 17 October, 0.2.1 of 26 December 2025."""


def find_memory_family(engine: SoftwareFamily, release: str, row: Row) -> str:
    """Return the software's family in the memory constants.

    torchtitan without a month or version is priced as its newest release; `states_memory` says so.
    """
    if engine is _AUTOMODEL and row.flags.get("fused_loss"):
        return f"{engine.family}-linear-loss"
    if engine is not _TITAN:
        return engine.family
    compiled = "-compiled" if row.flags.get("compiled") else ""
    name = f"{engine.family}{_titan_memory(release) or ''}{compiled}"
    in_segments = f"{name}-segments"
    has_usual_allocator = not row.flags.get("expandable_segments", True)
    return in_segments if has_usual_allocator and in_segments in OF_FAMILY else name


def states_memory(engine: SoftwareFamily, release: str) -> bool:
    """Return whether the run's software is known well enough to choose its memory constants."""
    return engine is not _TITAN or _titan_memory(release) is not None


def _titan_memory(release: str) -> str | None:
    version = version_of(release)
    if not version:
        return None
    is_month = version[0] >= _FIRST_YEAR
    return next(
        (name for month, first, name in _TITAN_MEMORY if version >= (month if is_month else first)),
        None,
    )


def engine_software(engine: SoftwareFamily, release: str, row: Row) -> Software:
    """Return the software generation of the generic constants."""
    if engine is _TITAN and not row.flags.get("compiled", True):
        return Software.TORCH_EAGER
    if engine is _BRIDGE and release:
        return software_of_container(release)
    return engine.software


def parse_precision(row: Row) -> GemmPrecision:
    """Return the precision of the linear layers; blank: half precision."""
    text = row.text("precision").lower()
    if "fp4" in text:
        return GemmPrecision.NVFP4
    if "mx" in text or "rowwise" in text or "blockwise" in text:
        return GemmPrecision.MXFP8
    return GemmPrecision.FP8 if "fp8" in text else GemmPrecision.BF16
