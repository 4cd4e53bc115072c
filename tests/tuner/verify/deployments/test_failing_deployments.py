"""Deployments that fail: what is said of it, and that nothing of them is left running."""

import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import contains, refused
from tests.rows import each_row
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.goals.serve_folder import read_serve_trials
from tuner.verify.deployments.records import ServeTrialRecord, ServeVerified
from tuner.verify.loop import NO_RESPONSE, failure_cause

Command = Callable[..., str]
WritePlan = Callable[..., Path]
Verify = Callable[..., ServeVerified]
LeftRunning = Callable[[Path], list[int]]


def test_a_server_that_never_answers_is_ended_at_the_limit(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    left_running: LeftRunning,
) -> None:
    folder = write_plan()
    (trial,) = verify(folder, server("--health", "503"), client(), start_s=1.0).trials
    assert trial.status == "timeout"
    # A machine with much to do may not even have begun to listen: then that is what is said.
    assert "/health did not answer within 1 s: " in trial.reason
    assert left_running(folder) == []


def test_a_healthy_server_that_serves_no_request_is_not_measured(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    left_running: LeftRunning,
) -> None:
    folder = write_plan()
    outcome = verify(folder, server("--die-after", "1"), client())
    assert outcome.trials[0].status == "crashed"
    assert outcome.trials[0].reason == (
        "the server ended with exit code 3 at its first request: RuntimeError: the engine broke"
    )
    other = verify(
        folder, server("--fail-every", "1"), client(), start_s=2.0, trials=2, resume=True
    )
    assert other.trials[-1].status == "timeout"
    assert re.search(
        r" is healthy, but did not answer within \d+ s to a first request: status 500 \{.error",
        other.trials[-1].reason,
    )
    assert left_running(folder) == []


def test_a_server_that_wants_a_key_is_asked_with_it(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_plan()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    outcome = verify(folder, server("--key", "secret"), client())
    contains(outcome.trials[0].reason, "refuses a first request (status 401", "set OPENAI_API_KEY")
    assert outcome.trials[0].status == "timeout"
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    later = verify(folder, server("--key", "secret"), client(), trials=2, resume=True)
    # The client of these tests sends no key: its requests fail, and the deployment is ready.
    assert "first request" not in later.trials[-1].reason


def test_a_server_that_ends_under_the_client_is_no_fault_of_the_client(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    (trial,) = verify(folder, server("--die-after", "8"), client(), runs=3).trials
    assert trial.status == "crashed"
    assert trial.reason == (
        "the server ended with exit code 3 under run 2 of the client:"
        " RuntimeError: the engine broke"
    )
    (record,) = read_serve_trials(folder)
    assert len(record.runs) == 1
    assert trial.runs == 0


@each_row(
    ("options", "reason"),
    [
        (("--exit", "1"), "run 1 of the client ended with exit code 1: ValueError: the client"),
        (("--text", ""), "run 1: not the JSON of vllm bench serve: cut short"),
        (("--text", '{"completed": 5, "durat'), "run 1: not the JSON of vllm bench serve: cut"),
        (("--text", "[" * 20_000), "run 1: not the JSON of vllm bench serve"),
        (("--text", '{"completed": 0}'), "run 1: vllm bench serve reports no completed request"),
        (("--text", '{"completed": 5}'), "run 1: not the JSON of vllm bench serve: duration: Fi"),
        (f"{sys.executable} -S -c pass", "the client left no result.json"),
        # A sparse file: nothing is written to the disk.
        (
            f"{sys.executable} -S -c 'import os,sys; os.truncate(os.open(sys.argv[1], 65), 2**40)'"
            " {result}",
            "result.json is larger than",
        ),
    ],
)
def test_a_client_that_fails_is_one_line(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    options: str | tuple[str, ...],
    reason: str,
) -> None:
    bench = options if isinstance(options, str) else client(*options)
    outcome = verify(write_plan(), server(), bench)
    assert outcome.trials[0].status == "crashed"
    assert reason in outcome.trials[0].reason


@each_row("is_server", [True, False])
def test_a_program_that_does_not_exist_ends_the_verification(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    is_server: bool,
    left_running: LeftRunning,
) -> None:
    folder = write_plan()
    commands = ("/no/such/program", client()) if is_server else (server(), "/no/such/program")
    with pytest.raises(EnvironmentMissingError, match="/no/such/program: No such file"):
        verify(folder, *commands)
    missing = "bash -c 'no-such-program'"
    commands = (missing, client()) if is_server else (server(), missing)
    with pytest.raises(EnvironmentMissingError, match="no-such-program: command not found"):
        verify(folder, *commands)
    assert read_serve_trials(folder) == ()
    assert left_running(folder) == []


def test_a_port_that_is_taken_is_said_before_anything_starts(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.verify.deployments.launcher.PORT_FREE_S", 0.05)
    folder = write_plan()
    with (
        socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))),
        pytest.raises(EnvironmentMissingError, match="something listens there before"),
    ):
        verify(folder, server(), client())
    assert read_serve_trials(folder) == ()


