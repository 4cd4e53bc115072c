"""Cores that may be used are those this process is bound to."""

import os

import pytest

from profilers.affinity import usable_cores


def test_a_process_that_is_bound_to_one_core_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores() <= frozenset(range(os.cpu_count() or 1))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {3}, raising=False)
    assert usable_cores() == {3}
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == {0}
