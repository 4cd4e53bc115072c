"""`.npy` files: as numpy reads them, and nothing that they do not hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.routing.contents import npy_array


def _saved(file: Path, array: Any) -> Path:
    np.save(file, array, allow_pickle=True)
    return file


def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path) -> None:
    for array in (
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(7, dtype=">i2"),
    ):
        found = npy_array(_saved(tmp_path / "a.npy", array), most_bytes=1000)
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_a_header_of_more_than_follows_is_refused_without_making_room(tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    for shape in ("(1000000, 1000000)", "(-1, 6)", "(10**30,)", "(2, 4)", "(" * 5000):
        header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode()
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(48)
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged|cut short|[Hh]eader|shape"):
            npy_array(file, most_bytes=10_000)


def test_objects_and_other_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no array of plain numbers"):
        npy_array(_saved(tmp_path / "a.npy", np.array([{}], dtype=object)), most_bytes=1000)
    (tmp_path / "b.npy").write_bytes(b"\x93NUMPY\x09\x00" + bytes(64))
    with pytest.raises(ValueError, match="damaged"):
        npy_array(tmp_path / "b.npy", most_bytes=1000)
