"""Contents of a file of JSON, numpy (`.npy`) or torch (`.pt`): plain values and arrays of numpy.

The first bytes say which of them it is. A file is bounded as it lies and as it unpacks, and nothing
in it is executed: arrays of objects are pickles and refused, and `torch.load(weights_only=True)`
refuses a pickle that would call a function before it does.
"""

import json
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from profilers.errors import MissingLibraryError, RecordingUnreadableError, first_problem
from profilers.files import TooLargeError, open_regular, read_bounded, require_regular
from profilers.out_of_memory import raise_lack_of_memory
from profilers.routing.recording import MOST_CELLS

MOST_JSON_BYTES: Final = 2**28
MOST_ARRAY_BYTES: Final = MOST_CELLS * 8 + 2**16
MOST_TENSOR_BYTES: Final = 2**32
NPY: Final = b"\x93NUMPY"
TORCH: Final = (b"PK", b"\x80")
_DAMAGED: Final = (
    *(ValueError, SyntaxError, TokenError, TypeError, LookupError, OverflowError, AttributeError),
    *(RecursionError, MemoryError, zipfile.BadZipFile, zlib.error, struct.error, EOFError),
    *(RuntimeError, AssertionError),
)
"""Exceptions of numpy, torch.load and zipfile for a file that is cut short or not one of theirs: a
header of numpy is text that Python parses, and one that is nested too deeply raises a
MemoryError."""


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file into one line that names it.

    Raises:
        RecordingUnreadableError: the block could not read it, or found it to be wrong.
    """
    try:
        yield
    except OSError as error:
        raise RecordingUnreadableError(f"{error.filename or path}: {error.strerror}") from error
    except ValidationError as error:
        raise RecordingUnreadableError(f"{path}: {first_problem(error)}") from error
    except ValueError as error:
        raise RecordingUnreadableError(f"{path}: {' '.join(str(error).split())[:300]}") from error


def contents(path: Path) -> Any:
    """Read a file of any of the three kinds.

    Raises:
        OSError: it cannot be read, or is too large.
        ValueError: it is damaged, or would run code.
    """
    with open_regular(path) as file:
        head = file.read(len(NPY))
    if head == NPY:
        return npy_array(path, most_bytes=MOST_ARRAY_BYTES)
    if path.suffix == ".npz":
        raise ValueError("is an archive of numpy, which is read no more: save its array as .npy")
    return _tensors(path) if head.startswith(TORCH) else read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Parse a file of one JSON object.

    Raises:
        ValueError: it is too large, cut short, not UTF-8, not JSON, or no object.
    """
    try:
        content = read_bounded(path, most_bytes=MOST_JSON_BYTES)
        values = json.loads(content, parse_constant=_refused)
    except TooLargeError as error:
        raise ValueError(f"{error.strerror} of JSON; store large counts as .npy") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, or cut short: {error}") from error
    except RecursionError as error:
        raise ValueError("not JSON that holds counts: nested too deep") from error
    if not isinstance(values, dict):
        message = f"holds a JSON {type(values).__name__}; expected an object of named fields"
        raise ValueError(message)  # noqa: TRY004  # the content is wrong, not our caller
    return values


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
        raise ValueError(
            f"no array of plain numbers, damaged or cut short: {_reason(error)}"
        ) from error


def _tensors(path: Path) -> Any:
    if find_spec("torch") is None:
        raise MissingLibraryError(f"{path} needs PyTorch to be read: pip install 'moetune[torch]'")
    import torch

    require_regular(path, most_bytes=MOST_TENSOR_BYTES)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(file.file_size for file in archive.infolist())
            if unpacked > MOST_TENSOR_BYTES:
                raise ValueError(f"unpacks to {unpacked} bytes, more than {MOST_TENSOR_BYTES}")
        with warnings.catch_warnings():
            # torch warns of pickles of another protocol; unreadable ones are refused anyway.
            warnings.simplefilter("ignore")
            return _plain(torch.load(path, map_location="cpu", weights_only=True), {})
    except pickle.UnpicklingError as error:
        raise ValueError(
            "refused: a pickle that holds more than tensors and plain values could run code;"
            " save it with torch.save of plain tensors, or as .npy"
        ) from error
    except _DAMAGED as error:
        raise_lack_of_memory(error)
        raise ValueError(f"damaged or cut short: {_reason(error)}") from error


def _plain(value: Any, made: dict[int, Any]) -> Any:
    """Return what torch has read with arrays for tensors; what is there twice is made once."""
    if id(value) in made:
        return made[id(value)]
    plain = value
    if isinstance(value, Mapping):
        plain = {key: _plain(entry, made) for key, entry in value.items()}
    elif isinstance(value, list | tuple):
        plain = [_plain(entry, made) for entry in value]
    elif hasattr(value, "element_size"):
        # A tensor with a stride of 0 has any number of elements in a few bytes of a file.
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(
                f"a tensor of {' x '.join(map(str, value.shape))[:60]} repeats the few bytes that"
                " the file holds; save what tensor.contiguous() returns"
            )
        # numpy has no bfloat16.
        is_bfloat16 = str(value.dtype) == "torch.bfloat16"
        plain = (value.double() if is_bfloat16 else value).detach().numpy()
    made[id(value)] = plain
    return plain


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"holds {constant}; counts are whole numbers of 0 or more")
