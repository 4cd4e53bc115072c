"""numpy's `.npy` from bytes, within what the bytes hold.

numpy allocates the shape that the header names before it checks whether that much follows; here
the two are compared first. Objects, which would be pickles, are refused.

Source: numpy, doc/neps/nep-0001-npy-format.rst.
"""

import io
import math
import tokenize
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

_READERS: Final = {
    (1, 0): npy_format.read_array_header_1_0,
    (2, 0): npy_format.read_array_header_2_0,
}
_DAMAGED: Final = (
    ValueError,
    SyntaxError,
    tokenize.TokenError,
    TypeError,
    LookupError,
    OverflowError,
    AttributeError,
    RecursionError,
    MemoryError,
)
"""What reading a damaged header raises: it is text of at most 10,000 characters, parsed by Python,
whose parser says MemoryError of what is nested too deeply."""


def npy_array(content: bytes) -> npt.NDArray[Any]:
    """Return the array of a file's content; read-only.

    Raises:
        ValueError: it is damaged, cut short, or holds objects.
    """
    stream = io.BytesIO(content)
    try:
        read_header = _READERS[npy_format.read_magic(stream)]
        shape, is_fortran, dtype = read_header(stream)
        size = math.prod(shape) * dtype.itemsize
    except _DAMAGED as error:
        raise ValueError("damaged or cut short: no header of numpy") from error
    if dtype.hasobject:
        raise ValueError("refused: it holds objects, which are pickles; save plain numbers")
    left = len(content) - stream.tell()
    if size != left or min(shape, default=0) < 0:
        shown = " x ".join(map(str, shape))[:60]
        raise ValueError(f"damaged or cut short: {left} bytes for {shown} of {dtype}")
    try:
        if not size:
            return np.zeros(shape, dtype=dtype)
        flat = np.frombuffer(content, dtype=dtype, offset=stream.tell())
        return flat.reshape(shape, order="F" if is_fortran else "C")
    except (OverflowError, TypeError) as error:
        raise ValueError(f"damaged: {error}") from error
