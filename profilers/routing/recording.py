"""A recording of routing: how many token copies went to each expert, pass by pass.

    P passes   R rows of the source   L recorded MoE layers   E experts   K experts of a token
    M = L - 1 pairs of consecutive recorded layers   T sampled tokens   S slots of all devices

Only counts are required; what else a source holds is kept where it is known and None where not.
Ids are logical experts throughout: importers undo an engine's own placement. Many sources have a
row for every decoder layer and leave those of dense layers at zero: a row that is zero in every
pass is of a dense layer, or one that nothing was recorded of, and is left out.

Each message names the value, the rule and the way out; the caller puts the file before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

MOST_CELLS: Final = 2**26
"""Counts of one recording: 0.5 GiB, e.g. 4,500 passes of 58 layers of 256 experts."""
MOST_EXPERTS: Final = 16_384
LARGEST_COUNT: Final = 2**53
"""Largest count; above it a float does not hold every whole number."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recording:
    """Routing of one workload through one model.

    Raises:
        ValueError: an array or id disagrees with the counts.
    """

    model: str = ""
    """Model name of the source; empty where it gives none."""
    workload: str = ""
    """Kind of tokens: a domain, a data set, a traffic class."""
    layer_ids: tuple[int, ...]
    """Absolute decoder layers of the recorded MoE layers, ascending."""
    top_k: int | None = None
    """Experts of a token; None where the source does not say."""
    count_PLE: Counts
    """Token copies of each expert in each pass; one pass where the source holds totals only."""
    transition_MEE: Floats | None = None
    """Token copies that used e in one recorded layer and f in the next; every pair of choices of a
    token counts one, unless `transition_kind` says otherwise."""
    transition_kind: str = "all_pairs"
    """`all_pairs`, `top1` (best choice to best choice) or `rank_aligned` (k-th to k-th)."""
    token_LTK: Ids | None = None
    """Chosen experts of sampled tokens, whole tokens through all layers; best choice first where
    the source keeps that order, in order of ids where it does not."""
    num_decoder_layers: int | None = None
    """Decoder layers of the model, dense ones included; None where the source does not say."""

    def __post_init__(self) -> None:
        layers, experts = self.count_PLE.shape[1:]
        between, tokens = self.transition_MEE, self.token_LTK
        if len(self.layer_ids) != layers or not _ascend(self.layer_ids):
            raise ValueError(
                f"layer ids {_shown(self.layer_ids)}: {layers} layers with tokens need as many"
                " ascending ids"
            )
        empty = np.flatnonzero(~self.count_PLE.any(axis=(0, 2)))
        if empty.size:
            raise ValueError(
                f"layer {self.layer_ids[empty[0]]} has no tokens; leave it out or record it"
            )
        if self.num_decoder_layers is not None and self.layer_ids[-1] >= self.num_decoder_layers:
            raise ValueError(
                f"layer {self.layer_ids[-1]} of a model of {self.num_decoder_layers} decoder layers"
            )
        if self.top_k is not None and self.top_k > experts:
            raise ValueError(f"top_k {self.top_k} is more than the {experts} experts of a layer")
        if between is not None and between.shape != (layers - 1, experts, experts):
            raise ValueError(
                f"transitions {between.shape} of {layers} layers with tokens, {experts} experts"
            )
        if tokens is not None and (len(tokens), tokens.shape[2]) != (layers, self.top_k):
            raise ValueError(
                f"top_k {self.top_k}, yet its tokens chose {tokens.shape[2]} experts each in"
                f" {len(tokens)} of {layers} layers"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)

    @property
    def num_passes(self) -> int:
        """P."""
        return int(self.count_PLE.shape[0])

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.count_PLE.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.count_PLE.shape[2])

    @property
    def count_LE(self) -> Counts:
        """Token copies over all passes."""
        return np.asarray(self.count_PLE.sum(axis=0), dtype=np.int64)


def recording_of(count_PRE: Counts, *, row_ids: Sequence[int] = (), **facts: Any) -> Recording:
    """Put a recording together from the rows that have tokens.

    Args:
        count_PRE: counts of every row of the source.
        row_ids: the absolute layer of each row where the source says it; rows count from 0 else.
        facts: other fields of the recording.

    Raises:
        ValueError: no row has tokens, or a fact does not fit the counts.
    """
    kept = np.flatnonzero(count_PRE.any(axis=(0, 2)))
    if kept.size == 0:
        raise ValueError("every count is zero, so no token was recorded; record while serving some")
    ids = tuple(row_ids) or range(count_PRE.shape[1])
    return Recording(
        layer_ids=tuple(int(ids[row]) for row in kept),
        count_PLE=np.ascontiguousarray(count_PRE[:, kept]),
        **facts,
    )


