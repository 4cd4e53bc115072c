"""A foreign `.metadata` runs nothing and leads nowhere."""

import operator
import os
import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from profilers.errors import CheckpointDamagedError
from profilers.steps.checkpoints.distributed_format import read_metadata
from profilers.steps.checkpoints.manifest import FileFacts

FILE = "__0_0.distcp"
FILES = {FILE: FileFacts(bytes=100, crc32="0" * 8)}


class _Calls:
    """Pickled as the call of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


class _ByName(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: Any) -> Any:
        is_member = isinstance(value, Enum)
        return (getattr, (type(value), value.name)) if is_member else NotImplemented


def _metadata(*, length: int = 8, file: str = FILE, offset: int = 0) -> Metadata:
    size = torch.Size([4])
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        size,
        [ChunkStorageMetadata(torch.Size([0]), torch.Size([length]))],
    )
    index = MetadataIndex("weight", [0])
    return Metadata({"weight": tensor}, storage_data={index: _StorageInfo(file, offset, 50)})


def test_what_pytorch_writes_is_read(tmp_path: Path) -> None:
    stored = _metadata(length=4)
    for pickler in (pickle.Pickler, _ByName):
        with (tmp_path / ".metadata").open("wb") as file:
            pickler(file).dump(stored)
        assert read_metadata(tmp_path, files=FILES) == stored


def test_whatever_else_it_holds_is_refused(tmp_path: Path) -> None:
    dotted = b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93."
    assert pickle.loads(dotted) is os.system, "PyTorch's module has os in it"
    in_metadata = _metadata(length=4)
    in_metadata.planner_data = _Calls(os.system, "exit 9")
    bytes_only = Metadata({"weight": BytesStorageMetadata()}, storage_data={"weight": 1})
    hostile: list[tuple[str, Any]] = [
        ("it asks for posix.system", _Calls(os.system, f"touch {tmp_path / 'ran'}")),
        ("it asks for builtins.eval", _Calls(eval, "1")),
        ("it asks for builtins.getattr", _Calls(getattr, Metadata, "__init__")),
        ("it asks for operator.attrgetter", operator.attrgetter("system")),
        ("it asks for torch.storage._load_from_bytes", _Calls(torch.storage._load_from_bytes, b"")),
        ("it asks for torch.distributed.checkpoint.metadata.os.system", dotted),
        ("it asks for posix.system", in_metadata),
        ("its files cannot hold", _metadata(length=5)),
        ("its files cannot hold", _metadata(length=4, file="../__0_0.distcp")),
        ("its files cannot hold", _metadata(length=4, file="__1_0.distcp")),
        ("its files cannot hold", _metadata(length=4, offset=51)),
        ("its files cannot hold", _metadata(length=4, offset=-1)),
        ("its files cannot hold", [1, 2]),
        ("its files cannot hold", bytes_only),
        (".metadata is refused: pickle data was truncated", pickle.dumps(_metadata(length=4))[:-9]),
        ("is damaged", b""),
    ]
    wrong = []
    for said, stored in hostile:
        values = stored if isinstance(stored, bytes) else pickle.dumps(stored)
        (tmp_path / ".metadata").write_bytes(values)
        with pytest.raises(CheckpointDamagedError) as error:
            read_metadata(tmp_path, files=FILES)
        if said not in str(error.value) or "\n" in str(error.value):
            wrong.append(f"{said!r} expected, not {error.value}")
    assert not wrong
    assert not (tmp_path / "ran").exists()
