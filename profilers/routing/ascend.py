"""vLLM-Ascend's load of physical experts, made logical with the expert map beside it.

A folder with

    one *.json          the expert map that `expert_map_record_path` writes: `layer_list` of
                        `device_list` of `device_expert`, logical ids in order of the slots
    one .npy or .pt     the load, [layers][devices][slots] as its workers gather it, with the
                        stages of `eplb_heat_collection_stage` before them where there are several,
                        or [layers][slots of all devices]

The stages are taken as passes. Layers count the MoE layers from 0. A bare tensor [layers][E], which
vLLM-Ascend's offline script reads, is logical already: see arrays.py.

Source: vllm-project/vllm-ascend at 182b75e, vllm_ascend/eplb: eplb_updator.py, core/eplb_utils.py.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.routing import arrays
from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.validation import recording_of, require_room, whole_counts

ARRAYS: Final = (".npy", ".pt")
AXES: Final = "passes layers slots"


def is_map(values: Mapping[str, Any]) -> bool:
    """Return whether a JSON object is an expert map."""
    return "layer_list" in values


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a folder of a map and a load, or only the load if it is logical.

    Raises:
        ValueError: one of the two is missing or they do not fit each other.
    """
    if path.is_file():
        return arrays.read(path, naming=naming)
    maps = sorted(path.glob("*.json"))
    loads = sorted(file for file in path.iterdir() if file.suffix in ARRAYS)
    if len(maps) != 1 or len(loads) != 1:
        raise ValueError(
            f"{len(maps)} .json and {len(loads)} of {', '.join(ARRAYS)}; there must be one expert"
            " map and one load"
        )
    rows = experts_of_slots(read_object(maps[0]))
    map_RP = whole_counts(rows, what="its expert map", axes="layers slots")
    load = arrays.array_of(loads[0])
    layers, slots = map_RP.shape
    if load.shape not in _shapes(load, layers=layers, slots=slots):
        raise ValueError(
            f"{loads[0].name} has shape {list(load.shape)}, {maps[0].name} {layers} layers of"
            f" {slots} slots in all; it must be [layers][devices][slots]"
        )
    # Devices are consecutive runs of slots, so flattening them keeps the order of the map.
    what = loads[0].name
    load_PRP = whole_counts(load.reshape(-1, layers, slots), what=what, axes=AXES)
    require_room(load_PRP.shape[0], layers, int(map_RP.max()) + 1)
    logical = np.zeros((load_PRP.shape[0], layers, int(map_RP.max()) + 1), dtype=np.int64)
    places = (np.arange(layers)[:, None], map_RP)
    for one, physical_RP in zip(logical, load_PRP, strict=True):
        np.add.at(one, places, physical_RP)
    return recording_of(logical, naming=naming)


def _shapes(load: npt.NDArray[Any], *, layers: int, slots: int) -> tuple[tuple[int, ...], ...]:
    """The shapes that a load of this many axes may have."""
    if not load.ndim:
        return ()
    rows = ((layers, slots), (layers, load.shape[-2] if load.ndim > 2 else 1, load.shape[-1]))
    fit = tuple(shape for shape in rows if math.prod(shape[1:]) == slots)
    return (*fit, *((load.shape[0], *shape) for shape in fit))


def experts_of_slots(values: Mapping[str, Any]) -> list[list[int]]:
    """The logical expert of every slot, [layers][slots of all devices], of an expert map.

    Raises:
        ValueError: it is none.
    """
    try:
        layers = sorted(values["layer_list"], key=lambda each: int(each["layer_id"]))
        return [
            [
                expert
                for device in sorted(layer["device_list"], key=lambda each: int(each["device_id"]))
                for expert in device["device_expert"]
            ]
            for layer in layers
        ]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "its expert map lacks layer_list, layer_id, device_list or device_expert; write it anew"
        ) from error
