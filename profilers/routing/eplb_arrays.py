"""Counts as a bare array, the `weight` of EPLB's call: [layers][E], or [passes][layers][E].

    .npy, .npz    numpy; objects, which would be pickles, are refused
    .pt           a tensor of torch.save; vLLM-Ascend's offline script reads such a file too

An archive holds one array, or one named as below. Experts are logical: counts of physical ones
(vLLM's `expert_load_window`) have to be folded with their map first, see ascend.py.
"""

import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from profilers.files import open_regular, read_bounded
from profilers.routing import archives, tensors
from profilers.routing.archives import names_in
from profilers.routing.npy import npy_array
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.validation import MOST_CELLS, recording_of, whole_counts

NAMES: Final = ("logical_count", "weight", "counts", "expert_load", "load")
MOST_BYTES: Final = MOST_CELLS * 8 + 2**16


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a file.

    Raises:
        ValueError: it is damaged, holds objects, or no such array.
    """
    array = array_of(path)
    axes = "passes layers experts" if array.ndim == 3 else "layers experts"
    counts = whole_counts(array, what="its array", axes=axes)
    return recording_of(counts if counts.ndim == 3 else counts[None], naming=naming)


def array_of(path: Path) -> npt.NDArray[Any]:
    """The array in a file of numpy or torch, checked for nothing but its size."""
    with open_regular(path) as file:
        head = file.read(6)
    if head == b"\x93NUMPY" or is_npz(path):
        return _numpy(path)
    loaded = tensors.load(path)
    if isinstance(loaded, dict):
        loaded = _chosen(loaded)
    if not isinstance(loaded, np.ndarray):
        raise ValueError(f"holds a {type(loaded).__name__}; expected one tensor of counts")  # noqa: TRY004
    return loaded


def _numpy(path: Path) -> npt.NDArray[Any]:
    names = names_in(path, most_bytes=MOST_BYTES)
    if not names:
        return npy_array(read_bounded(path, most_bytes=MOST_BYTES))
    name = _chosen({each.removesuffix(".npy"): each for each in names})
    try:
        with zipfile.ZipFile(path) as archive:
            return npy_array(archive.read(name))
    except archives.DAMAGED as error:
        raise ValueError(f"damaged or cut short: {error}") from error


def _chosen(arrays: dict[Any, Any]) -> Any:
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    if named := [name for name in NAMES if name in arrays]:
        return arrays[named[0]]
    names = ", ".join(sorted(str(name)[:40] for name in arrays)[:8]) or "none"
    raise ValueError(f"holds the arrays {names}; expected one, or one named {NAMES[0]!r}")


def is_npz(path: Path) -> bool:
    """Whether a file is numpy's archive."""
    names = names_in(path, most_bytes=tensors.MOST_BYTES)
    return bool(names) and all(name.endswith(".npy") for name in names)
