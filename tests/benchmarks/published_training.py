"""Published training rows as a documented table.

    python -m tests.benchmarks.published_training PUBLISHED.csv > RUNS.csv

`moetune backtest RUNS.csv` predicts it. Added is what the page, the repository or the recipe behind
a row says and its columns do not, each with its source below.

Rows of Megatron-Bridge whose recipe is not known have the flags that most known recipes of the same
kind have (counts over its public recipes, tags v0.2 to v0.5), and say so (`recipe_match`):

- DeepSeek-V3 and Kimi K2 recompute `mla_up_proj`, but not on GB300; others nothing.
- MoE models on Blackwell run partial CUDA graphs, on Hopper none; dense ones none except in
  NVFP4, which runs full-iteration graphs; from containers 26.06 on, GB200 and GB300 run MoE with
  full-iteration graphs and overlap.
- Blackwell dispatches by HybridEP, Hopper by DeepEP.
"""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.backtest.architecture import parse_shape
from tuner.backtest.engines import identify_engine, parse_precision
from tuner.backtest.known_models import find_model, name_words
from tuner.backtest.rows import Row, read_rows
from tuner.config.shapes import ModelShape
from tuner.devices.catalogue import DEVICES, find_device
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import UnknownDeviceError
from tuner.prices.train.constants import GemmPrecision, version_of

RELEASES: Final[Mapping[str, str]] = {
    "vtrain-single": "vtrain",
    "vtrain-multi": "megatron-deepspeed",
    "megatron-seqsel-paper": "megatron-2022",
    "megascale-paper": "megatron-2023",
    "simumax-b200": "megatron-lm",
    "megatron-lm": "megatron-lm",
    "mbridge-skills": "nemo",
    "megatron-bridge": "nemo",
    "nemo-longctx": "nemo",
    "nemo-automodel": "automodel",
    "torchtitan": "torchtitan",
    "torchtitan-fork-pr": "torchtitan",
    "llm-foundry": "llm-foundry",
    "llama3-paper": "llama3",
    "deepseek-v3-paper": "deepseek-v3",
}
"""Software by source, where the release is blank. The baseline of MegaScale (arXiv:2402.15627) is
Megatron-LM of 2023."""
SEQUENCES: Final = {"megascale-paper": 2048, "torchtitan": 8192, "torchtitan-fork-pr": 8192}
"""Tokens of a sequence by source, where neither row nor architecture says."""
NODE_GBIT_PER_S: Final = {"vtrain-single": 800.0, "vtrain-multi": 800.0}
"""Network of one server of 8 devices by source: `inter_node_bandwidth` in the vTrain repository's
configurations (config/*/*.json)."""
COUNTED_TOO_OFTEN: Final = {"nemo-longctx": 4.0}
"""Devices that are printed for each that runs, by source. NeMo's page of long sequences prints four
times tp * pp * cp * dp in every row of B200: its two runs with cp 1 equal those "without CP", so cp
is right, and two batches, of 8 and 4 sequences, do not divide by a dp four times as large."""
WITHOUT_OVERLAP: Final = ("simumax-b200",)
"""Sources whose launch scripts set neither `--overlap-grad-reduce` nor `--overlap-param-gather`
(MooreThreads/SimuMax, v1.2, simu_tools/megatron_scripts/scripts)."""
DEEPEP: Final = ("torchtitan-fork-pr",)
"""Sources whose runs all use DeepEP, though not every row says so."""
PLAIN_ALLOCATOR: Final = "llama3-8b_h200_202506_trainy-whitefiber"
"""torchtitan's page whose printed command starts torchrun itself, not run_train.sh, which is what
sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
KEEPS_ACTIVATIONS: Final = ("gpt-oss", "gpt oss")
"""Models whose AutoModel benchmark recomputes nothing (`activation_checkpointing` is off, NeMo
AutoModel, examples/llm_benchmark/gpt_oss)."""
LINEAR_LOSS: Final = "nemotron v3 ultra"
"""Model whose AutoModel benchmark computes the loss without writing logits: `loss_fn` is
FusedLinearCrossEntropy (NeMo AutoModel, examples/llm_benchmark/nemotron)."""
LORA: Final = {"nemo": "qkv", "automodel": "q+k+v+o+gate+up+down"}
"""Targets of adapters of rank 16, by software: Megatron-Bridge's Llama 3 70B adapts `linear_qkv`
(llama3_70b_lora_8gpu_gb300_*_config of src/megatron/bridge/perf_recipes/llama), AutoModel `*_proj`
(examples/llm_benchmark, *_peft_benchmark*.yaml); on several devices it checkpoints activations, on
one it does not say so."""
LORA_RANK: Final = 16.0
SUPER_BF16_LAYERS: Final = 14.0
"""Layers at its end that Nemotron-3 Super keeps in bf16 beside NVFP4, with its multi-token
prediction of two layers each (Megatron-Bridge v0.4.0, scripts/performance/configs/nemotronh:
te_quant.cfg and nemotron_3_llm_pretrain.py)."""
FULL_GRAPH_FROM: Final = (26, 6)
"""Container from which MoE recipes on racks capture the whole iteration."""
RACK: Final = 72
"""Devices of a rack's scale-up domain."""
SAME_MEMORY: Final = 0.02
"""Share by which a driver's figure may differ from the datasheet's."""
_CONTAINER: Final = re.compile(r"NeMo (?:container )?(\d\d\.\d\d)")
"""NeMo's pages name their containers above the tables."""
_DATED_PAGE: Final = re.compile(r"_(20\d\d)-?(\d\d)_")
"""torchtitan names its pages of measurements by month."""
_NETWORK: Final = re.compile(r"(\d{2,5}) ?Gbps node-node")


