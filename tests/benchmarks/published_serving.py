"""Published serving rows as a documented table.

    python -m tests.benchmarks.published_serving PUBLISHED.csv > RUNS.csv

`moetune backtest RUNS.csv` predicts it. Added are the facts of a launch that its publisher knew and
did not print.

Degrees. Some recipes state combinations that no engine runs:

    TP or DP 16 or 64 with experts split 4 x 4 or 8 x 8   4 or 8 devices, EP 4 or 8 (the product of
                                                          both is stated)
    vLLM TP = DP = t, EP = t^2                            t devices, EP t
    vLLM MiniMax; TensorRT-LLM R1 on H200                 EP over all ranks
    attention data parallelism                            EP over all ranks
    blank degrees of experts                              MoE-TP over all tensor ranks
    blank attention data parallelism                      ranks of experts over tensor ranks

Load. Rows of dated tables and of the database follow InferenceX (github.com/SemiAnalysisAI/
InferenceX, benchmarks/single_node): 10 C requests, of lengths even in 0.8 to 1 of the nominal;
SGLang on Blackwell looks for requests every 10 steps below 16 requests and every 30 from there on
(`--scheduler-recv-interval`); TensorRT-LLM streams tokens of models with experts ten at a time
(`stream_interval: 10`), and for Llama-70B with 1,024 tokens in and out on fewer than eight devices
it waits up to 20 iterations for more prompts (`batch_wait_timeout_iters: 20`,
benchmarks/70b_*_trt_slurm.sh until October 2025). Other rows come from drivers that are not
documented, of which there are at least two; their load was inferred from the rows:

    prompts of powers of two      outputs of 0.95 to 1 of the nominal length (vLLM, TensorRT-LLM),
                                  of exactly that length with SGLang (Qwen3-32B)
    prompts of round thousands    outputs of 0.95 to 1 of the nominal length

Equal output lengths keep SGLang in lock-step: prompts go first, so all sequences of a burst start
and end at the same step and send the next burst, whose prompts then queue behind each other in
every round. Only one pair (model, engine) shows lock-step; `as_unseen` predicts without it.

Releases. SGLang's InferenceX rows without one are of the image that the recipes named on the day
(configs/nvidia-master.yaml of that commit): 0.5.3rc1 until 2025-11-10, whose flags are what 0.5.5
does by itself on Blackwell, then 0.5.5. A nightly build counts as the release that followed it.

Lengths. Images of SGLang with transformers 5, those from 0.5.10 on, broke the client's tokenizer of
DeepSeek-R1, so that the server read 35,921 tokens for 7,140 (SemiAnalysisAI/InferenceX, pull
requests 937 and, of 2026-05-15, 1381).

Formats are those of the quantised checkpoints (`quantization_config`, `hf_quant_config.json`).
"""

import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from tuner.backtest.cells import BLANK, Cells, MissingError
from tuner.backtest.serving import launches
from tuner.backtest.serving.launches import (
    SYSTEMS,
    PublishedLaunch,
    find_decoder,
    parse_launch,
    release_version,
)
from tuner.backtest.serving.rows import MEASURED, read_cells
from tuner.costs.serve.decoder import Decoder
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation

NAMES: Final = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "llama-3.3-70b": "llama-3.1-70b",
}
"""Models that are others by architecture, by the beginning of their names."""
DIGITS: Final = 6
"""Digits of a measurement; one source prints all that a float has, another rounds."""
ROUND_TOKENS: Final = 1000
"""Prompts of multiples of this distinguish two undocumented load drivers."""
STREAM_STEPS: Final = 10.0
BALANCE_STEPS: Final = 45.0
"""With attention data parallelism prompts wait until every rank has one, 60 steps at most
(`timeout_iters: 60`): those that begin a wait all of it, those that come meanwhile half."""
BATCH_WAIT_STEPS: Final = 15.0
"""TensorRT-LLM's wait for more prompts (`batch_wait_timeout_iters: 20`), likewise."""
GENERATED_EXPERTS: Final = (0, 19)
"""First release of vLLM that runs block-scaled experts with FlashInfer's kernels, Triton's
before."""
TRITON_EXPERTS: Final = "vllm@0.19.0"
"""The table that measured them with Triton."""
RELEASED: Final = (("20260223", "0.5.9"), ("20260405", "0.5.10"))
"""Days on which wheels of SGLang were built that followed a nightly build."""
UNNAMED: Final = "0.5.5"
REREAD_RELEASE: Final = "0.5.10"
REREAD_RATIO: Final = 35_921 / 7_140
"""Release whose rows have longer prompts of DeepSeek-R1, and how much."""
_NIGHTLY: Final = re.compile(r"nightly-dev-(?:cu\d+-)?(\d{8})")
_INFERENCEX: Final = re.compile(r"^(db-dump|source_file=(\d{4}-\d\d-\d\d|kimi|qwen3\.5)[^/]*\.csv)")
_CONCURRENCY: Final = re.compile(r"silicon_concurrency=(\d{1,7})\b")

