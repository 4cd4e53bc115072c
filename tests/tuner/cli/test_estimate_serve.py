"""`moetune estimate` of a serving launch as a user types it."""

import re
from pathlib import Path

import pytest

from tests.expect import contains, present
from tests.rows import each_row
from tuner.cli import app as frame
from tuner.estimate.serving.records import ServingEstimate

Captured = pytest.CaptureFixture[str]
EXAMPLES = Path(__file__).parents[3] / "examples" / "serving"
V3 = EXAMPLES / "deepseek-v3-32-h200.yaml"
MIXED = EXAMPLES / "mixed-pool.yaml"
SERVER = "python -m sglang.launch_server --model-path m --trust-remote-code"


def run(*arguments: str | Path) -> int:
    return frame.run(["estimate", *map(str, arguments)])


def test_a_person_reads_latency_memory_and_what_to_change(capsys: Captured) -> None:
    launch = f"{SERVER} --tp 8 --ep 8 --max-running-requests 64 --disable-overlap-schedule"
    assert run(V3, "--launch", launch, "--instances", "4") == 1

    shown = capsys.readouterr().out
    for part in (
        "the command: deepseek-v3 with sglang 0.5.23 on h200-sxm",
        "aggregated     4 x 8 devices on h200: TP 8, DP 1, EP 8; 64 sequences, 8,192 batched",
        "memory         ",
        "KV cache       ",
        "FALLS BEHIND   the traffic",
        "smallest change that beats it",
        " --",
        "changes of one thing",
        "without price  --disable-overlap-schedule",
        "no effect      --model-path m, --trust-remote-code",
        "note           from the datasheet: ",
    ):
        assert part in shown, part
    for name in ("TTFT", "TPOT"):
        assert re.search(rf"^  {name} .+ to .+", shown, re.M), name
    assert max(map(len, shown.splitlines())) <= 100


def test_json_holds_the_same_as_a_record(capsys: Captured) -> None:
    launch = f"{SERVER} --tp 8 --dp 8 --enable-dp-attention --ep 8"
    assert run(V3, "--launch", launch, "--instances", "4", "--json") == 0
    result = ServingEstimate.model_validate_json(capsys.readouterr().out)
    assert result.schema_version == 1
    assert result.instance.devices == 8
    assert present(result.load).keeps_up


def test_a_launch_that_falls_behind_is_a_negative_result(capsys: Captured) -> None:
    assert run(V3, "--launch", f"{SERVER} --tp 8 --max-running-requests 8") == 1
    contains(capsys.readouterr().out, "FALLS BEHIND   the traffic", "MISSES         TTFT P90")


def test_a_launch_that_does_not_fit_is_a_negative_result(capsys: Captured) -> None:
    assert run(V3, "--launch", f"{SERVER} --tp 2") == 1
    shown = capsys.readouterr().out
    assert "DOES NOT FIT   315 GiB of weights a device leave no room for a KV cache" in shown
    assert "ttft  " not in shown.split("smallest change")[0]


@each_row(
    ("spec", "options", "says"),
    [
        (V3, ("--launch", "echo hello"), "starts no server"),
        (V3, ("--launch", ""), "--launch is empty"),
        (V3, ("--launch", "nowhere.sh"), "cannot read the launch"),
        (V3, ("--launch", SERVER, "--pool", "x"), "'x' is none of h200"),
        (V3, ("--launch", SERVER, "--format", "megatron"), "is none of sglang, vllm"),
        (V3, ("--launch", f"{SERVER} --tp 8", "--instances", "5"), "the nearest is 4"),
        (MIXED, ("--launch", "vllm serve m"), "has 3 pools; name one with --pool: h100, l40s"),
    ],
)
def test_bad_input_is_one_line(
    spec: Path, options: tuple[str, ...], says: str, capsys: Captured
) -> None:
    assert run(spec, *options) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_no_instances_are_refused(capsys: Captured) -> None:
    assert run(V3, "--launch", SERVER, "--instances", "0") == 2
    assert "--instances" in capsys.readouterr().err