def named(
    recording: Recording,
    *,
    model: str = "",
    workload: str = "",
    layer_ids: tuple[int, ...] = (),
    top_k: int | None = None,
    num_experts: int | None = None,
    has_all_experts: bool = True,
) -> Recording:
    """Return a recording with what the user states in the place of what it said.

    Args:
        recording: as its source says.
        model: name of the model.
        workload: kind of tokens.
        layer_ids: absolute decoder layers of the rows with tokens.
        top_k: experts of a token.
        num_experts: experts of a layer.
        has_all_experts: the source says how many experts there are; where it does not, those beyond
            the recorded ones were chosen by no token.

    Raises:
        ValueError: the layers, choices or experts do not fit it.
    """
    more = (num_experts or recording.num_experts) - recording.num_experts
    if more < 0 or (more and has_all_experts):
        raise ValueError(f"has {recording.num_experts} experts, not {num_experts}")
    require_room(recording.num_passes, recording.num_layers, recording.num_experts + more)
    count_PLE, between = recording.count_PLE, recording.transition_MEE
    if more:
        count_PLE = np.pad(count_PLE, ((0, 0), (0, 0), (0, more)))
        between = None if between is None else np.pad(between, ((0, 0), (0, more), (0, more)))
    return replace(
        recording,
        model=model or recording.model,
        workload=workload or recording.workload,
        layer_ids=layer_ids or recording.layer_ids,
        num_decoder_layers=None if layer_ids else recording.num_decoder_layers,
        top_k=top_k or recording.top_k,
        count_PLE=count_PLE,
        transition_MEE=between,
    )


def numbers(
    values: Any,
    *,
    what: str,
    axes: str,
    first: str = "",
    least: int = 0,
    largest: int = LARGEST_COUNT,
    are_whole: bool = True,
) -> npt.NDArray[Any]:
    """Check that these are numbers on as many axes as `axes` has words, and return them.

    Args:
        values: the numbers.
        what: their name.
        axes: names of the axes.
        first: an axis that may come before them; without it the numbers get one of length 1.
        least: smallest number.
        largest: largest number.
        are_whole: fractions are refused.

    Raises:
        ValueError: they are ragged, empty, too many, or one is not such a number.
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what}: rows differ in length; all need equally many") from error
    names = axes.split()
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"{what} holds {array.dtype} values; counts are numbers in rows of one length"
        )
    if array.ndim - len(names) not in {0, int(bool(first))} or 0 in array.shape:
        raise ValueError(f"{what} has shape {list(array.shape)}; it must be [{']['.join(names)}]")
    require_room(*array.shape)
    # No comparison holds of what is not a number.
    wrong = ~((array >= least) & (array <= largest))
    if are_whole and array.dtype.kind == "f":
        wrong |= array != np.rint(array)
    if wrong.any():
        place = "".join(f"[{index}]" for index in np.argwhere(wrong)[0])
        kind = "whole number" if are_whole else "number"
        raise ValueError(
            f"{what}{place} is {array[wrong][0]}; it must be a {kind} from {least} to {largest}"
        )
    array = array.astype(np.int64 if are_whole else np.float64)
    return array[None] if first and array.ndim == len(names) else array


def logical_counts(physical_PRS: Counts, map_RS: Counts) -> Counts:
    """Add the counts of each expert's slots, [P, R, E], by the expert in every slot.

    Raises:
        ValueError: they do not fit.
    """
    # Every expert has a slot, so the largest id says how many there are.
    shape = (*physical_PRS.shape[:2], int(map_RS.max()) + 1)
    require_room(*shape)
    logical_PRE = np.zeros(shape, dtype=np.int64)
    rows = np.arange(len(map_RS))[:, None]
    for logical_RE, physical_RS in zip(logical_PRE, physical_PRS, strict=True):
        np.add.at(logical_RE, (rows, map_RS), physical_RS)
    return logical_PRE


def require_room(*shape: int) -> None:
    """Refuse a table that would not fit, before it is made.

    Raises:
        ValueError: it has more than `MOST_CELLS` places.
    """
    if math.prod(shape) > MOST_CELLS:
        raise ValueError(f"{' x '.join(map(str, shape))} numbers; at most {MOST_CELLS} are read")


def _ascend(ids: tuple[int, ...]) -> bool:
    return list(ids) == sorted(set(ids))


def _shown(ids: tuple[int, ...]) -> str:
    """Name a few of them."""
    few = ", ".join(str(layer) for layer in ids[:8])
    return f"{few}, ... ({len(ids)} in all)" if len(ids) > 8 else few or "none"
