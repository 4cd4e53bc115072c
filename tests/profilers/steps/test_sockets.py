"""One rank alone: gloo opens a socket even for it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOOK_S = 0.05


@pytest.mark.slow
def test_a_step_of_one_rank_listens_only_on_loopback(
    tmp_path: Path,
    sockets_of_children: Callable[[], dict[int, set[str]]],
    outside_card: str,
    tiny_config: Callable[..., dict[str, Any]],
) -> None:
    config = tmp_path / "step.json"
    config.write_text(json.dumps(tiny_config(steps=100_000)), encoding="utf-8")
    command = ("-P", "-m", "profilers.steps", str(config), f"--report={tmp_path / 'report.json'}")
    addresses: set[str] = set()
    with subprocess.Popen(
        [sys.executable, *command, "--deadline=60"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": outside_card},
    ) as process:
        while process.poll() is None and not addresses:
            addresses.update(*sockets_of_children().values())
            time.sleep(LOOK_S)
        process.kill()
    assert addresses == {"127.0.0.1"}
