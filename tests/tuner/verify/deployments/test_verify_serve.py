"""Deployments launched for real: a tiny server, a tiny client, and everything that goes wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tuner.cli import app as frame
from tuner.errors import EnvironmentMissingError, OutputError, PlanUnreadableError, SpecError
from tuner.plan_folder import verified_as
from tuner.serve_folder import read_serve_plan, read_serve_trials
from tuner.serve_trial import Reached
from tuner.verify.deployments.records import ServeVerified
from tuner.verify.deployments.sole import sole_use
from tuner.verify.launcher import TRIAL_MARK
from tuner.verify_serve_api import DeploymentEffort, deployment_trials, verify_serve

Command = Callable[..., str]
WritePlan = Callable[..., Path]


@pytest.fixture
def verify(url: str) -> Callable[..., ServeVerified]:
    def run(
        folder: Path,
        command: str,
        bench: str,
        *,
        metrics: str = "vllm-bench",
        runs: int = 1,
        start_s: float = 60.0,
        trials: int = 1,
        repeats: int = 0,
        resume: bool = False,
        health: tuple[str, ...] = (),
        told: Callable[[str], None] = lambda _line: None,
    ) -> ServeVerified:
        by = deployment_trials(
            folder=folder,
            command=command,
            bench=bench,
            metrics=metrics,
            runs=runs,
            start_s=start_s,
            told=told,
            environment=os.environ,
            watch_s=0.02,
        )
        return verify_serve(
            folder,
            effort=DeploymentEffort(trials=trials, repeats=repeats),
            resume=resume,
            by=by,
            reached=Reached(url=url, health=health),
        )

    return run


Verify = Callable[..., ServeVerified]


def left_running(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            mark = process.environ().get(TRIAL_MARK, "")
        except psutil.Error:
            continue
        if mark.startswith(str(folder.resolve())):
            found.append(process.pid)
    return found


def test_a_deployment_is_measured_and_the_model_calibrated(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder, lines = write_plan(), list[str]()
    found = verify(folder, server(), client(), runs=2, trials=2, told=lines.append)
    first, second = found.trials
    assert [one.status for one in found.trials] == ["ok", "ok"]
    assert found.winner == first.decision
    assert found.regret_ratio == 0.0
    assert not found.tie
    assert (first.runs, first.num_devices, second.num_devices) == (2, 8, 16)
    # The server waits 20 ms and 2 ms with a sleep, which is never shorter.
    assert first.measured_ttft_s is not None
    assert first.measured_ttft_s >= 0.02
    assert first.measured_tpot_s is not None
    assert first.measured_tpot_s >= 0.002
    assert first.measured_ttft is not None
    assert first.measured_ttft.p90 is not None
    assert first.holds_targets
    assert found.factors is not None
    assert found.factors.ttft >= 2.0
    assert second.recalibrated_ttft_s == pytest.approx(first.measured_ttft_s)
    assert found.accuracy.ttft_within_band == 2
    assert found.accuracy.tpot_within_band == 0
    assert first.failed_ratio == 0.0
    assert verified_as(ServeVerified, folder) == found
    assert [len(one.runs) for one in read_serve_trials(folder)] == [2, 2]
    assert "run 2 of 2: TTFT" in lines[-1]
    text = (folder / "launch/local/local.sh").read_text()
    assert "# Measured: TTFT mean" in text
    assert "NOT VERIFIED" not in text
    assert not (folder / "trials/deployments").exists()
    assert left_running(folder) == []


def test_the_result_of_sglangs_client_is_read_too(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    # SGLang's result names no failed requests: the client was told how many to send.
    bench = f"{client('--form', 'sglang')} --requests {{requests}} --concurrency 60"
    found = verify(write_plan(), server("--fail-every", "50"), bench, metrics="sglang-bench")
    (trial,) = found.trials
    assert trial.status == "ok"
    # 100 requests, of which the 50th and the 100th fail: more than 1 %.
    assert trial.failed_ratio == 0.02
    assert trial.misses == ("2.0 % of the requests failed",)
    assert found.winner is None
    assert "2 of 100 requests failed" in found.notes


def test_a_server_that_ends_at_its_start_is_named_by_its_last_line(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    found = verify(folder, server("--say", "RuntimeError: no such weights"), client())
    (trial,) = found.trials
    assert trial.status == "crashed"
    assert trial.reason == (
        "the server ended with exit code 1 before it answered: RuntimeError: no such weights"
    )
    (record,) = read_serve_trials(folder)
    assert record.last_lines == ("RuntimeError: no such weights",)
    assert found.winner is None
    assert found.factors is None
    # Nothing is verified, so no launch file claims to be.
    assert not (folder / "launch").exists()


def test_lack_of_memory_is_told_from_a_crash(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    said = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    found = verify(write_plan(), server("--say", said), client())
    assert found.trials[0].status == "out_of_memory"
    assert said in found.trials[0].reason


def test_a_server_that_never_answers_is_ended_at_the_limit(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    found = verify(folder, server("--health", "503"), client(), start_s=1.0)
    (trial,) = found.trials
    assert trial.status == "timeout"
    # A machine with much to do may not even have begun to listen: then that is what is said.
    assert "/health did not answer within 1 s: " in trial.reason
    assert left_running(folder) == []


def test_a_server_that_ends_under_the_client_is_no_fault_of_the_client(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    found = verify(folder, server("--die-after", "8"), client(), runs=3)
    (trial,) = found.trials
    assert trial.status == "crashed"
    assert trial.reason == (
        "the server ended with exit code 3 under run 2 of the client:"
        " RuntimeError: the engine broke"
    )
    (record,) = read_serve_trials(folder)
    assert len(record.runs) == 1
    assert trial.runs == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--exit", "1"), "run 1 of the client ended with exit code 1: ValueError: the client"),
        (("--text", ""), "run 1: not the JSON of vllm bench serve: cut short"),
        (("--text", '{"completed": 5, "durat'), "run 1: not the JSON of vllm bench serve: cut"),
        (("--text", "[" * 20_000), "run 1: not the JSON of vllm bench serve"),
        (("--text", '{"completed": 0}'), "run 1: vllm bench serve tells no request that completed"),
        (("--text", '{"completed": 5}'), "run 1: not the JSON of vllm bench serve: duration: Fi"),
    ],
)
def test_a_client_that_fails_is_one_line(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    options: tuple[str, ...],
    reason: str,
) -> None:
    found = verify(write_plan(), server(), client(*options))
    assert found.trials[0].status == "crashed"
    assert found.trials[0].reason.startswith(reason)


def test_a_client_that_leaves_nothing_is_told_where_to(
    write_plan: WritePlan, server: Command, verify: Verify
) -> None:
    found = verify(write_plan(), server(), f"{sys.executable} -S -c pass")
    assert "the client left no result.json" in found.trials[0].reason


def test_a_result_that_is_too_large_is_not_read(
    write_plan: WritePlan, server: Command, verify: Verify
) -> None:
    # A sparse file: nothing is written to the disk.
    bench = f"{sys.executable} -S -c 'import os,sys; os.truncate(os.open(sys.argv[1], 65), 2**40)'"
    found = verify(write_plan(), server(), f"{bench} {{result}}")
    assert "result.json is larger than" in found.trials[0].reason


@pytest.mark.parametrize("is_server", [True, False])
def test_a_program_that_does_not_exist_ends_the_verification(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify, is_server: bool
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


def test_resume_launches_only_what_has_no_record(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    verify(folder, server(), client(), trials=1)
    before = (folder / "trials/0000.json").read_bytes()
    with pytest.raises(PlanUnreadableError, match="holds 1 trials already: add --resume"):
        verify(folder, server(), client(), trials=2)
    found = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.num_devices for one in found.trials] == [8, 16]
    assert (folder / "trials/0000.json").read_bytes() == before
    (folder / "trials/0001.json").write_text(before.decode()[:-20])
    with pytest.raises(PlanUnreadableError, match=r"0001\.json.*delete it to launch that trial"):
        verify(folder, server(), client(), resume=True)


def test_repeats_are_launched_while_noise_keeps_the_order_open(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    # 10 ms is on the edge of nothing: the server takes 20 ms in every run, so no run holds it.
    slo = {"ttft": {"p90": 0.01}, "tpot": {}}
    found = verify(write_plan(slo=slo), server(), client(), repeats=3, runs=2)
    assert [one.runs for one in found.trials] == [2]
    assert found.winner is None
    assert found.notes[0].startswith("the plan's choice misses its targets: TTFT P90")


def test_another_verification_of_the_plan_is_kept_out(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    with (
        sole_use(folder / "trials", plan=folder),
        pytest.raises(OutputError, match="another `moetune verify` launches this plan's"),
    ):
        verify(folder, server(), client())


@pytest.mark.parametrize(
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
    asked = {"command": server(), "bench": client()} | change
    with pytest.raises(SpecError) as caught:
        verify(write_plan(), **asked)
    assert said in str(caught.value)


def test_ctrl_c_ends_everything_and_keeps_the_records(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()

    def interrupt(line: str) -> None:
        # In the second trial, when the server answers and the client is about to run.
        if line.startswith("answers") and (folder / "trials/0000.json").exists():
            threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()

    slow = client("--requests", "1", "--tokens", "100000")
    with pytest.raises(KeyboardInterrupt):
        verify(
            folder,
            server(),
            f"bash -c 'test $0 = 1 && exec {client()} || exec {slow}' {{seed}}",
            trials=2,
            told=interrupt,
        )
    assert [one.status for one in read_serve_trials(folder)] == ["ok"]
    assert left_running(folder) == []
    found = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.status for one in found.trials] == ["ok", "ok"]


def test_what_a_killed_verification_left_running_is_ended(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    left = folder / "trials/deployments/0000/server"
    left.mkdir(parents=True)
    mark = {**os.environ, TRIAL_MARK: str(left.resolve())}
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=-1, env=mark) as process:
        verify(folder, server(), client())
        assert process.poll() is not None


def test_a_server_that_does_not_want_to_end_is_killed(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.verify.deployments.server.STOP_S", 0.1)
    monkeypatch.setattr("tuner.verify.launcher.GRACE_S", 0.1)
    folder = write_plan()
    deaf = f'bash -c "trap : TERM; {server()} & while true; do wait; done"'
    found = verify(folder, deaf, client())
    assert found.trials[0].status == "ok"
    assert left_running(folder) == []


def test_files_of_other_decisions_go_with_the_refresh(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    # The winner has one instance and no router; the alternatives have one.
    stale = folder / "launch/sglang/router.sh"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an alternative")
    verify(folder, server(), client())
    assert not stale.exists()
    named = read_serve_plan(folder).files
    assert all((folder / name).is_file() for name in named)
    assert "launch/sglang/aggregated.sh" in named
    assert json.loads((folder / "launch/sglang/expected.json").read_text())["num_devices"] == 8


def test_the_command_line_tells_a_deployment_from_start_to_end(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_plan()
    options = ["--launcher", "command", "--command", server(), "--bench", client(), "--url", url]
    assert frame.run(["verify", str(folder), *options, "--runs", "1", "--trials", "2"]) == 0
    shown = capsys.readouterr()
    assert "trial 1: 16 devices, aggregated: 2 x 8 aggregated on h100" in shown.err
    assert "winner         1 x 8 aggregated, by devices" in shown.out
    assert shown.out.count(", median of 1 run\n") == 2
    assert " P99 " in shown.out
    assert "first choice   it is the winner" in shown.out
    again = [*options, "--trials", "2", "--resume", "--json"]
    assert frame.run(["verify", str(folder), *again]) == 0
    assert ServeVerified.model_validate_json(capsys.readouterr().out).regret_ratio == 0.0
    assert frame.run(["verify", str(folder), *options]) == 2
    assert "holds 2 trials already: add --resume" in capsys.readouterr().err


def test_no_deployment_that_runs_is_a_negative_result(
    write_plan: WritePlan, client: Command, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--launcher", "command", "--command", "false", "--bench", client(), "--url", url]
    assert frame.run(["verify", str(write_plan()), *options, "--trials", "1"]) == 1
    assert "no deployment could be measured" in capsys.readouterr().out
