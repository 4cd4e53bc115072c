"""The emitted script for one machine starts a deployment; engine and router are tiny servers."""

import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.goals.serve_folder import read_serve_trials
from tuner.goals.verify import deployment_trials, verify_serve

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
PORTS = (8000, 30_000, 30_200, 30_400)
"""Of the router and of three instances, which the emitted script fixes."""


@pytest.fixture(autouse=True)
def _free_ports() -> None:
    for port in PORTS:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                pytest.skip(f"something listens at port {port}")


def test_instances_and_router_are_started_awaited_measured_and_ended(
    write_plan: Callable[..., Path], client: Callable[..., str], tmp_path: Path
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    # `python -m sglang.launch_server --port N ...` and `python -m sglang_router.launch_router`.
    engine = programs / "python"
    engine.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S {HERE}/tiny_server.py "$@"\n')
    engine.chmod(0o755)
    assert shutil.which("bash") is not None
    folder = write_plan(devices=(16, 8))
    by = deployment_trials(
        folder=folder,
        command="bash {launch}/local.sh",
        benchmark=client(),
        metrics="vllm-bench",
        runs=1,
        start_s=60.0,
        on_message=lambda _line: None,
        environment={
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "MODEL": "tiny",
            "AVAILABLE": "16",
        },
        watch_s=0.1,
    )
    result = verify_serve(folder, resume=False, by=by)
    assert [(one.status, one.reason) for one in result.trials] == [("ok", ""), ("ok", "")]
    # One instance is enough, and twice as good by the number of devices.
    assert result.winner == result.trials[1].decision
    assert result.regret_ratio == 1.0
    assert not (folder / "launch/sglang/router.sh").exists()
    for port in PORTS:
        with socket.socket() as one:
            assert one.connect_ex(("127.0.0.1", port)) != 0


def test_a_machine_with_too_few_devices_is_told_by_the_scripts_own_words(
    write_plan: Callable[..., Path], client: Callable[..., str]
) -> None:
    folder = write_plan()
    by = deployment_trials(
        folder=folder,
        command="bash {launch}/local.sh",
        benchmark=client(),
        metrics="vllm-bench",
        runs=1,
        start_s=60.0,
        on_message=lambda _line: None,
        environment={**os.environ, "MODEL": "tiny", "AVAILABLE": "2"},
        watch_s=0.1,
    )
    verify_serve(folder, trials=1, resume=False, by=by)
    (record,) = read_serve_trials(folder)
    assert record.reason == (
        "the server ended with exit code 2 before it answered: this machine has 2 devices, the plan"
        " is for 8"
    )
