"""Reads the current placement: a `plan.json` or a file of an engine.

    plan.json      `decision.physical_to_logical` with `decision.layer_ids`
    SGLang         {"physical_to_logical_map": [all decoder layers][slots]}
    vLLM-Ascend    {"layer_list": [{"layer_id", "device_list": [{"device_id", "device_expert"}]}]}
    TensorRT-LLM   YAML, `initial_global_assignments` by absolute layer
    EPLB           a JSON list or a `.npy` array [MoE layers][slots]

Rows of MoE layers only are taken in order; rows of all decoder layers by the layers recorded.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from profilers.files import TooLargeError
from profilers.routing.ascend import experts_of_slots
from profilers.routing.contents import npy_array
from solvers.placement.ranks import Ints, Placement, Ranks
from tuner.errors import SpecError
from tuner.spec.files import one_line, read_small_text, shown_path, shown_value
from tuner.spec.yaml_text import parse_yaml

LARGEST_BYTES: Final = 64_000_000


def read_placement(
    path: Path, *, layer_ids: tuple[int, ...], num_experts: int, ranks: Ranks
) -> tuple[Placement, Ranks]:
    """Read a placement with its ranks, checked against the recorded layers and experts.

    Where its number of slots differs from the planned one, ranks have equally many, as in all
    engines that write such a file.

    Raises:
        SpecError: one line: the file, what was found, the rule.
    """
    source = shown_path(path)
    rows = _array(path, source) if path.suffix == ".npy" else _rows(_parse(path, source), source)
    by_layer = rows if isinstance(rows, dict) else _by_layer(rows, layer_ids, source)
    missing = [layer for layer in layer_ids if layer not in by_layer]
    if missing:
        placed = sorted(layer for layer in by_layer if isinstance(layer, int))
        there = f"layers {placed[0]} to {placed[-1]}" if placed else "none"
        raise SpecError(
            f"{source}: layer {missing[0]} was recorded and is not placed there ({there} are); name"
            " the placement of the model that was recorded"
        )
    first = by_layer[layer_ids[0]]
    placed_ranks = _placement_ranks(len(first) if isinstance(first, list) else 0, ranks, source)
    table = [
        _check_row(by_layer[layer], layer, num_experts, placed_ranks, source) for layer in layer_ids
    ]
    return Placement(expert_LS=np.array(table, dtype=np.int64)), placed_ranks


def _placement_ranks(num_slots: int, ranks: Ranks, source: str) -> Ranks:
    if num_slots == ranks.num_slots or not num_slots:
        return ranks
    if num_slots % ranks.num_ranks:
        raise SpecError(
            f"{source}: {num_slots} slots, which the {ranks.num_ranks} ranks of the goal cannot"
            " share evenly; the current placement must have the planned number of ranks"
        )
    each = num_slots // ranks.num_ranks
    return replace(ranks, slots_G=np.full(ranks.num_ranks, each, dtype=np.int64))


def _parse(path: Path, source: str) -> Any:
    text = read_small_text(path, what="placement", most_bytes=LARGEST_BYTES)
    if path.suffix in (".yaml", ".yml"):
        return parse_yaml(text, source=source, has_numbered_keys=True)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise SpecError(f"{source}: nested too deeply for a placement") from error
    except ValueError as error:
        raise SpecError(one_line(f"{source}: not valid JSON: {error}")) from error


def _array(path: Path, source: str) -> list[list[int]]:
    try:
        table = npy_array(path, most_bytes=LARGEST_BYTES)
    except TooLargeError as error:
        raise SpecError(
            f"{source}: larger than {LARGEST_BYTES} bytes, so it is no placement"
        ) from error
    except (OSError, ValueError) as error:
        raise SpecError(one_line(f"{source}: cannot read the placement: {error}")) from error
    if table.ndim != 2 or not np.issubdtype(table.dtype, np.integer):
        raise SpecError(
            f"{source}: {table.dtype} of shape {table.shape}; a placement is whole numbers"
            " [layers][slots]"
        )
    listed: list[list[int]] = table.tolist()
    return listed


def _rows(values: Any, source: str) -> list[Any] | dict[int, Any]:
    if isinstance(values, list):
        return values
    if not isinstance(values, dict):
        raise SpecError(f"{source}: {shown_value(values)} at the top, where a placement belongs")
    if isinstance(values.get("decision"), dict):
        decision = values["decision"]
        rows, layers = decision.get("physical_to_logical"), decision.get("layer_ids")
        if isinstance(rows, list) and isinstance(layers, list) and len(rows) == len(layers):
            return dict(zip(layers, rows, strict=True))
    if isinstance(values.get("physical_to_logical_map"), list):
        return list(values["physical_to_logical_map"])
    if isinstance(values.get("initial_global_assignments"), dict):
        return dict(values["initial_global_assignments"])
    if isinstance(values.get("layer_list"), list):
        try:
            return list(experts_of_slots(values))
        except ValueError as error:
            raise SpecError(f"{source}: {error}") from error
    raise SpecError(
        f"{source}: no placement in it; expected decision.physical_to_logical,"
        " physical_to_logical_map, layer_list or initial_global_assignments"
    )


def _by_layer(rows: list[Any], layer_ids: tuple[int, ...], source: str) -> dict[int, Any]:
    if len(rows) == len(layer_ids):
        return dict(zip(layer_ids, rows, strict=True))
    if len(rows) > layer_ids[-1]:
        return {layer: rows[layer] for layer in layer_ids}
    raise SpecError(
        f"{source}: {len(rows)} rows; the recordings have {len(layer_ids)} MoE layers, the last of"
        f" them decoder layer {layer_ids[-1]}"
    )


def _check_row(row: Any, layer: int, num_experts: int, ranks: Ranks, source: str) -> Ints:
    where = f"{source}: layer {layer}"
    if not isinstance(row, list) or not all(type(expert) is int for expert in row):
        raise SpecError(f"{where}: {shown_value(row)} is no row of expert ids")
    if len(row) != ranks.num_slots:
        raise SpecError(
            f"{where}: {len(row)} slots where {ranks.num_slots} belong; every layer must have as"
            " many"
        )
    if set(row) != set(range(num_experts)):
        stray = next((one for one in row if not 0 <= one < num_experts), None)
        absent = next((one for one in range(num_experts) if one not in set(row)), None)
        problem = f"expert {stray} does not exist" if stray is not None else f"no expert {absent}"
        raise SpecError(f"{where}: {problem}; every one of 0..{num_experts - 1} needs a slot")
    return np.array(row, dtype=np.int64)
