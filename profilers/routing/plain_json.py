"""Routing in the project's own JSON layout, which tuner/spec/routing.py reads for training too.

    model, domain              optional texts
    num_logical_experts        E
    top_k                      optional
    layer_ids                  absolute decoder layers, ascending, L of them
    logical_count              [L][E] token copies over the whole recording
    passes                     optional [P][L][E], some or all passes in order of time
    transition_all_pairs       optional {"0->7": [E][E], ...} between consecutive recorded layers
    transition_rank_aligned    the same, k-th choice to k-th choice
    transition_top1            the same, best choice to best choice

Where there are passes, they are the recording: `logical_count` may cover more tokens than were kept
pass by pass. Of several transitions the first in the order above is taken.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from profilers.routing.json_file import read_object
from profilers.routing.overrides import Naming
from profilers.routing.recording import Floats, Recording
from profilers.routing.validation import recording_of, whole_counts, whole_floats

TRANSITIONS: Final = ("all_pairs", "rank_aligned", "top1")
MOST_EXPERTS: Final = 100_000


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a file.

    Raises:
        ValueError: a field is missing, of another shape, or no count.
    """
    values = read_object(path)
    num_experts = _count(values, "num_logical_experts")
    layer_ids = _layer_ids(values.get("layer_ids"))
    shape = (len(layer_ids), num_experts)
    if values.get("passes"):
        count_PLE = whole_counts(values["passes"], what="passes", axes="passes layers experts")
        what = "passes"
    else:
        total_LE = values.get("logical_count")
        count_PLE = whole_counts(total_LE, what="logical_count", axes="layers experts")[None]
        what = "logical_count"
    if count_PLE.shape[1:] != shape:
        parsed = list(count_PLE.shape[1:])
        raise ValueError(
            f"{what} has {parsed[0]} layers of {parsed[1]} experts; layer_ids and"
            f" num_logical_experts say {shape[0]} of {shape[1]}"
        )
    empty = np.flatnonzero(~count_PLE.any(axis=(0, 2)))
    if empty.size:
        raise ValueError(
            f"{what}: layer {layer_ids[empty[0]]} has no tokens; leave the layer out or record it"
        )
    transition, kind = _transition(values, layer_ids=layer_ids, num_experts=num_experts)
    return recording_of(
        count_PLE,
        naming=naming,
        row_ids=layer_ids,
        model=_text(values, "model"),
        workload=_text(values, "domain"),
        top_k=_count(values, "top_k") if values.get("top_k") is not None else None,
        transition_MEE=transition,
        transition_kind=kind,
    )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    return " ".join(str(value).split())[:200] if value is not None else ""


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_EXPERTS:
        raise ValueError(f"{name}: {str(value)[:40]!r} is not a whole number in 1..{MOST_EXPERTS}")
    return value


def _layer_ids(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not values:
        raise ValueError("layer_ids must list the absolute layers of the rows")
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in values):
        raise ValueError("layer_ids must be whole numbers")
    if values[0] < 0 or values != sorted(set(values)):
        raise ValueError(f"layer_ids {values[:8]} must ascend from 0 on")
    return tuple(values)


def _transition(
    values: Mapping[str, Any], *, layer_ids: tuple[int, ...], num_experts: int
) -> tuple[Floats | None, str]:
    names = [f"{one}->{other}" for one, other in itertools.pairwise(layer_ids)]
    for kind in TRANSITIONS:
        stated = values.get(f"transition_{kind}")
        if not isinstance(stated, dict) or not names or not all(name in stated for name in names):
            continue
        array = whole_floats(
            [stated[name] for name in names],
            what=f"transition_{kind}",
            axes="pairs experts experts",
        )
        if array.shape[1:] != (num_experts, num_experts):
            raise ValueError(
                f"transition_{kind} is of {array.shape[1]} x {array.shape[2]} experts, not of"
                f" {num_experts} x {num_experts}"
            )
        return array, kind
    return None, TRANSITIONS[0]
