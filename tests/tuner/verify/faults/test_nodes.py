"""The folders that stand for the memory of nodes."""

import os
import subprocess
from pathlib import Path

import pytest

from tuner.verify.faults import nodes as tested
from tuner.verify.faults.nodes import PREFIX, emulated_nodes


def test_memory_of_a_killed_run_is_removed_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tested, "MEMORY", tmp_path)
    with subprocess.Popen(("true",)) as ended:
        pass
    left, mine = tmp_path / f"{PREFIX}{ended.pid}-a", tmp_path / f"{PREFIX}{os.getpid()}-a"
    other = tmp_path / f"{PREFIX}x-a"
    for folder in (left, mine, other):
        (folder / "node-0").mkdir(parents=True)
    with emulated_nodes(2, ranks=4) as nodes:
        assert nodes.memory.parent == tmp_path
        assert (nodes.ranks_per_node, nodes.node_of(3)) == (2, 1)
        assert nodes.entering(0) == ()
        assert not left.exists()
        assert mine.exists()
        assert other.exists()
    assert not nodes.memory.exists()