def read_published(path: Path) -> tuple[Row, ...]:
    """Read a published table as a documented one."""
    return tuple(map(documented, read_rows(path)))


def documented(row: Row) -> Row:
    """Return a row in documented columns; one that cannot be read stays as it is."""
    if row.reason:
        return row
    row = _with_texts(row, release=_release(row), gpu=_device_name(row))
    row = replace(row, architecture=_architecture(row))
    try:
        shape, device = parse_shape(row), find_device(row.text("gpu"))
    except (ValueError, UnknownDeviceError):
        return row
    family = identify_engine(row)[0].family
    row = _with_devices(_with_numbers(row, shape))
    row = _with_recipe(row, shape, device) if family == "nemo" else _with_dispatch(row, shape)
    if family == "torchtitan":
        row = _with_titan(row)
    if family == "automodel":
        row = _with_automodel(row)
    if row.source in WITHOUT_OVERLAP:
        row = _with_flags(row, overlap_grad_reduce=False)
    if row.text("workload") in ("lora", "peft") and family in LORA:
        row = _with_texts(row, lora_targets=LORA[family] + ("+experts" if shape.experts else ""))
        row = replace(row, numbers={**row.numbers, "lora_rank": LORA_RANK})
    return row


def _release(row: Row) -> str:
    """Return the software of a row and its version."""
    name = RELEASES.get(row.source, "")
    if row.text("release") or not name:
        return row.text("release")
    container = _CONTAINER.search(row.text("notes"))
    dated = _DATED_PAGE.search(row.text("url"))
    if name == "nemo" and container:
        return f"nemo-{container.group(1)}"
    if name == "torchtitan" and dated:
        return f"torchtitan-{dated.group(1)}.{dated.group(2)}"
    is_megascale = row.source == "megascale-paper" and row.text("notes").startswith("MegaScale")
    return "megascale" if is_megascale else name


def _device_name(row: Row) -> str:
    """Return the device of a row, by its memory where only that is stated."""
    stated = re.search(r"unstated.*?(\d+) GiB", row.text("gpu"))
    if stated is None:
        return row.text("gpu")
    wanted = float(stated.group(1)) * 2.0**30
    near = [one for one in DEVICES.values() if abs(one.memory_bytes / wanted - 1.0) < SAME_MEMORY]
    return near[0].name if len(near) == 1 else row.text("gpu")


