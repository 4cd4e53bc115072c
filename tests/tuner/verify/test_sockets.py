"""A trial on this machine opens no door: its ranks listen on loopback and leave nothing behind."""

import contextlib
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.verify.testing import SILENT
from tuner import api
from tuner.verify.verification import Effort

LOOK_S = 0.3


# Seconds, of importing torch twice: the one trial here whose ranks are real.
@pytest.mark.slow
def test_a_trial_of_verify_listens_on_loopback_alone(
    planned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sockets_of_children: Callable[[], dict[int, set[str]]],
    outside_card: str,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", outside_card)
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    seen: dict[int, set[str]] = {}
    modes: set[int] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(LOOK_S):
            for process, addresses in sockets_of_children().items():
                seen.setdefault(process, set()).update(addresses)
            # Folders vanish while they are looked at.
            with contextlib.suppress(FileNotFoundError):
                modes.update(
                    stat.S_IMODE(folder.stat().st_mode)
                    for folder in scratch.rglob("moetune-ranks-*")
                    if folder.is_dir()
                )

    looking = threading.Thread(target=look)
    looking.start()
    try:
        result = api.verify(planned, effort=Effort(trials=1, steps=3), resume=False, watcher=SILENT)
    finally:
        is_over.set()
        looking.join()
    (trial,) = result.trials
    assert (trial.status, trial.reason) == ("ok", "")
    assert trial.decision.num_devices == 2
    # Both ranks lived and listened for each other while they were looked at.
    assert len(seen) >= 2
    assert set().union(*seen.values()) == {"127.0.0.1"}
    assert modes == {0o700}
    # PyTorch keeps a cache of its own.
    assert [file for file in scratch.iterdir() if "torchinductor" not in file.name] == []
