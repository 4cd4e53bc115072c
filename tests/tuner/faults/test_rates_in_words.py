"""Failures as operators count them: nodes lost a week, and which of the rates may be left out."""

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.expect import present
from tuner.faults.reliability import Jobs, failure_rate_per_s
from tuner.faults.resolved import resolved
from tuner.goals.train_notes import analytic_notes
from tuner.goals.train_spec import read_spec
from tuner.spec.goal import Checkpoint, Reliability

WEEK_S = 7 * 86_400.0
SPEC = """
schema_version: 1
model: {model}
cluster:
  pools: [{{name: h, device: h100-sxm, nodes: 8, devices_per_node: 8}}]
goal:
  kind: train
  sequence_length: 4096
  global_batch_size: 512
  tokens: 1.0e12
  reliability: {reliability}
emit: [megatron-lm]
"""
MODEL = Path(__file__).parents[3] / "examples" / "models" / "mixtral-8x7b" / "config.json"


def stated(tmp_path: Path, text: str) -> Reliability:
    file = tmp_path / "spec.yaml"
    file.write_text(SPEC.format(model=MODEL, reliability=text))
    return present(read_spec(file).goal.reliability)


JOBS = Jobs(devices=64, nodes=8, checkpoint_bytes=1e12, writers=64)


def test_nodes_lost_a_week_are_a_mean_time_between_failures(tmp_path: Path) -> None:
    # One in a hundred nodes a week: a node fails every hundred weeks, eight nodes every 12.5.
    found = stated(tmp_path, "{nodes_lost: 1% per week, restart: 10min}")
    assert found.node_mtbf_s == pytest.approx(100 * WEEK_S)
    assert found.device_mtbf is None
    failures = resolved(found, host_bytes_per_s=5e10, profile=None)
    assert failures.device_mtbf_s == math.inf
    assert 1.0 / failure_rate_per_s(JOBS, failures) == pytest.approx(12.5 * WEEK_S)
    same = stated(tmp_path, "{node_mtbf: 100w, restart: 10min}")
    assert same.node_mtbf_s == pytest.approx(found.node_mtbf_s)


def test_devices_and_nodes_add_up(tmp_path: Path) -> None:
    found = stated(tmp_path, "{device_mtbf: 50000h, nodes_lost: 1%/7d, restart: 10min}")
    failures = resolved(found, host_bytes_per_s=5e10, profile=None)
    wanted = 64 / (50_000 * 3600.0) + 8 * 0.01 / WEEK_S
    assert failure_rate_per_s(JOBS, failures) == pytest.approx(wanted)


def test_what_says_nothing_or_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="nothing is said to fail: give nodes_lost"):
        Reliability(restart=600.0)
    with pytest.raises(ValidationError, match="give one of them"):
        Reliability(restart=600.0, node_mtbf=1e7, nodes_lost=1e-8)


def test_a_stated_rate_survives_the_file_of_a_plan() -> None:
    one = Reliability(restart=600.0, nodes_lost=0.01 / WEEK_S)
    assert Reliability.model_validate_json(one.model_dump_json()) == one


def test_an_assumed_checkpoint_bandwidth_is_noted_once(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(
        SPEC.format(model=MODEL, reliability="{nodes_lost: 1% per week, restart: 10min}")
    )
    spec = read_spec(file)
    told = [one for one in analytic_notes(spec, {}, calibrated=True) if "checkpoint" in one]
    assert len(told) == 1
    assert "assumed to be 2.00 GB/s a machine" in told[0]
    reliability = present(spec.goal.reliability)
    known = reliability.model_copy(update={"checkpoint": Checkpoint(bandwidth=1e10)})
    spec = spec.model_copy(update={"goal": spec.goal.model_copy(update={"reliability": known})})
    assert not [one for one in analytic_notes(spec, {}, calibrated=True) if "checkpoint" in one]
