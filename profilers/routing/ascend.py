"""vLLM-Ascend's load of physical experts, made logical with the expert map beside it.

A folder with

    one *.json          the expert map that `expert_map_record_path` writes: `layer_list` of
                        `device_list` of `device_expert`, logical ids in order of the slots
    one .npy or .pt     the load, [layers][devices][slots] as its workers gather it, with the
                        stages of `eplb_heat_collection_stage` before them where there are several,
                        or [layers][slots of all devices]

The stages are taken as passes. Layers count the MoE layers from 0. A bare tensor [layers][E], which
vLLM-Ascend's offline script reads, is logical already: see sglang.py.

Source: vllm-project/vllm-ascend at 182b75e, vllm_ascend/eplb: eplb_updator.py, core/eplb_utils.py.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from profilers.routing import sglang
from profilers.routing.contents import contents, read_object
from profilers.routing.recording import (
    MOST_EXPERTS,
    Recording,
    logical_counts,
    numbers,
    recording_of,
)

ARRAYS: Final = (".npy", ".pt")


def read(path: Path) -> Recording:
    """Read a folder of a map and a load, or only the load if it is logical.

    Raises:
        ValueError: one of the two is missing or they do not fit each other.
    """
    if path.is_file():
        return sglang.read(path)
    maps = sorted(path.glob("*.json"))
    loads = sorted(file for file in path.iterdir() if file.suffix in ARRAYS)
    if len(maps) != 1 or len(loads) != 1:
        raise ValueError(
            f"{len(maps)} .json and {len(loads)} of {', '.join(ARRAYS)}; there must be one expert"
            " map and one load"
        )
    rows, axes = experts_of_slots(read_object(maps[0])), "layers slots"
    map_RS = numbers(rows, what="its expert map", axes=axes, largest=MOST_EXPERTS - 1)
    load = np.asarray(contents(loads[0]))
    layers, slots = map_RS.shape
    # Devices are consecutive runs of slots, so joining them keeps the order of the map.
    is_fit = any(
        load.shape[before : before + 1] == (layers,)
        and load.ndim - before <= 3
        and math.prod(load.shape[before + 1 :]) == slots
        for before in (0, 1)
    )
    if not is_fit:
        raise ValueError(
            f"{loads[0].name} has shape {list(load.shape)}, {maps[0].name} {layers} layers of"
            f" {slots} slots in all; it must be [layers][devices][slots]"
        )
    what = loads[0].name
    load_PRS = numbers(load.reshape(-1, layers, slots), what=what, axes=f"passes {axes}")
    return recording_of(logical_counts(load_PRS, map_RS))


def experts_of_slots(values: Mapping[str, Any]) -> list[list[int]]:
    """The logical expert of every slot, [layers][slots of all devices], of an expert map.

    Raises:
        ValueError: it is none.
    """
    try:
        layers = sorted(values["layer_list"], key=lambda layer: int(layer["layer_id"]))
        return [
            [
                expert
                for device in sorted(
                    layer["device_list"], key=lambda entry: int(entry["device_id"])
                )
                for expert in device["device_expert"]
            ]
            for layer in layers
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "its expert map lacks layer_list, layer_id, device_list or device_expert; write it anew"
        ) from error
