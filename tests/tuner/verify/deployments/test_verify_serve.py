"""Deployments launched for real by a tiny server and client: measured, gone on with, concluded."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import contains, present
from tests.tuner.cli.refusals import output
from tuner.cli import app as frame
from tuner.errors import OutputError, PlanUnreadableError
from tuner.goals.serve_folder import read_serve_plan, read_serve_trials
from tuner.plans.folder import read_verified_as
from tuner.verify.deployments.records import ServeVerified
from tuner.verify.termination import exclusive_use

Command = Callable[..., str]
WritePlan = Callable[..., Path]
Verify = Callable[..., ServeVerified]
LeftRunning = Callable[[Path], list[int]]


def test_a_deployment_is_measured_and_the_model_calibrated(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    left_running: LeftRunning,
) -> None:
    folder, lines = write_plan(), list[str]()
    outcome = verify(folder, server(), client(), runs=2, trials=2, on_message=lines.append)
    first, second = outcome.trials
    assert [one.status for one in outcome.trials] == ["ok", "ok"]
    assert outcome.winner == first.decision
    assert outcome.regret_ratio == 0.0
    assert not outcome.tie
    assert (first.runs, first.num_devices, second.num_devices) == (2, 8, 16)
    # The server waits 20 ms and 2 ms with a sleep, which is never shorter.
    assert first.measured_ttft_s is not None
    assert first.measured_ttft_s >= 0.02
    assert present(first.measured_tpot_s) >= 0.002
    assert present(first.measured_ttft).p90 is not None
    assert first.holds_targets
    assert present(outcome.factors).ttft >= 2.0
    assert second.recalibrated_ttft_s == pytest.approx(first.measured_ttft_s)
    assert outcome.accuracy.ttft_within_band == 2
    assert outcome.accuracy.tpot_within_band == 0
    assert first.failed_ratio == 0.0
    assert read_verified_as(ServeVerified, folder) == outcome
    assert [len(one.runs) for one in read_serve_trials(folder)] == [2, 2]
    assert "run 2 of 2: TTFT" in lines[-1]
    text = (folder / "launch/local/local.sh").read_text()
    assert "# Measured: TTFT mean" in text
    assert "NOT VERIFIED" not in text
    assert not (folder / "trials/deployments").exists()
    assert left_running(folder) == []


def test_a_neighbour_that_is_predicted_to_be_better_is_launched_and_wins(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    plan = read_serve_plan(folder)
    assert plan.decision is not None
    assert plan.predicted is not None
    (group,) = plan.decision.instances
    smaller = group.model_copy(update={"max_batch": group.max_batch // 2})
    near = plan.decision.model_copy(update={"instances": (smaller,)})
    better = plan.predicted.model_copy(
        update={"goodput_per_device": 2.0 * plan.predicted.goodput_per_device}
    )
    outcome = verify(folder, server(), client(), trials=2, neighbours=lambda *_: {near: better})
    assert [(one.decision, one.origin) for one in outcome.trials] == [
        (plan.decision, "plan"),
        (near, "sampler"),
    ]
    assert outcome.winner in (plan.decision, near)
    # Gone on with where nothing can be priced any more, what was launched is known by its record.
    resumed = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.decision for one in resumed.trials] == [plan.decision, near]


def test_the_result_of_sglangs_client_is_read_too(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    # SGLang's result names no failed requests: the client was told how many to send.
    bench = f"{client('--form', 'sglang')} --requests {{requests}} --concurrency 60"
    outcome = verify(write_plan(), server("--fail-every", "50"), bench, metrics="sglang-bench")
    (trial,) = outcome.trials
    assert trial.status == "ok"
    # 100 requests, of which the 50th and the 100th fail: more than 1 %.
    assert trial.failed_ratio == 0.02
    assert trial.misses == ("2.0 % of the requests failed",)
    assert outcome.winner is None
    assert "2 of 100 requests failed" in outcome.notes


def test_resume_launches_only_what_has_no_record(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    verify(folder, server(), client(), trials=1)
    before = (folder / "trials/0000.json").read_bytes()
    with pytest.raises(PlanUnreadableError, match="holds 1 trials already: add --resume"):
        verify(folder, server(), client(), trials=2)
    outcome = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.num_devices for one in outcome.trials] == [8, 16]
    assert (folder / "trials/0000.json").read_bytes() == before
    (folder / "trials/0001.json").write_text(before.decode()[:-20])
    with pytest.raises(PlanUnreadableError, match=r"0001\.json.*delete it and go on with"):
        verify(folder, server(), client(), resume=True)


def test_old_records_go_on_without_a_study_and_those_of_another_plan_are_refused(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    verify(folder, server(), client(), trials=1)
    study, file = folder / "trials/study.db", folder / "trials/0000.json"
    study.unlink()
    outcome = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.num_devices for one in outcome.trials] == [8, 16]
    study.unlink()
    record = json.loads(file.read_text())
    record["decision"]["instances"][0]["count"] = 7
    file.write_text(json.dumps(record))
    with pytest.raises(
        PlanUnreadableError, match=r"launched aggregated 7 x 8 .* plan does not name"
    ):
        verify(folder, server(), client(), trials=2, resume=True)


def test_another_verification_of_the_plan_is_kept_out(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    with (
        exclusive_use(folder / "trials", plan=folder),
        pytest.raises(OutputError, match="another `moetune verify` launches this plan's"),
    ):
        verify(folder, server(), client())


def test_ctrl_c_ends_everything_and_keeps_the_records(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    left_running: LeftRunning,
) -> None:
    folder = write_plan()

    def interrupt(line: str) -> None:
        # In the second trial, when the server is ready and the client is about to run.
        if line.startswith("ready") and (folder / "trials/0000.json").exists():
            threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()

    slow = client("--requests", "1", "--tokens", "100000")
    with pytest.raises(KeyboardInterrupt):
        verify(
            folder,
            server(),
            f"bash -c 'test $0 = 1 && exec {client()} || exec {slow}' {{seed}}",
            trials=2,
            on_message=interrupt,
        )
    assert [one.status for one in read_serve_trials(folder)] == ["ok"]
    assert left_running(folder) == []
    outcome = verify(folder, server(), client(), trials=2, resume=True)
    assert [one.status for one in outcome.trials] == ["ok", "ok"]


def test_a_verification_that_is_killed_leaves_neither_server_nor_client(
    write_plan: WritePlan,
    server: Command,
    client: Command,
    verify: Verify,
    url: str,
    left_running: LeftRunning,
) -> None:
    folder = write_plan()
    slow = client("--requests", "1", "--tokens", "100000")
    options = ["--launcher", "command", "--command", server(), "--bench", slow, "--url", url]
    command = [sys.executable, "-m", "tuner", "verify", str(folder), *options]
    until_s = time.monotonic() + 60.0
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as killed:
        while len(left_running(folder)) < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
        killed.kill()
    while [*left_running(folder), *(folder / "trials").glob("*-*")]:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    outcome = verify(folder, server(), client())
    assert [one.status for one in outcome.trials] == ["ok"]


def test_files_of_other_decisions_go_with_the_refresh(
    write_plan: WritePlan, server: Command, client: Command, verify: Verify
) -> None:
    folder = write_plan()
    # The winner has one instance and no router; the alternatives have one.
    stale = folder / "launch/sglang/router.sh"
    stale.parent.mkdir(parents=True)
    stale.write_text("of an alternative")
    plan = json.loads((folder / "plan.json").read_text())
    beside = folder.parent / "of nobody's plan"
    beside.touch()
    plan["files"] = ["launch/sglang/router.sh", f"launch/../../{beside.name}", "plan.json"]
    # An older release knew fewer fields.
    del plan["alternatives"]
    (folder / "plan.json").write_text(json.dumps(plan))
    verify(folder, server(), client())
    assert not stale.exists()
    assert beside.exists()
    named = read_serve_plan(folder).files
    assert json.loads((folder / "plan.json").read_text()) | {"files": plan["files"]} == plan
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
    assert "trial 1: aggregated 2 x 8 on h100" in shown.err
    assert "1 x 8 aggregated, by devices\n" in shown.out
    assert shown.out.count(", median of 1 run\n") == 2
    contains(shown.out, " P99 ", "it is the winner")
    repeated = [*options, "--trials", "2", "--resume", "--json"]
    resumed = ServeVerified.model_validate_json(output(capsys, ["verify", folder, *repeated]))
    assert resumed.regret_ratio == 0.0
    assert frame.run(["verify", str(folder), *options]) == 2
    assert "holds 2 trials already: add --resume" in capsys.readouterr().err


def test_no_deployment_that_runs_is_a_negative_result(
    write_plan: WritePlan, client: Command, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--launcher", "command", "--command", "false", "--bench", client(), "--url", url]
    assert "no deployment could be measured" in output(
        capsys, ["verify", write_plan(), *options, "--trials", "1"], code=1
    )
