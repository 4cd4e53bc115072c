"""A plan of three deployments in a folder, and commands that stand in for engine and client.

Predicted are a TTFT of 10 ms and a TPOT of 1 ms for all; the tiny server takes 20 ms and 2 ms, and
never less. The plan asks for prompts of 4 and answers of 5 tokens, which is what the client sends.
"""

import os
import shlex
import socket
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.tuner.engines.serving.testing import aggregated, sample_serving
from tests.tuner.verify.testing import marked
from tuner.config.serve import ServeDecision
from tuner.goals.serve_trial import Reached
from tuner.goals.verify import (
    Neighbours,
    deployment_trials,
    verify_serve,
)
from tuner.plans.serve import Latency, ServeAlternative, ServePlan, ServePrediction
from tuner.spec.huggingface.read import read_model
from tuner.verify.deployments.records import ServeVerified

HERE = Path(__file__).parent
MODEL = HERE.parents[3] / "examples/models/qwen3-30b-a3b"


@pytest.fixture(scope="session")
def predicted() -> ServePrediction:
    return ServePrediction(
        ttft_s=Latency(mean=0.01, p50=0.01, p90=0.01, p99=0.01),
        ttft_s_band=(0.005, 60.0),
        tpot_s=Latency(mean=0.001, p50=0.001, p90=0.001, p99=0.001),
        tpot_s_band=(0.0005, 0.0011),
        goodput_per_device=10.0,
        requests_per_s=100.0,
        output_tokens_per_s=500.0,
        utilisation_ratio={"aggregated@h100": 0.5},
        memory_bytes={"aggregated@h100": 2**30},
        cost_per_hour=48.0,
        breakdown_s={"moe": 0.001},
    )


@pytest.fixture(scope="session")
def serve_plan(predicted: ServePrediction) -> Callable[..., ServePlan]:
    """serve_plan(devices=(8, 16, 24), **goal) -> a plan whose choice has the first number."""

    def made(devices: tuple[int, ...] = (8, 16, 24), **goal: Any) -> ServePlan:
        decisions = [decision(count) for count in devices]
        requested = {
            "traffic": {"concurrency": 3, "input_tokens": 4, "output_tokens": 5},
            "slo": {"ttft": {"p90": 60.0}, "tpot": {"p90": 60.0}},
            "max_model_len": 4096,
            "objective": "devices",
        }
        plan = sample_serving(
            read_model(MODEL), decisions[0], emit=("sglang", "local"), goal=requested | goal
        ).plan
        return plan.model_copy(
            update={
                "predicted": predicted,
                "alternatives": tuple(
                    ServeAlternative(
                        decision=one, predicted=predicted, within_band=True, lost_by="devices"
                    )
                    for one in decisions[1:]
                ),
            }
        )

    return made


@pytest.fixture
def write_plan(serve_plan: Callable[..., ServePlan], tmp_path: Path) -> Callable[..., Path]:
    """write_plan(**changes) -> a new folder of the plan; `plan` the first time."""
    numbers = count(2)

    def write(**changes: Any) -> Path:
        folder = tmp_path / "plan"
        while folder.exists():
            folder = tmp_path / f"plan {next(numbers)}"
        folder.mkdir()
        (folder / "plan.json").write_text(serve_plan(**changes).model_dump_json(indent=2))
        return folder

    return write


@pytest.fixture
def url() -> str:
    """An address where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.fixture
def server(url: str) -> Callable[..., str]:
    """server('--ttft', ...) -> template of a command that serves at `url`."""

    def command(*options: str) -> str:
        program = HERE / "tiny_server.py"
        port = url.rpartition(":")[2]
        return shlex.join([sys.executable, "-S", str(program), "--port", port, *options])

    return command


@pytest.fixture
def client() -> Callable[..., str]:
    """client('--form', ...) -> template of the client."""

    def command(*options: str) -> str:
        program = [sys.executable, "-S", str(HERE / "tiny_client.py")]
        given = shlex.join(options).replace("{", "{{").replace("}", "}}")
        return f"{shlex.join(program)} {{url}} {{result}} {given}"

    return command


def decision(devices: int) -> ServeDecision:
    """One instance for every 8 devices."""
    return aggregated(count=devices // 8)


@pytest.fixture
def verify(url: str) -> Callable[..., ServeVerified]:
    """verify(folder, command, bench, runs=1, ...) -> what launches of the plan come to."""

    def run(
        folder: Path,
        command: str,
        bench: str,
        *,
        metrics: str = "vllm-bench",
        runs: int = 1,
        start_s: float = 60.0,
        trials: int = 1,
        resume: bool = False,
        health: tuple[str, ...] = (),
        on_message: Callable[[str], None] = lambda _line: None,
        neighbours: Neighbours = lambda _folder, _plan: {},
    ) -> ServeVerified:
        by = deployment_trials(
            folder=folder,
            command=command,
            benchmark=bench,
            metrics=metrics,
            runs=runs,
            start_s=start_s,
            on_message=on_message,
            environment=os.environ,
            watch_s=0.02,
        )
        return verify_serve(
            folder,
            trials=trials,
            resume=resume,
            by=by,
            reached=Reached(url=url, health=health),
            neighbours=neighbours,
        )

    return run


@pytest.fixture
def left_running() -> Callable[[Path], list[int]]:
    """left_running(folder) -> processes that carry the mark of a folder of the plan's."""
    return marked
