"""The suite `engine`: a server that stands in for an engine, its steps, and plans on them."""

import shlex
import socket
import statistics
import sys
from pathlib import Path

import pytest

from profilers.errors import ProfileUnreadableError
from tests.expect import present
from tests.tuner.goals.test_processors import deployment, profile
from tuner import api
from tuner.cli.app import run
from tuner.costs.serve.engine_steps import NAME, drop_engine_steps, read_engine_steps
from tuner.errors import EnvironmentMissingError, SpecError
from tuner.goals.engine_profile import profile_engine

__all__ = ["profile"]  # a fixture

SERVER = Path(__file__).parents[1] / "verify" / "deployments" / "tiny_server.py"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def command(port: int, *options: str) -> str:
    return shlex.join([sys.executable, str(SERVER), "--port", str(port), *options])


def test_steps_are_measured_stored_and_planned_with(tmp_path: Path, profile: Path) -> None:
    spec, port = deployment(tmp_path), free_port()
    before = api.deploy(spec, profiles=profile).plan
    steps = profile_engine(
        profile,
        spec,
        command=command(port, "--ttft", "0.05", "--tpot", "0.01"),
        url=f"http://127.0.0.1:{port}",
        start_s=60.0,
        on_message=lambda _: None,
    )
    assert read_engine_steps(profile) == steps
    assert [one.tensor_parallel for one in steps.launches] == [1, 2]
    for launch in steps.launches:
        assert 0.0 < present(launch.start_up_s) < 60.0
        assert [one.tokens for one in launch.prompts] == [16, 64, 256, 960]
        assert all(min(one.seconds) >= 0.05 for one in launch.prompts)
        gaps = [statistics.median(one.seconds) for one in launch.decodes]
        assert len(gaps) >= 4
        assert all(0.009 < gap < 1.0 for gap in gaps)
    after = api.deploy(spec, profiles=profile).plan
    # The stand-in takes as long whatever the prompt: overhead of the host, not of kernels.
    assert present(after.predicted).ttft_s.mean >= 0.04
    assert present(after.predicted).tpot_s.mean >= 0.008
    low, high = present(after.predicted).ttft_s_band
    assert high / low < 2.5
    scaled = deployment(tmp_path, emit=["vllm", "kubernetes", "keda"])
    scaling = present(api.deploy(scaled, profiles=profile).plan.autoscaling)
    assert scaling.start_up_s == steps.start_up_s
    drop_engine_steps(profile)
    assert api.deploy(spec, profiles=profile).plan.predicted == present(before.predicted)


@pytest.mark.parametrize("options", [("--say", "no such model"), ("--fail-every", "3")])
def test_an_engine_that_fails_is_one_line_and_stores_nothing(
    tmp_path: Path, profile: Path, options: tuple[str, ...]
) -> None:
    port = free_port()
    with pytest.raises(EnvironmentMissingError, match="the engine's steps were not"):
        profile_engine(
            profile,
            deployment(tmp_path),
            command=command(port, *options),
            url=f"http://127.0.0.1:{port}",
            start_s=30.0,
            on_message=lambda _: None,
        )
    assert not (profile / NAME).exists()


def test_the_suite_needs_a_spec_that_serves_and_a_command(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(deployment(tmp_path))
    for options, reason in (
        (["--suite", "engine", "--for", spec], "--suite engine needs --for"),
        (["--suite", "engine", "--command", "true"], "--suite engine needs --for"),
        (["--suite", "links", "--command", "true"], "which is not selected"),
    ):
        assert run(["profile", "-o", str(profile), *options]) == SpecError.exit_code
        assert reason in capsys.readouterr().err


def test_damaged_steps_are_one_line(tmp_path: Path, profile: Path) -> None:
    (profile / NAME).write_text('{"schema_version": 1, "engine": 3}')
    with pytest.raises(ProfileUnreadableError, match="measure the suite engine again"):
        api.deploy(deployment(tmp_path), profiles=profile)