def _architecture(row: Row) -> dict[str, object]:
    """Return a row's architecture with its multi-token prediction and its usual sequence.

    DeepSeek-V3 is trained with one such layer unless notes say otherwise, Nemotron-3 with two, by
    the FLOP per token that Megatron-Bridge prints: DeepSeek-V3 260 GFLOP with it, 250 without;
    Nemotron-3 Super 84.7, Ultra 359, 3.5 Lightning 28.1 with two, which are one layer's weights
    applied twice (`mtp_use_repeated_layer`), and Nano 22.3 with none.
    """
    read = dict(row.architecture)
    if not read and find_model(row.text("model")) is None:
        return read
    notes, words = row.text("notes"), _nemotron_words(row)
    is_deepseek = row.text("model").lower().replace("-", "").startswith("deepseekv3")
    by_default = is_deepseek and row.source in ("megatron-bridge", "deepseek-v3-paper")
    layers = 0
    if "w/o MTP" not in notes:
        layers = (
            2 if words & {"super", "ultra", "lightning"} else int(by_default or "w/ MTP" in notes)
        )
    if layers:
        read.setdefault("mtp_layers", layers)
    if "seq" not in row.numbers and row.source in SEQUENCES:
        read.setdefault("seq", SEQUENCES[row.source])
    return read


def _nemotron_words(row: Row) -> frozenset[str]:
    """Words of a Nemotron-3 model's name; none of other models'."""
    words = frozenset(name_words(row.text("model")))
    return words if {"nemotron", "3"} <= words and "llama" not in words else frozenset()


def _with_numbers(row: Row, shape: ModelShape) -> Row:
    """Add the network of a server and the share of layers in bf16."""
    numbers = dict(row.numbers)
    printed = _NETWORK.search(row.text("notes"))
    gbit_per_s = float(printed.group(1)) if printed else NODE_GBIT_PER_S.get(row.source)
    if gbit_per_s is not None:
        numbers["node_gbit_per_s"] = gbit_per_s
    if "super" in _nemotron_words(row) and "nvfp4" in row.text("precision").lower():
        predicting = 2.0 * float(shape.mtp_layers)
        layers = float(shape.dense_layers + shape.moe_layers) + predicting
        numbers["bf16_share"] = (SUPER_BF16_LAYERS + predicting) / layers
    return replace(row, numbers=numbers)


def _with_devices(row: Row) -> Row:
    """Correct a count of devices that is printed too large."""
    factor = COUNTED_TOO_OFTEN.get(row.source)
    if factor is None or "num_gpus" not in row.numbers:
        return row
    ranks = row.number_or("tp", 1.0) * row.number_or("pp", 1.0) * row.number_or("cp", 1.0)
    devices = row.numbers["num_gpus"]
    if devices != factor * ranks * row.number_or("dp", devices / ranks):
        return row
    return replace(row, numbers={**row.numbers, "num_gpus": devices / factor})


def _with_recipe(row: Row, shape: ModelShape, device: Datasheet) -> Row:
    """Add the flags of most recipes of Megatron-Bridge to a row whose own is not known."""
    if "a2a_overlap" in row.flags or row.text("recipe_match") in ("exact", "layout"):
        is_guess = row.text("recipe_match") in ("near", "none")
        return _with_texts(row, recipe_match="exact") if is_guess else row
    is_blackwell = device.generation is Generation.BLACKWELL
    has_experts = bool(shape.experts)
    # Full-iteration graphs are for models of attention alone: every known recipe of a hybrid has
    # partial ones.
    is_whole = not shape.has_linear and (
        parse_precision(row) is GemmPrecision.NVFP4
        if not has_experts
        else version_of(identify_engine(row)[1]) >= FULL_GRAPH_FROM
        and device.scale_up_domain >= RACK
    )
    is_partial = has_experts and is_blackwell and not is_whole
    states_recompute = any(row.text(name) for name in ("recompute", "recompute_modules"))
    row = _with_flags(
        row,
        a2a_overlap=has_experts and (is_whole or "ep overlap on" in row.text("notes").lower()),
        fused_grouped_mlp=has_experts and is_whole,
    )
    row = _with_texts(
        row,
        dispatcher=("hybridep" if is_blackwell else "deepep") if has_experts else "alltoall",
        cuda_graph="full_iteration" if is_whole else "local" if is_partial else "none",
        cuda_graph_scope="",
        recipe_match="" if states_recompute else row.text("recipe_match") or "none",
    )
    if states_recompute or "recompute_num_layers" in row.numbers:
        return row
    recomputes = shape.is_mla and not device.name.startswith("gb300")
    return _with_texts(row, recompute="mla_up_proj" if recomputes else "none")


