"""Smaller jobs are priced by the model that the plan itself was priced by."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present
from tests.rows import each_row
from tuner import api
from tuner.engines.files import launch_files
from tuner.engines.writers import emit_all
from tuner.errors import OutsideProfileError
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.verify import command_trials
from tuner.plans.folder import TRIALS_NAME
from tuner.plans.train import Plan, VerifiedPlan
from tuner.verify.budget.budget import Budget
from tuner.verify.budget.prices import build_pricer
from tuner.verify.budget.scale import launchable_scales, scaled_plan
from tuner.verify.launches import TrialJobs
from tuner.verify.records import read_trials
from tuner.verify.space import TrainSpace
from tuner.verify.verification import Effort, Watcher

SEARCH = {
    "context_parallel_size": [1],
    "tensor_model_parallel_size": [1],
    "expert_model_parallel_size": [4, 8],
    "pipeline_model_parallel_size": [1, 2],
    "virtual_pipeline_model_parallel_size": [1],
}
ENGINE = """
import json, sys
layers = int(sys.argv[sys.argv.index("--num-layers") + 1])
with open(sys.argv[1], "w") as stream:
    for step in range(20):
        print(json.dumps({"step": step, "step_s": 0.1 + 0.05 * layers}), file=stream)
with open(sys.argv[2], "a") as stream:
    print(layers, sys.argv[3], file=stream)
"""
"""An engine whose step has a fixed part and one per layer; it notes what it was asked for."""


@pytest.fixture(scope="session")
def plan_for(
    tmp_path_factory: pytest.TempPathFactory, write_spec: Callable[..., Path]
) -> Callable[[str], Path]:
    """Plan a target on sixteen H100 by their datasheet: plan_for(target) -> the plan's folder."""

    def planned(target: str) -> Path:
        folder = tmp_path_factory.mktemp(target)
        spec = write_spec(
            folder,
            model={"num_hidden_layers": 8, "hidden_size": 1024, "num_attention_heads": 8},
            goal={"global_batch_size": 64, "sequence_length": 256},
            search=SEARCH,
            emit=(target, "slurm"),
        )
        text = spec.read_text(encoding="utf-8").replace("profile: profile", "device: h100-sxm")
        text = text.replace("devices_per_node: 4", "devices_per_node: 8")
        text = text.replace("nodes: 1", "nodes: 2")
        spec.write_text(text.replace("memory_per_device: 1GiB", "price_per_device_hour: 2.0"))
        made = api.plan(spec, with_unlaunchable=False, top=6)
        write_plan(folder / "plan", made.plan, spec=made.spec, profiles=made.profiles)
        return folder / "plan"

    return planned


@pytest.fixture(scope="session")
def sixteen(plan_for: Callable[[str], Path]) -> Path:
    """The folder of a plan of Megatron-LM."""
    return plan_for("megatron-lm")


@each_row("target", ["megatron-lm", "megatron-bridge", "torchtitan", "deepspeed"])
def test_every_target_writes_smaller_jobs_that_ask_for_their_devices(
    plan_for: Callable[[str], Path], sixteen: Path, target: str
) -> None:
    folder = sixteen if target == "megatron-lm" else plan_for(target)
    plan = read_plan(folder)
    price = present(build_pricer(TrainSpace(plan=plan), used=folder / "used"))
    decisions = [plan.decision, *(one.decision for one in plan.runners_up)]
    seen = 0
    for decision in decisions:
        assert decision is not None
        for scale in launchable_scales(plan, decision, max_devices=8):
            smaller = scaled_plan(plan, scale)
            trial = VerifiedPlan(
                plan=smaller,
                decision=scale.decision,
                predicted=price(smaller, scale.decision),
                waived="this is a trial of the plan",
            )
            texts = launch_files(emit_all(trial)).contents
            (script,) = (text for name, text in texts.items() if name.endswith(".sbatch"))
            assert "--nodes=1" in script
            assert f"--gpus-per-node={scale.num_devices}\n" in script
            seen += 1
    assert seen


def test_a_whole_job_costs_what_the_plan_says(sixteen: Path) -> None:
    plan = read_plan(sixteen)
    price = present(build_pricer(TrainSpace(plan=plan), used=sixteen / "used"))
    known = [(plan.decision, plan.predicted)]
    known += [(one.decision, one.predicted) for one in plan.runners_up]
    assert len(known) > 3
    for decision, predicted in known:
        assert decision is not None
        assert predicted is not None
        result = price(plan, decision)
        assert result.step_time_s == pytest.approx(predicted.step_time_s, rel=1e-9)
        assert result.peak_memory_bytes == predicted.peak_memory_bytes
        assert result.communication_s == pytest.approx(predicted.communication_s, rel=1e-9)
        assert sum(result.breakdown_s.values()) == pytest.approx(result.step_time_s)


def test_fewer_layers_cost_less(sixteen: Path) -> None:
    plan = read_plan(sixteen)
    price = present(build_pricer(TrainSpace(plan=plan), used=sixteen / "used"))
    decision = next(
        one.decision for one in plan.runners_up if one.decision.pipeline_model_parallel_size == 1
    )
    whole = price(plan, decision)
    for scale in launchable_scales(plan, decision, max_devices=16):
        result = price(scaled_plan(plan, scale), scale.decision)
        assert result.step_time_s < whole.step_time_s * 1.001


def test_a_plan_of_another_release_has_no_smaller_jobs(sixteen: Path) -> None:
    plan = read_plan(sixteen)
    assert plan.predicted is not None
    slower = plan.predicted.model_copy(update={"step_time_s": 2.0 * plan.predicted.step_time_s})
    stale: Plan = plan.model_copy(update={"predicted": slower})
    space = TrainSpace(plan=stale)
    price = present(build_pricer(space, used=sixteen / "used"))
    assert stale.decision is not None
    with pytest.raises(OutsideProfileError, match="plan anew to launch smaller jobs"):
        price(stale, stale.decision)
    assert TrialJobs(space=space, price=price, max_devices=8).job(stale.decision) is None


def test_the_users_engine_is_launched_smaller_by_its_own_command(
    sixteen: Path, tmp_path: Path
) -> None:
    engine, requested = tmp_path / "engine.py", tmp_path / "asked.txt"
    engine.write_text(ENGINE)
    command = f"{sys.executable} {engine} {{metrics}} {requested} {{world}} {{megatron_args}}"
    result = api.verify(
        sixteen,
        effort=Effort(trials=3, steps=4),
        resume=False,
        watcher=Watcher(started=lambda _one, _s: None, ended=lambda _record: None),
        by=command_trials(command=command, metrics="jsonl"),
        budget=Budget(max_devices=8),
    )
    records = read_trials(sixteen / TRIALS_NAME)
    assert records
    assert [one.status for one in records] == ["ok"] * len(records)
    launched = [tuple(map(int, line.split())) for line in requested.read_text().splitlines()]
    for record, (layers, world) in zip(records, launched, strict=True):
        assert record.scale is not None
        assert (len(record.scale.layers), record.scale.num_devices) == (layers, world)
        assert world <= 8
    assert present(result.winner).num_devices == 16
    stored: dict[str, Any] = json.loads((sixteen / "verified.json").read_text())
    assert stored["winner_extrapolated"]["error_ratio"] > 0.0
