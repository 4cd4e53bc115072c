"""`.npy` from bytes: as numpy reads it, and nothing that the bytes do not hold."""

import io
from typing import Any

import numpy as np
import pytest

from profilers.routing.npy import npy_array


def _saved(array: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_arrays_are_read_as_numpy_reads_them() -> None:
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((0, 4), dtype=np.int32),
        np.array(7, dtype=">i2"),
    ):
        found = npy_array(_saved(array))
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_a_header_of_more_than_follows_is_refused_without_making_room() -> None:
    for shape in ("(1000000, 1000000)", "(-1, 6)", "(10**30,)", "(2, 4)", "(" * 5000):
        header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(48)
        with pytest.raises(ValueError, match=r"damaged|cut short|[Hh]eader|shape"):
            npy_array(content)


def test_objects_and_other_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="holds objects"):
        npy_array(_saved(np.array([{}], dtype=object)))
    with pytest.raises(ValueError, match="damaged"):
        npy_array(b"\x93NUMPY\x09\x00" + bytes(64))
