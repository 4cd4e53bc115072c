"""Headers of GGUF files: exact tensors, and damaged files refused in one line."""

import struct
from pathlib import Path

from tests import gguf_files
from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.spec.gguf import read_gguf


def test_tensors_have_their_own_types_and_fill_the_file(tmp_path: Path) -> None:
    file = read_gguf(gguf_files.moe(tmp_path / "moe.gguf"))
    kinds = {tensor.name: tensor.kind.name for tensor in file.tensors}
    assert file.architecture == "qwen3moe"
    assert kinds["blk.0.ffn_down_exps.weight"] == "q4_k"
    assert kinds["blk.1.ffn_down_exps.weight"] == "q6_k"
    last = max(file.tensors, key=lambda tensor: tensor.offset)
    # The end of the last tensor, rounded up to 32 bytes, is the end of the file.
    assert -(-(last.offset + last.num_bytes) // 32) * 32 == file.file_bytes


def _gguf(*, version: int = 3, tensors: int = 0, values: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + values


@each_row(
    "content, words",
    [
        (b"", "beyond its end"),
        (b"PK\x03\x04" + bytes(64), "does not start with GGUF"),
        (_gguf(version=9), "version 9"),
        (_gguf(tensors=2**60), "the most"),
        (_gguf(count=2**60), "the most"),
        (_gguf(count=1, values=struct.pack("<Q", 2**62)), "bytes of text"),
        (_gguf(count=1, values=struct.pack("<Q", 10**6)), "beyond its end"),
        (_gguf(count=1, values=struct.pack("<Q1sI", 1, b"a", 77)), "type 77"),
        (_gguf(count=1, values=struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**50)), "elements"),
        (_gguf(count=1, values=struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 10**6)), "beyond its end"),
        (_gguf(tensors=1, values=struct.pack("<Q1sI", 1, b"a", 9)), "dimensions"),
        (
            _gguf(tensors=1, values=struct.pack("<Q1sIQQIQ", 1, b"a", 2, 2**40, 2**40, 0, 0)),
            "shape",
        ),
        (_gguf(tensors=1, values=struct.pack("<Q1sIQIQ", 1, b"a", 1, 8, 999, 0)), "type 999"),
        (_gguf(tensors=1, values=struct.pack("<Q1sIQIQ", 1, b"a", 1, 8, 0, 2**60)), "beyond"),
    ],
)
def test_refuses_a_damaged_header(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with refused(SpecError, "damaged.gguf", words):
        read_gguf(path)


def test_refuses_missing_and_foreign_shards(tmp_path: Path) -> None:
    first = gguf_files.moe(tmp_path / "model-00001-of-00002.gguf", layers=2)
    with refused(SpecError, "1 of 2 shards missing", "model-00002-of-00002.gguf"):
        read_gguf(first)
    gguf_files.moe(tmp_path / "model-00002-of-00002.gguf", layers=2)
    with refused(SpecError, "the header counts 1 shards and the name 2"):
        read_gguf(first)


def test_shards_are_read_as_one_model(tmp_path: Path) -> None:
    whole = read_gguf(gguf_files.moe(tmp_path / "whole.gguf", layers=2))
    first, second = gguf_files.split(tmp_path / "whole", layers=2)
    file = read_gguf(first)
    assert read_gguf(second).tensors == file.tensors
    assert {tensor.name for tensor in file.tensors} == {tensor.name for tensor in whole.tensors}
