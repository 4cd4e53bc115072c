"""Ranks that a session starts listen on loopback alone, whatever the environment prefers."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.progress import ProgressEvent
from profilers.session import measure_profile

RENDEZVOUS = "meet"


def test_a_profile_of_two_ranks_listens_on_loopback_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sockets_of_children: Callable[[], dict[int, set[str]]],
    outside_card: str,
) -> None:
    # What a cluster's login script exports for jobs of several nodes.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside_card)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    seen: dict[int, set[str]] = {}
    modes: set[int] = set()

    def look(_event: ProgressEvent) -> None:
        for process, addresses in sockets_of_children().items():
            seen.setdefault(process, set()).update(addresses)
        modes.update(stat.S_IMODE(file.parent.stat().st_mode) for file in scratch.rglob(RENDEZVOUS))

    measure_profile(
        tmp_path / "profile",
        suites=("links",),
        budget_s=3.0,
        ranks=2,
        device="cpu",
        progress=look,
        environment={},
    )
    # Both ranks lived and listened for each other while they were looked at.
    assert len(seen) == 2
    assert set().union(*seen.values()) == {"127.0.0.1"}
    assert modes == {0o700}
    assert list(scratch.iterdir()) == []
