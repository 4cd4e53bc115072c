"""Reads the current placement: a `plan.json` or a file of an engine.

    plan.json      `decision.physical_to_logical` with `decision.layer_ids`
    SGLang         {"physical_to_logical_map": [all decoder layers][slots]}
    vLLM-Ascend    {"layer_list": [{"layer_id", "device_list": [{"device_id", "device_expert"}]}]}
    TensorRT-LLM   YAML, `initial_global_assignments` by absolute layer
    EPLB           a JSON list or a `.npy` array [MoE layers][slots]

Rows of MoE layers only are taken in order; rows of all decoder layers by the layers recorded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from profilers.routing.ascend import experts_of_slots
from profilers.routing.contents import npy_array
from profilers.routing.recording import numbers
from solvers.placement.ranks import Placement, Ranks
from tuner.errors import SpecError
from tuner.spec.files import one_line, read_small_text, shown_path
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
    try:
        rows = _rows_of_layers(_values(path, source), layer_ids)
        expert_LS = numbers(rows, what="table", axes="layers slots", largest=num_experts - 1)
    except (KeyError, TypeError) as error:
        raise SpecError(
            f"{source}: no placement in it; expected decision.physical_to_logical,"
            " physical_to_logical_map, layer_list or initial_global_assignments"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpecError(one_line(f"{source}: cannot read the placement: {reason}")) from error
    slots = expert_LS.shape[1]
    if slots % ranks.num_ranks and slots != ranks.num_slots:
        raise SpecError(
            f"{source}: {slots} slots, which the {ranks.num_ranks} ranks of the goal cannot"
            " share evenly; the current placement must have the planned number of ranks"
        )
    for layer, row in zip(layer_ids, expert_LS, strict=True):
        absent = next((expert for expert in range(num_experts) if expert not in row), None)
        if absent is not None:
            raise SpecError(
                f"{source}: layer {layer}: no expert {absent}; every one of 0..{num_experts - 1}"
                " needs a slot"
            )
    if slots != ranks.num_slots:
        slots_per_rank = slots // ranks.num_ranks
        ranks = replace(ranks, slots_G=np.full(ranks.num_ranks, slots_per_rank, dtype=np.int64))
    return Placement(expert_LS=expert_LS), ranks


def _values(path: Path, source: str) -> Any:
    if path.suffix == ".npy":
        return npy_array(path, most_bytes=LARGEST_BYTES).tolist()
    text = read_small_text(path, what="placement", most_bytes=LARGEST_BYTES)
    if path.suffix in (".yaml", ".yml"):
        return parse_yaml(text, source=source, has_numbered_keys=True)
    return json.loads(text)


def _rows_of_layers(values: Any, layer_ids: tuple[int, ...]) -> list[Any]:
    """Return the rows of the recorded layers, in whichever form a file has them."""
    rows: Any = values
    if isinstance(values, dict):
        decision = values.get("decision")
        rows = values.get("physical_to_logical_map", values.get("initial_global_assignments"))
        if isinstance(decision, dict):
            layers, rows = decision["layer_ids"], decision["physical_to_logical"]
            if len(layers) != len(rows):
                raise ValueError(
                    f"{len(layers)} layer_ids and {len(rows)} rows of physical_to_logical, where"
                    " each layer has one; take plan.json as moetune wrote it"
                )
            rows = dict(zip(layers, rows, strict=True))
        elif "layer_list" in values:
            rows = experts_of_slots(values)
    if isinstance(rows, Sequence) and len(rows) == len(layer_ids):
        return list(rows)
    if isinstance(rows, Sequence):
        rows = dict(enumerate(rows))
    if not isinstance(rows, Mapping):
        raise TypeError(f"{type(rows).__name__} is no table")
    missing = next((layer for layer in layer_ids if layer not in rows), None)
    if missing is not None:
        raise ValueError(
            f"layer {missing} was recorded and is not placed there ({len(rows)} layers are); name"
            " the placement of the model that was recorded"
        )
    return [rows[layer] for layer in layer_ids]