@each_row(
    ("change", "said"),
    [
        ({"command": ""}, "--command is needed, e.g. --command 'bash {launch}/local.sh'"),
        ({"command": "serve {result}"}, "{result} is none of the placeholders launch, folder"),
        ({"bench": "x {rank}"}, "--bench: '{rank}': {rank} is none of the placeholders"),
        ({"metrics": "sglang-bench", "bench": ""}, "--bench is needed, e.g. --bench 'python -m"),
        ({"metrics": "megatron"}, "--metrics 'megatron': a deployment is measured by one of"),
        ({"health": ("file:///etc/passwd",)}, "--health 'file:///etc/passwd' is no address"),
        ({"health": ("http://[::1",)}, "is no address"),
        ({"bench": "x {model}"}, "--bench: {model}: the environment has no MODEL"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.delenv("MODEL", raising=False)
    requested = {"command": server(), "bench": client()} | change
    with refused(SpecError, said):
        verify(write_plan(), **requested)


def test_a_server_that_does_not_want_to_end_is_killed(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
    left_running: LeftRunning,
) -> None:
    monkeypatch.setattr("tuner.verify.deployments.launcher.STOP_S", 0.1)
    monkeypatch.setattr("tuner.verify.termination.GRACE_S", 0.1)
    folder = write_plan()
    deaf = f'bash -c "trap : TERM; {server()} & while true; do wait; done"'
    assert verify(folder, deaf, client()).trials[0].status == "ok"
    assert left_running(folder) == []


def test_two_deployments_that_fail_alike_end_the_verification(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    outcome = verify(folder, server("--say", "RuntimeError: no such weights"), client(), trials=3)
    assert [one.status for one in outcome.trials] == ["crashed", "crashed"]
    # A server that ends at its start is named by its last line.
    assert outcome.trials[0].reason == (
        "the server ended with exit code 1 before it answered: RuntimeError: no such weights"
    )
    assert read_serve_trials(folder)[0].last_lines == ("RuntimeError: no such weights",)
    assert (outcome.winner, outcome.factors) == (None, None)
    # Nothing is verified, so no launch file claims to be.
    assert not (folder / "launch").exists()
    (stopped,) = (note for note in outcome.notes if note.startswith("stopped: "))
    assert stopped.startswith("stopped: 2 trials failed identically, so 1 of 3 were not launched")
    # Mended, the failures are launched again first, then the one that was left.
    repeated = verify(folder, server(), client(), trials=3, resume=True)
    assert [one.status for one in repeated.trials] == ["ok", "ok", "ok"]
    assert not any(note.startswith("stopped: ") for note in repeated.notes)
    records = read_serve_trials(folder)
    assert [one.origin for one in records] == [
        "plan",
        "sampler",
        "repeat",
        "repeat",
        "sampler",
    ]


def test_deployments_that_never_answer_fail_alike_and_lack_of_memory_does_not(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    outcome = verify(write_plan(), server("--say", said), client(), trials=3)
    assert [one.status for one in outcome.trials] == ["out_of_memory"] * 3
    assert said in outcome.trials[0].reason
    silent = f"http://127.0.0.1:1/health {NO_RESPONSE} 9 s: nothing listens there"
    fields: dict[str, Any] = {"status": "timeout", "reason": silent}
    assert failure_cause(ServeTrialRecord.model_construct(**fields)) == "timeout"
