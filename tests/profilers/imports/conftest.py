from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SYSTEM = """\
data_dir: data/tiny_sxm
gpu: {mem_capacity: 1000000, mem_bw: 1.0}
node: {num_gpus_per_node: 8}
"""

Write = Callable[[str, Sequence[Mapping[str, Any]]], Path]


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    folder = tmp_path / "systems"
    (folder / "data" / "tiny_sxm").mkdir(parents=True)
    (folder / "tiny_sxm.yaml").write_text(SYSTEM)
    return folder


@pytest.fixture
def write(systems: Path) -> Write:
    """Write a table below the system's folder; rows lack what they do not state."""

    def table(place: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        file = systems / "data" / "tiny_sxm" / place
        file.parent.mkdir(parents=True, exist_ok=True)
        full = [{"device": "NVIDIA T1", "kernel_source": "k", **row} for row in rows]
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(full), file)
        else:
            lines = [",".join(full[0]), *(",".join(map(str, row.values())) for row in full)]
            file.write_text("\n".join(lines) + "\n")
        return file

    return table
