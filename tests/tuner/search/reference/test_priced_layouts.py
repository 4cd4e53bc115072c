"""What failures make of a run that a profile of the reference step prices, and its fewer nodes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.records import Profile
from profilers.steps.config import StepConfig
from tests.expect import present
from tuner import api
from tuner.cli.plan_text import plan_text
from tuner.engines.reference.step_config import step_config
from tuner.errors import SpecError
from tuner.faults.without_spare import WithoutSpare
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.train_plan import Planned
from tuner.plans.train import Plan

RELIABILITY: dict[str, Any] = {
    "nodes_lost": "40% per week",
    "restart": "10min",
    "repair": "24h",
    "without_spare": "auto",
}
SEARCH: dict[str, Any] = {
    "pipeline_model_parallel_size": [1],
    "micro_batch_size": [1],
    "recompute": ["none"],
}

MakePlanned = Callable[..., Planned]


@pytest.fixture
def made(
    tmp_path: Path,
    write_spec: Callable[..., Path],
    profile_for: Callable[[Path], Profile],
    store_profile: Callable[[Path, Profile], Path],
) -> MakePlanned:
    """A plan of four nodes of one device on the formula machine."""

    def make(*, search: dict[str, Any] | None = None, **reliability: Any) -> Planned:
        stated = {key: value for key, value in (RELIABILITY | reliability).items() if value}
        spec = write_spec(
            tmp_path,
            model={"num_local_experts": 12},
            pool={"nodes": 4, "devices_per_node": 1},
            goal={"global_batch_size": 32, "tokens": 1e9, "reliability": stated},
            search=SEARCH | (search or {}),
        )
        store_profile(tmp_path / "profile", profile_for(spec))
        return api.plan(spec)

    return make


def _record(plan: Plan) -> WithoutSpare:
    return present(present(present(plan.predicted).run).without_spare)


def test_three_of_four_nodes_run_11_11_and_10_micro_batches(
    made: MakePlanned, tmp_path: Path
) -> None:
    planned = made()
    record = _record(planned.plan)
    assert (record.decision, record.nodes) == ("continue", 4)
    fewer = present(record.fewer)
    small = present(planned.fewer).plan
    assert (fewer.nodes, fewer.idle_nodes, present(small.decision).data_parallel_size) == (3, 0, 3)
    assert fewer.layout.endswith("with 11+11+10 micro-batches")
    assert "micro-batches  11+11+10 on the replicas" in plan_text(small, folder=tmp_path)
    # Of 32 micro-batches the most-loaded of three runs 11, of four 8: at best 32/3/11 = 0.97 of
    # three quarters. Expert groups of three exchange less than those of four.
    assert small.predicted is not None
    busy = [
        one.breakdown_s["attention"] for one in (small.predicted, present(planned.plan.predicted))
    ]
    assert busy[0] / busy[1] == pytest.approx(11 / 8)
    assert 0.95 < fewer.throughput_ratio / 0.75 < 1.05
    # Tokens are those of the global batch.
    assert small.predicted.tokens_per_s_per_device == pytest.approx(
        32 * 64 / 3 / small.predicted.step_time_s
    )
    assert fewer.read_bytes == pytest.approx(3 * fewer.fewer_node_read_bytes, abs=3)
    # What is launched is the plan: in its folder, and in the trials of `verify`.
    folder = tmp_path / "plan"
    write_plan(
        folder,
        planned.plan,
        spec=planned.spec,
        profiles=planned.profiles,
        fewer=present(planned.fewer),
    )
    inside = folder / "fewer-nodes"
    assert read_plan(inside).model_copy(update={"files": ()}) == small
    assert StepConfig.model_validate_json(
        (inside / "launch" / "reference" / "step.json").read_text(encoding="utf-8")
    ).microbatches == (11, 11, 10)
    whole = present(planned.plan.decision)
    assert step_config(planned.plan, whole, steps=1, warmup_steps=0).microbatches is None


def test_a_run_is_forecast_as_on_the_analytic_model(made: MakePlanned) -> None:
    waiting = made(without_spare=None)
    assert waiting.fewer is None
    predicted = present(waiting.plan.predicted)
    run = present(predicted.run)
    assert 0.0 < present(run.effective_time_ratio) < 1.0
    assert run.without_spare is None
    assert run.wall_clock_s == pytest.approx(
        math.ceil(1e9 / (32 * 64)) * predicted.step_time_s / present(run.effective_time_ratio),
        rel=1e-3,
    )
    notes = waiting.plan.provenance.notes
    assert not any("goal.reliability has no effect" in note for note in notes)


def test_spare_nodes_take_no_part(made: MakePlanned) -> None:
    assert present(made(spare_nodes=1, without_spare=None).plan.decision).num_devices == 3
    with pytest.raises(SpecError, match="leaves none of the 4 nodes"):
        made(spare_nodes=4)