Degrees = tuple[int, int, int, int]
"""Attention tensor and data, experts' tensor and expert parallelism."""


class Harness(StrEnum):
    """Load drivers of published rows."""

    INFERENCEX = "inferencex"
    """Ten times the concurrency in all, lengths even in 0.8 to 1 of the nominal."""
    OTHER = "other"
    """Not documented; its lengths are powers of two."""
    ROUND = "round"
    """Not documented; its lengths are round thousands."""


def read_published(path: Path) -> tuple[Cells, ...]:
    """Read a published table as a documented one, each measurement once."""
    return distinct(tuple(map(documented, read_cells(path))))


def distinct(rows: Sequence[Cells]) -> tuple[Cells, ...]:
    """Return the first row of each measurement that can be read, else the first."""
    chosen: dict[tuple[str, ...], int] = {}
    for number, cells in enumerate(rows):
        measured = tuple(_digits(cells.get(name, "")) for name in MEASURED)
        key = measured if all(measured) else (str(number),)
        known = chosen.setdefault(key, number)
        if known != number and not _is_readable(rows[known]) and _is_readable(cells):
            chosen[key] = number
    return tuple(rows[number] for number in sorted(chosen.values()))


def _digits(text: str) -> str:
    """Return a figure as far as sources agree on its digits; empty where there is none."""
    try:
        return f"{float(text):.{DIGITS}g}"
    except ValueError:
        return ""


def _is_readable(cells: Cells) -> bool:
    try:
        parse_launch(cells, number=1)
    except MissingError:
        return False
    return True


def documented(cells: Cells) -> Cells:
    """Return a row in documented columns; one that cannot be read stays as it is."""
    path = cells.get("model_path", "").rsplit("/", 1)[-1].lower()
    for name, other in NAMES.items():
        if path.startswith(name):
            cells = {**cells, "model_path": other}
    decoder = find_decoder(cells.get("model_path", ""))
    if decoder is None or cells.get("system", "") not in SYSTEMS:
        return cells
    roles = ("prefill_", "decode_") if cells.get("mode", "") == "disagg" else ("",)
    sides: dict[str, Degrees] = {}
    try:
        for role in roles:
            sides[role] = engine_degrees(cells, role, decoder)
    except ValueError:
        return cells
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    stated = {
        f"{role}{name}": str(degree)
        for role, degrees in sides.items()
        for name, degree in zip(names, degrees, strict=True)
    }
    formats, release = checkpoint_formats(cells, decoder), _release(cells)
    is_reread = decoder.name == "deepseek-v3" and release.startswith(REREAD_RELEASE)
    if is_reread and cells["backend"] == "sglang" and _is_recipe(cells):
        cells = {**cells, "isl": str(round(REREAD_RATIO * _number(cells, "isl")))}
    return {
        **cells,
        "backend_version": release,
        **stated,
        **({"formats": formats} if formats else {}),
        **_load(cells, decoder, sides[roles[0]], formats),
    }


def as_unseen(launch: PublishedLaunch) -> PublishedLaunch:
    """Return a launch without what only rows of its model and engine have shown."""
    has_waves = launch.engine == "sglang" and launch.harness == Harness.OTHER
    return replace(launch, length_ratio=launches.USUAL_LENGTH_RATIO) if has_waves else launch


