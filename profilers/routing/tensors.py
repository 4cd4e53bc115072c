"""PyTorch's saved files as plain values and numpy arrays; the only importer that needs torch.

`torch.load(weights_only=True)` builds tensors, containers, numbers and text, and nothing else: what
would call a function while it is unpickled is refused before it does. A file is bounded as it lies
and as it unpacks.
"""

import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from profilers.errors import MissingLibraryError
from profilers.files import require_regular
from profilers.out_of_memory import raise_lack_of_memory

MOST_BYTES: Final = 2**32
MOST_TIMES: Final = 4
"""Ratio of the bytes of all tensors to the file's, at most: views of one tensor share them."""
DAMAGED: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    RuntimeError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    AssertionError,
)
"""Exceptions of torch.load and zipfile for a file that is cut short or not one of theirs."""


def load(path: Path, *, mapped: bool = False) -> Any:
    """Read a file of torch.save; its tensors come as numpy arrays.

    Args:
        path: the file.
        mapped: leave tensors as torch's, mapped from the file: enough to see what it holds.

    Raises:
        MissingLibraryError: torch is not installed.
        ValueError: the file is too large, damaged, or would run code.
    """
    if find_spec("torch") is None:
        raise MissingLibraryError(f"{path} needs PyTorch to be read: pip install 'moetune[torch]'")
    import torch

    try:
        held_bytes, is_archive = _held_bytes(path)
        with warnings.catch_warnings():
            # torch warns of pickles of another protocol; unreadable ones are refused anyway.
            warnings.simplefilter("ignore")
            loaded = torch.load(
                path,
                map_location="cpu",
                weights_only=True,
                mmap=mapped and is_archive,
            )
        return loaded if mapped else _Plain(most_bytes=MOST_TIMES * held_bytes).of(loaded)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "refused: a pickle that holds more than tensors and plain values could run code;"
            " save it with torch.save of plain tensors, or as .npy"
        ) from error
    except DAMAGED as error:
        raise_lack_of_memory(error)
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"damaged or cut short: {reason}") from error


def _held_bytes(path: Path) -> tuple[int, bool]:
    """Return the bytes of a file, unpacked if it is a zip archive, and whether it is one.

    Raises:
        ValueError: it is too much to be read.
    """
    size = require_regular(path, most_bytes=MOST_BYTES)
    if not zipfile.is_zipfile(path):
        return size, False
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(file.file_size for file in archive.infolist())
    if unpacked > MOST_BYTES:
        raise ValueError(f"unpacks to {unpacked} bytes; at most {MOST_BYTES} are read")
    return unpacked, True


class _Plain:
    """Makes plain values of what torch has read; what is there twice is made once."""

    def __init__(self, *, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        if id(value) not in self._made:
            self._made[id(value)] = self._new(value)
        return self._made[id(value)]

    def _new(self, value: Any) -> Any:
        if hasattr(value, "element_size"):
            return self._array(value)
        if isinstance(value, Mapping):
            return {key: self.of(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(each) for each in value]
        return value

    def _array(self, tensor: Any) -> Any:
        # A tensor with a stride of 0 has any number of elements in a few bytes of a file.
        self._left_bytes -= tensor.numel() * tensor.element_size()
        if self._left_bytes < 0:
            raise ValueError(
                f"a tensor of {' x '.join(map(str, tensor.shape))[:60]} repeats the few bytes that"
                " the file holds; save what tensor.contiguous() returns"
            )
        # numpy has no bfloat16; every float that torch has fits a double.
        on_host = tensor.detach().cpu()
        return np.asarray((on_host.double() if on_host.is_floating_point() else on_host).numpy())
