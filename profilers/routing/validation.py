"""Checks of an importer's raw numbers, independent of the format, that make a `Recording`.

    P passes   R rows of the source   L recorded MoE layers   E experts

Many sources have a row for every decoder layer and leave those of dense layers at zero. A row that
is zero in every pass is therefore a dense layer, or one that nothing was recorded of, and is left
out of the recording; so are its rows in whatever else the source holds.

Each message names the value, the rule and the way out; the caller puts the file before it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.routing.overrides import Naming, shown
from profilers.routing.recording import Counts, Floats, Recording

MOST_CELLS: Final = 2**26
"""Counts of one recording: 0.5 GiB, e.g. 4,500 passes of 58 layers of 256 experts."""
LARGEST_COUNT: Final = 2**53
"""Largest count; above it a float does not hold every whole number."""


def whole_counts(values: Any, *, what: str, axes: str, first: str = "") -> Counts:
    """Check that these are counts on as many axes as `axes` has words.

    Args:
        values: the counts.
        what: their name.
        axes: names of the axes.
        first: an axis that may come before them; without it the counts get one of length 1.

    Raises:
        ValueError: they are ragged, empty, too many, not numbers, negative or not whole.
    """
    array = _numbers(values, what=what, axes=axes, first=first)
    if not np.isfinite(array).all():
        raise ValueError(f"{what}{_place(~np.isfinite(array))} is not a finite number; record anew")
    if (array < 0).any():
        place = _place(array < 0)
        raise ValueError(f"{what}{place} is {array[array < 0][0]}; a count cannot be negative")
    if array.dtype.kind == "f" and (array != np.rint(array)).any():
        wrong = array != np.rint(array)
        raise ValueError(
            f"{what}{_place(wrong)} is {array[wrong][0]}; counts are whole numbers of token copies"
        )
    if (array > LARGEST_COUNT).any():
        raise ValueError(f"{what}{_place(array > LARGEST_COUNT)} is more than {LARGEST_COUNT}")
    counts = array.astype(np.int64)
    return counts[None] if first and counts.ndim == len(axes.split()) else counts


def whole_floats(values: Any, *, what: str, axes: str) -> Floats:
    """Check the same of numbers that may have fractions, such as transitions."""
    array = _numbers(values, what=what, axes=axes).astype(np.float64)
    wrong = ~np.isfinite(array) | (array < 0)
    if wrong.any():
        raise ValueError(f"{what}{_place(wrong)} is {array[wrong][0]}; it must be 0 or more")
    return array


def require_room(*shape: int) -> None:
    """Refuse a table of counts that would not fit, before it is made.

    Raises:
        ValueError: it has more than `MOST_CELLS` places.
    """
    if math.prod(shape) > MOST_CELLS:
        raise ValueError(f"{' x '.join(map(str, shape))} counts; at most {MOST_CELLS} are read")


def recording_of(
    count_PRE: Counts,
    *,
    naming: Naming,
    row_ids: Sequence[int] = (),
    model: str = "",
    workload: str = "",
    top_k: int | None = None,
    num_decoder_layers: int | None = None,
    token_LTK: npt.NDArray[np.int32] | None = None,
    transition_MEE: Floats | None = None,
    transition_kind: str = "all_pairs",
) -> Recording:
    """Put a recording together; what the user says of it goes before what the source says.

    Args:
        count_PRE: counts of every row of the source.
        naming: what the user says.
        row_ids: the absolute layer of each row where the source says it; rows count from 0 else.
        model: as the source names it.
        workload: as the source names it.
        top_k: experts of a token where the source says it.
        num_decoder_layers: of the model where the source says it; dropped where the user names
            the layers.
        token_LTK: chosen experts of sampled tokens, in the rows with tokens.
        transition_MEE: between consecutive rows with tokens.
        transition_kind: see `Recording`.

    Raises:
        ValueError: no row has tokens, or the layers or choices do not fit the counts.
    """
    total_RE = count_PRE.sum(axis=0)
    kept = np.flatnonzero(total_RE.any(axis=1))
    if kept.size == 0:
        raise ValueError("every count is zero, so no token was recorded; record while serving some")
    ids = row_ids or tuple(range(total_RE.shape[0]))
    chosen = naming.top_k if naming.top_k is not None else top_k
    if chosen is not None and chosen > total_RE.shape[1]:
        raise ValueError(f"top_k {chosen} is more than the {total_RE.shape[1]} experts of a layer")
    _require_choices(chosen, token_LTK)
    return Recording(
        model=naming.model or model,
        workload=naming.workload or workload,
        layer_ids=_named(naming, kept=tuple(kept.tolist()), ids=tuple(ids)),
        num_decoder_layers=None if naming.layer_ids else num_decoder_layers,
        top_k=chosen,
        count_PLE=np.ascontiguousarray(count_PRE[:, kept]),
        transition_MEE=transition_MEE,
        transition_kind=transition_kind,
        token_LTK=token_LTK,
    )


def renamed(recording: Recording, naming: Naming) -> Recording:
    """A recording with what the user says of it in the place of what it said.

    Raises:
        ValueError: the layers or choices do not fit it.
    """
    if naming.num_experts not in (None, recording.num_experts):
        raise ValueError(f"has {recording.num_experts} experts, not {naming.num_experts}")
    _require_choices(naming.top_k, recording.token_LTK)
    return replace(
        recording,
        model=naming.model or recording.model,
        workload=naming.workload or recording.workload,
        layer_ids=naming.layer_ids or recording.layer_ids,
        num_decoder_layers=None if naming.layer_ids else recording.num_decoder_layers,
        top_k=naming.top_k or recording.top_k,
    )


def _require_choices(top_k: int | None, token_LTK: npt.NDArray[np.int32] | None) -> None:
    if token_LTK is not None and top_k not in (None, token_LTK.shape[2]):
        raise ValueError(f"top_k {top_k}, yet its tokens chose {token_LTK.shape[2]} experts each")


def _named(naming: Naming, *, kept: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    said = naming.layer_ids
    if not said:
        return tuple(ids[row] for row in kept)
    if len(said) == len(kept):
        return said
    if len(said) == len(ids):
        return tuple(said[row] for row in kept)
    raise ValueError(
        f"{len(said)} layer ids ({shown(said)}) for {len(ids)} layers, {len(kept)} with tokens;"
        " name all of either"
    )


def _numbers(values: Any, *, what: str, axes: str, first: str = "") -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{what}: rows differ in length; all layers need equally many") from error
    wanted = axes.split()
    if array.dtype.kind not in "iuf":
        raise ValueError(
            f"{what} holds {array.dtype} values; counts are numbers in rows of one length"
        )
    if array.ndim - len(wanted) not in {0, int(bool(first))} or 0 in array.shape:
        shape = list(array.shape)
        raise ValueError(f"{what} has shape {shape}; it must be [{']['.join(wanted)}]")
    if array.size > MOST_CELLS:
        raise ValueError(f"{what} has {array.size} numbers; at most {MOST_CELLS} are read")
    return array


def _place(wrong: npt.NDArray[np.bool_]) -> str:
    first = np.argwhere(wrong)[0]
    return "".join(f"[{index}]" for index in first)