def engine_degrees(cells: Cells, role: str, decoder: Decoder) -> Degrees:
    """Return the degrees that the engine of a row ran with.

    Raises:
        ValueError: a degree is no number.
    """
    engine, system = cells.get("backend", ""), cells.get("system", "")
    tensor = _degree(cells, f"{role}tp_size", 0)
    if not tensor:
        raise ValueError(f"{role}tp_size is blank")
    data = _data(cells, role, decoder, tensor=tensor)
    moe_tensor = _degree(cells, f"{role}moe_tp_size", tensor)
    expert = _degree(cells, f"{role}moe_ep_size", 1)
    if moe_tensor == expert > 1 and max(tensor, data) == moe_tensor * expert:
        tensor, data = min(tensor, moe_tensor), min(data, moe_tensor)
        moe_tensor = 1
    elif engine == "vllm" and tensor == data > 1 and expert == tensor * data:
        data, expert, moe_tensor = 1, tensor, 1
    ranks = tensor * data
    is_recipe = engine == "trtllm" and decoder.name == "deepseek-v3" and not role
    is_whole = (
        (engine == "vllm" and decoder.name == "minimax-m2")
        or (is_recipe and system == "h200_sxm")
        # Under attention data parallelism experts are split by EP.
        or data > 1
    )
    if decoder.experts is None:
        moe_tensor, expert = ranks, 1
    elif is_whole:
        moe_tensor, expert = 1, ranks
    elif moe_tensor * expert != ranks:
        # Copies of one measurement disagree; experts are spread over all ranks of the worker.
        expert = min(expert, ranks) if expert > 1 else 1
        moe_tensor = max(ranks // expert, 1)
    return tensor, data, moe_tensor, expert


def _data(cells: Cells, role: str, decoder: Decoder, *, tensor: int) -> int:
    """Attention-data ranks; a blank follows from the ranks that share the experts.

    Raises:
        ValueError: they are no multiple of the tensor ranks.
    """
    stated = _degree(cells, f"{role}attention_dp_size", 0)
    if stated or decoder.experts is None:
        return stated or 1
    ranks = _degree(cells, f"{role}moe_tp_size", 1) * _degree(cells, f"{role}moe_ep_size", 1)
    if ranks <= tensor:
        return 1
    if ranks % tensor:
        raise ValueError(f"{ranks} ranks of experts are no multiple of {tensor}")
    return ranks // tensor


def _degree(cells: Cells, name: str, default: int) -> int:
    text = cells.get(name, "").strip()
    if text in BLANK:
        return default
    if not 1.0 <= float(text) == int(float(text)):
        raise ValueError(f"{name} {text[:40]!r} is no degree")
    return int(float(text))


def checkpoint_formats(cells: Cells, decoder: Decoder) -> str:
    """Return the formats of a row's checkpoint; empty where the precision is not known.

    TensorRT-LLM caches keys and values in fp8, and so do fp8 and fp4 checkpoints of Llama, every
    NVFP4 checkpoint (`kv_cache_quant_algo`), and recipes of models with experts for Blackwell. A
    blank precision is bf16.
    """
    precision, engine = cells.get("precision", "").strip().lower(), cells.get("backend", "")
    is_moe = decoder.experts is not None
    is_block = is_moe or (engine == "sglang" and decoder.name == "llama-3.1-8b")
    has_small_cache = (
        engine == "trtllm"
        or (precision == "fp4" and not decoder.name.startswith("gpt-oss"))
        or (precision == "fp8" and decoder.name.startswith("llama") and engine != "sglang")
        or (_is_blackwell(cells) and is_moe and precision == "fp8")
    )
    kv = "fp8" if has_small_cache else "bf16"
    match precision:
        case "" | "bf16":
            return f"bf16/bf16/bf16/bf16/{kv}"
        case "fp8":
            block = "fp8_block" if is_block else "fp8"
            return f"{block}/{block}/{block}/{block}/{kv}"
        case "fp4" | "mxfp4" if decoder.name.startswith("gpt-oss"):
            return f"bf16/bf16/bf16/mxfp4/{kv}"
        case "fp4" if is_moe:
            # NVFP4 checkpoints keep attention in bf16, but for DeepSeek's output projection, and
            # Qwen3.5's shared experts.
            outer = "nvfp4" if decoder.name == "deepseek-v3" else "bf16"
            ffn = "bf16" if decoder.name.startswith("qwen3.5") else "nvfp4"
            return f"bf16/{outer}/{ffn}/nvfp4/{kv}"
        case "fp4":
            return f"nvfp4/nvfp4/nvfp4/nvfp4/{kv}"
        case "int4":
            return f"bf16/bf16/bf16/int4_wo/{kv}"
        case _:
            return ""


def _is_recipe(cells: Cells) -> bool:
    return bool(_INFERENCEX.match(cells.get("silicon_data_source", "")))


def _release(cells: Cells) -> str:
    """Return the release that a row names, or that its day had."""
    stated, source = cells.get("backend_version", ""), cells.get("silicon_data_source", "")
    if cells.get("backend", "") != "sglang" or not _is_recipe(cells):
        return stated
    build = _NIGHTLY.search(source)
    if build is None:
        return stated or UNNAMED
    return next((name for day, name in RELEASED if build.group(1) < day), stated)


def _load(cells: Cells, decoder: Decoder, degrees: Degrees, formats: str) -> dict[str, str]:
    """Columns of the load and of the settings that only a recipe states."""
    engine = cells.get("backend", "")
    if _is_recipe(cells):
        return {
            "harness": Harness.INFERENCEX,
            "length_ratio": "0.8",
            "poll_steps": str(_poll_steps(cells, decoder)),
            "stream_steps": str(_stream_steps(cells, decoder, degrees)),
            "step_tokens": _step_tokens(cells, decoder, formats),
            "experts_table": _experts_table(cells, formats),
        }
    is_round = _number(cells, "isl") % ROUND_TOKENS == 0
    has_waves = engine == "sglang" and not is_round
    return {
        "harness": Harness.ROUND if is_round else Harness.OTHER,
        "length_ratio": "1" if has_waves else "",
        # vLLM's follows from its release.
        "sequence_us": "" if engine == "vllm" else repr(launches.SEQUENCE_S * 1e6),
        "experts_table": _experts_table(cells, formats),
    }


def _poll_steps(cells: Cells, decoder: Decoder) -> int:
    is_polled = cells["backend"] == "sglang" and decoder.name in (
        "deepseek-v3",
        "qwen3.5-397b-a17b",
    )
    if not is_polled or not _is_blackwell(cells):
        return 1
    stated = _CONCURRENCY.search(cells["silicon_data_source"])
    return 10 if stated is not None and int(stated.group(1)) < 16 else 30


def _stream_steps(cells: Cells, decoder: Decoder, degrees: Degrees) -> float:
    if cells["backend"] != "trtllm" or cells["mode"] == "disagg":
        # The first token comes from the prefill side, which streams it at once.
        return 0.0
    tensor, data, _, _ = degrees
    if decoder.experts is None:
        is_short = _number(cells, "isl") == _number(cells, "osl") == 1024
        devices = tensor * data * _degree(cells, "pp_size", 1)
        waits = decoder.name == "llama-3.1-70b" and is_short and devices < 8
        return BATCH_WAIT_STEPS if waits else 0.0
    return STREAM_STEPS + (BALANCE_STEPS if data > 1 else 0.0)


def _experts_table(cells: Cells, formats: str) -> str:
    is_old = () < release_version(cells.get("backend_version", "")) < GENERATED_EXPERTS
    is_block_scaled = formats.split("/")[3:4] == ["fp8_block"]
    return TRITON_EXPERTS if cells["backend"] == "vllm" and is_old and is_block_scaled else ""


def _step_tokens(cells: Cells, decoder: Decoder, formats: str) -> str:
    match cells["backend"], decoder.name:
        case "sglang", "deepseek-v3":
            return "16384" if formats.split("/")[3:4] == ["nvfp4"] else "32768"
        case "sglang", "glm-5" if _is_blackwell(cells):
            return "32768"
        case "trtllm", "llama-3.1-70b":
            return "16384"
        case "vllm", "minimax-m2" if _is_blackwell(cells):
            return str(round(2 * _number(cells, "isl")))
        case _:
            return ""


def _is_blackwell(cells: Cells) -> bool:
    return find_device(SYSTEMS[cells["system"]]).generation is Generation.BLACKWELL


def _number(cells: Cells, name: str) -> float:
    try:
        return float(cells.get(name, ""))
    except ValueError:
        return 0.0


def main(path: str) -> int:
    """Write the documented table."""
    rows = read_published(Path(path))
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
