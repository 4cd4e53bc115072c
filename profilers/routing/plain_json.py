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
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from pydantic import BaseModel, Field

from profilers.routing.contents import read_object
from profilers.routing.recording import Floats, Recording, numbers, recording_of

TRANSITIONS: Final = ("all_pairs", "rank_aligned", "top1")

Experts = Annotated[int, Field(ge=1, le=100_000)]


class _File(BaseModel, strict=True):
    """The fields of a file; others are not read."""

    model: str | None = None
    domain: str | None = None
    num_logical_experts: Experts
    top_k: Experts | None = None
    layer_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    logical_count: Any = None
    passes: Any = None
    transition_all_pairs: Any = None
    transition_rank_aligned: Any = None
    transition_top1: Any = None


def read(path: Path) -> Recording:
    """Read a file.

    Raises:
        ValueError: a field is missing, of another shape, or no count.
    """
    file = _File.model_validate(read_object(path))
    what = "passes" if file.passes else "logical_count"
    count_PLE = numbers(getattr(file, what), what=what, axes="layers experts", first="passes")
    layers, experts = count_PLE.shape[1:]
    if (layers, experts) != (len(file.layer_ids), file.num_logical_experts):
        raise ValueError(
            f"{what} has {layers} layers of {experts} experts; layer_ids and num_logical_experts"
            f" say {len(file.layer_ids)} of {file.num_logical_experts}"
        )
    empty = np.flatnonzero(~count_PLE.any(axis=(0, 2)))
    if empty.size:
        raise ValueError(
            f"{what}: layer {file.layer_ids[empty[0]]} has no tokens; leave it out or record it"
        )
    transition, kind = _transition(file)
    return recording_of(
        count_PLE,
        row_ids=file.layer_ids,
        model=" ".join((file.model or "").split())[:200],
        workload=" ".join((file.domain or "").split())[:200],
        top_k=file.top_k,
        transition_MEE=transition,
        transition_kind=kind,
    )


def _transition(file: _File) -> tuple[Floats | None, str]:
    names = [f"{earlier}->{later}" for earlier, later in itertools.pairwise(file.layer_ids)]
    for kind in TRANSITIONS:
        what = f"transition_{kind}"
        stated = getattr(file, what)
        if names and isinstance(stated, dict) and stated.keys() >= set(names):
            pairs = [stated[name] for name in names]
            return numbers(pairs, what=what, axes="pairs experts experts", are_whole=False), kind
    return None, TRANSITIONS[0]
