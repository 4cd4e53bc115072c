"""Arrays in files of numpy (`.npy`) and of torch (`.pt`), read without pickles and within bounds.

A bare array of counts, [layers][E] or [passes][layers][E], is the `weight` of EPLB's call and what
vLLM-Ascend's offline script reads. Its experts are logical: counts of physical ones have to be
folded with their map first, see ascend.py.
"""

from pathlib import Path
from tokenize import TokenError
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.files import open_regular, require_regular
from profilers.routing import tensors
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.validation import MOST_CELLS, recording_of, whole_counts

MAGIC: Final = b"\x93NUMPY"
MOST_BYTES: Final = MOST_CELLS * 8 + 2**16
NAMES: Final = ("logical_count", "weight", "counts", "expert_load", "load")
"""Tensors that are taken from a file of several."""
_DAMAGED: Final = (
    ValueError,
    SyntaxError,
    TokenError,
    TypeError,
    LookupError,
    OverflowError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""Exceptions of numpy for a damaged header: it is text that Python parses, and one that is nested
too deeply raises a MemoryError."""


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a file.

    Raises:
        ValueError: it is damaged, holds objects, or no such array.
    """
    array, axes = array_of(path), "layers experts"
    counts = whole_counts(array, what="its array", axes=axes, first="passes")
    return recording_of(counts, naming=naming)


def refuse_archive(path: Path) -> None:
    """Refuse numpy's archive, which earlier releases read.

    Raises:
        ValueError: the file is one by its name.
    """
    if path.suffix == ".npz":
        raise ValueError("is an archive of numpy, which is read no more: save its array as .npy")


def array_of(path: Path) -> npt.NDArray[Any]:
    """The array in a file of numpy or torch, checked for nothing but its size."""
    with open_regular(path) as file:
        head = file.read(len(MAGIC))
    if head == MAGIC:
        return npy_array(path, most_bytes=MOST_BYTES)
    refuse_archive(path)
    loaded = tensors.load(path)
    if isinstance(loaded, dict):
        named = [name for name in NAMES if name in loaded] or list(loaded)[: len(loaded) == 1]
        loaded = loaded[named[0]] if named else loaded
    if not isinstance(loaded, np.ndarray):
        raise ValueError(f"holds a {type(loaded).__name__}; expected one tensor of counts")  # noqa: TRY004
    return loaded


def npy_array(path: Path, *, most_bytes: int) -> npt.NDArray[Any]:
    """Read a `.npy` file, mapped first: the shape of its header gets no room that it does not have.

    Raises:
        OSError: it cannot be read, or has more than `most_bytes`.
        ValueError: it is damaged, cut short, or holds objects, which are pickles.
    """
    require_regular(path, most_bytes=most_bytes)
    try:
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except _DAMAGED as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"no array of plain numbers, damaged or cut short: {reason}") from error