def _with_dispatch(row: Row, shape: ModelShape) -> Row:
    """Add dispatcher and overlap where a page's notes name them."""
    notes = row.text("notes").lower()
    if "deepep" in notes or row.source in DEEPEP:
        row = _with_texts(row, dispatcher="deepep")
    elif "hybridep" in notes:
        row = _with_texts(row, dispatcher="hybridep")
    return row


def _with_titan(row: Row) -> Row:
    """Add what torchtitan's pages say in words.

    In 2024 a batch was cut into as many micro-batches as a pipeline has ranks, however many stages
    each holds (build_pipeline_schedule of commit 9dec370; as many as stages from commit 90567fc of
    January 2025 on), later into single sequences (torchtitan's pipeline_parallel_microbatches,
    ..._microbatch_size).
    """
    notes, numbers = row.text("notes"), dict(row.numbers)
    if "torch.compile" in notes or "eager" in notes:
        row = _with_flags(row, compiled="torch.compile" in notes)
    if "async TP" in notes or "AsyncTP" in notes:
        row = _with_flags(row, tensor_overlap=True)
    if PLAIN_ALLOCATOR in row.text("url"):
        row = _with_flags(row, expandable_segments=False)
    pipeline = row.number_or("pp", 1.0)
    if pipeline == 1.0:
        return row
    if "Interleaved" in notes:
        numbers.setdefault("vpp", 2.0)
    if "mbs" in numbers or "gbs" in numbers:
        local = row.number_or("mbs", 1.0)
        ranks = row.number_or("tp", 1.0) * pipeline * row.number_or("cp", 1.0)
        data = row.number_or("dp", row.number_or("num_gpus", ranks) / ranks)
        per_rank = local / pipeline
        is_early = identify_engine(row)[1].startswith("2024") and per_rank >= 1.0
        numbers["mbs"] = per_rank if is_early and per_rank % 1.0 == 0.0 else 1.0
        numbers.setdefault("gbs", local * data)
    return replace(row, numbers=numbers)


def _with_automodel(row: Row) -> Row:
    """Add what AutoModel's benchmarks set."""
    model = row.text("model").lower()
    trains_alone = (
        row.text("workload") in ("lora", "peft") and row.number_or("num_gpus", 0.0) == 1.0
    )
    if (model.startswith(KEEPS_ACTIVATIONS) or trains_alone) and not row.text("recompute"):
        row = _with_texts(row, recompute="none", recipe_match="none")
    return _with_flags(row, fused_loss=True) if model.startswith(LINEAR_LOSS) else row


def _with_texts(row: Row, **texts: str) -> Row:
    merged = {**row.texts, **texts}
    return replace(row, texts={name: text for name, text in merged.items() if text})


def _with_flags(row: Row, **flags: bool) -> Row:
    return replace(row, flags={**row.flags, **flags})


def cells_of(row: Row) -> dict[str, str]:
    """Return a row as the cells of a table."""
    return {
        **row.texts,
        **{name: f"{number:.17g}" for name, number in row.numbers.items()},
        **{name: str(flag).lower() for name, flag in row.flags.items()},
        **({"arch_json": json.dumps(row.architecture)} if row.architecture else {}),
    }


def write_table(rows: Sequence[Row]) -> None:
    """Write a documented table to standard output."""
    cells = [cells_of(row) for row in rows]
    names = list(dict.fromkeys(name for row in cells for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)


if __name__ == "__main__":
    write_table(read_published(Path(sys.argv[1])))
