"""What a planned job does without a spare node, and the plan of its layout for one node less."""

import hashlib
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.expect import present, refused
from tests.printed import unwrapped
from tests.rows import Failures
from tuner.cli.app import app
from tuner.cli.plan_text import plan_text
from tuner.config.candidates import strategies_of
from tuner.errors import SpecError
from tuner.faults.fewer_nodes import LayoutShares, continued_run, layout_shares, node_losses
from tuner.faults.reliability import FailureModel, Jobs
from tuner.faults.run_shares import run_shares
from tuner.faults.without_spare import FewerNodes, WithoutSpare
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.train_plan import Planned, plan_training
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan
from tuner.report.run_section import run_notes, without_spare_sentence
from tuner.search.train.build_problem import price_pool
from tuner.search.train.plan_fields import failure_model
from tuner.spec.node_numbers import changed_spec, changed_yaml, fewer_nodes
from tuner.spec.spec import Spec

MODEL = Path(__file__).parents[4] / "examples" / "models" / "small-moe"
RELIABILITY: dict[str, Any] = {
    "nodes_lost": "40% per week",
    "restart": "10min",
    "repair": "24h",
    "without_spare": "continue",
}
POOL: dict[str, Any] = {"name": "a", "device": "h100-sxm", "nodes": 3, "devices_per_node": 2}
LIMITS: dict[str, Any] = {
    "tensor_model_parallel_size": [1],
    "context_parallel_size": [1],
    "pipeline_model_parallel_size": [1],
    "expert_tensor_parallel_size": [1],
    "micro_batch_size": [1],
    "recompute": ["none"],
    "dispatcher": ["alltoall"],
    "a2a_overlap": [False],
    "cuda_graph": ["none"],
    "chunks": [1],
}


def spec_keys(**reliability: Any) -> dict[str, Any]:
    """The keys of a spec; a value of None leaves a key out."""
    stated = {
        name: value for name, value in (RELIABILITY | reliability).items() if value is not None
    }
    return {
        "schema_version": 1,
        "model": str(MODEL),
        "cluster": {"pools": [dict(POOL)]},
        "goal": {
            "kind": "train",
            "sequence_length": 1024,
            "global_batch_size": 96,
            "tokens": 1e11,
            "reliability": stated,
        },
        "search": dict(LIMITS),
        "emit": ["megatron-lm"],
    }


def plan_keys(keys: dict[str, Any], folder: Path) -> Planned:
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return plan_training(path, with_unlaunchable=False)


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """A plan that goes on with fewer nodes."""
    return plan_keys(spec_keys(), tmp_path_factory.mktemp("continued"))


def _record(plan: Plan) -> WithoutSpare:
    return present(present(present(plan.predicted).run).without_spare)


def _fewer(planned: Planned) -> FewerNodes:
    return present(_record(planned.plan).fewer)


def test_the_layout_of_fewer_nodes_is_a_plan_of_its_own(continued: Planned) -> None:
    full, fewer, made = continued.plan, _fewer(continued), present(continued.fewer)
    small = made.plan
    assert (present(full.decision).num_devices, present(small.decision).num_devices) == (
        6,
        fewer.devices,
    )
    assert fewer.devices == 2 * fewer.nodes
    assert fewer.nodes + fewer.idle_nodes == 2
    assert fewer.fewest_searched == 2
    assert present(small.decision).zero_stage == present(full.decision).zero_stage
    # Megatron-LM restores no optimizer of experts where there are no expert ranks.
    expert_ranks = [
        one.expert_model_parallel_size > 1
        for one in (present(full.decision), present(small.decision))
    ]
    assert expert_ranks[0] is expert_ranks[1]
    assert small.goal.global_batch_size == full.goal.global_batch_size
    assert small.cluster.pools[0].nodes == 2
    assert fewer.step_time_s == present(small.predicted).step_time_s
    assert fewer.throughput_ratio == pytest.approx(
        present(full.predicted).step_time_s / present(small.predicted).step_time_s
    )
    assert _record(small) == _record(full).model_copy(update={"is_fewer": True})
    # Every byte once; a third of them by each of three nodes.
    assert fewer.read_bytes == pytest.approx(3 * fewer.node_read_bytes, abs=3)
    assert fewer.read_bytes == pytest.approx(fewer.nodes * fewer.fewer_node_read_bytes, abs=3)


def _shares(plan: Plan, spec: Spec) -> tuple[Jobs, FailureModel, LayoutShares, float]:
    strategies = strategies_of(
        present(plan.decision),
        sequence_length=spec.goal.sequence_length,
        global_batch_size=spec.goal.global_batch_size,
    )
    jobs, model = failure_model(spec, price_pool(spec.cluster.pools[0], residuals=None), strategies)
    assert model is not None
    step_s = present(plan.predicted).step_time_s
    own = run_shares(jobs, model, step_s=step_s)
    return jobs, model, layout_shares(own, jobs, model, step_s=step_s), own.training


def test_the_run_of_the_plan_is_that_of_the_formula(continued: Planned) -> None:
    jobs, model, full, waited = _shares(continued.plan, continued.spec)
    others, _, small, _ = _shares(present(continued.fewer).plan, present(continued.fewer).spec)
    fewer = _fewer(continued)
    made = continued_run(node_losses(jobs, others, model, idle_nodes=fewer.idle_nodes), full, small)
    record, predicted = _record(continued.plan), present(continued.plan.predicted)
    run = present(predicted.run)
    assert record.decision == "continue"
    assert record.wait_effective_time_ratio == pytest.approx(waited, rel=1e-6)
    assert run.effective_time_ratio == pytest.approx(made.training, rel=1e-6)
    assert run.effective_time_ratio == fewer.effective_time_ratio > waited
    assert run.time_ratios["slower"] == pytest.approx(made.slower, rel=1e-6)
    assert sum(run.time_ratios.values()) == pytest.approx(1.0)


def test_a_job_that_continues_keeps_its_restart_inside_processes(tmp_path: Path) -> None:
    made = plan_keys(spec_keys(process_mtbf="30d", in_process_restart="45s"), tmp_path)
    assert _record(made.plan).decision == "continue"
    restart = present(present(present(made.plan.predicted).run).process_restart)
    assert restart.decision == "in_process"
    assert restart.effective_time_ratio > restart.full_effective_time_ratio


def test_auto_takes_the_larger_share_and_names_the_other(
    continued: Planned, tmp_path: Path
) -> None:
    # A restart longer than the repair: two more restarts are all that fewer nodes bring.
    waits = plan_keys(spec_keys(without_spare="auto", restart="3h", repair="30min"), tmp_path)
    record = _record(waits.plan)
    assert (record.decision, waits.fewer) == ("wait", None)
    assert present(record.fewer).effective_time_ratio < record.wait_effective_time_ratio
    run = present(present(waits.plan.predicted).run)
    assert run.effective_time_ratio == record.wait_effective_time_ratio
    assert without_spare_sentence(run).startswith("wait for a repair: ")
    assert not list(run_notes(run))
    # The stated decision is kept.
    stated = plan_keys(spec_keys(restart="3h", repair="30min"), tmp_path)
    assert _record(stated.plan).decision == "continue"
    assert stated.fewer is not None
    sentence = without_spare_sentence(present(present(continued.plan.predicted).run))
    assert "of 3 nodes in" in sentence
    assert "waiting" in sentence
    assert sentence in unwrapped(plan_text(continued.plan, folder=tmp_path))
    assert any("are read from shared storage" in note for note in continued.plan.provenance.notes)


def _steps_per_s(made: Planned) -> float:
    predicted = present(made.plan.predicted)
    return present(predicted.run).effective_time_ratio / predicted.step_time_s


def test_two_automatic_keys_are_never_worse_than_stated_ones(
    tmp_path: Path, failures: Failures
) -> None:
    # Processes fail often, so that copies on hosts pay; beside them Megatron-LM's sharded state
    # cannot be restored in another layout, which pays more where repairs take a day.
    kept = (["shared"], ["host", "shared"])
    pairs = [*itertools.product(kept, ("wait", "continue")), ("auto", "auto")]
    day = {"process_mtbf": "1d", "repair": "24h"}
    together = 0
    for stage, rates in ((1, day), (1, {"process_mtbf": "2h", "repair": "1h"})):
        speeds = []
        for levels, without in pairs:
            checkpoint = {"levels": levels, "bandwidth": "2GB/s"}
            keys = spec_keys(checkpoint=checkpoint, without_spare=without, **rates)
            keys["search"] = LIMITS | {"zero_stage": [stage]}
            made = plan_keys(keys, tmp_path)
            speeds.append(_steps_per_s(made))
            together += any("decided together" in one for one in made.plan.provenance.notes)
        with failures.of((stage, rates)):
            assert speeds[-1] >= max(speeds) * (1 - 1e-9), speeds
    assert together


def test_without_it_a_plan_says_nothing_of_it(tmp_path: Path) -> None:
    made = plan_keys(spec_keys(without_spare=None), tmp_path)
    assert made.fewer is None
    assert "without_spare" not in json.dumps(made.plan.model_dump(mode="json"))


def _emit(*names: str, **changes: Any) -> dict[str, Any]:
    return spec_keys() | {"emit": list(names)} | changes


def _pools(*pools: dict[str, Any]) -> dict[str, Any]:
    return spec_keys() | {"cluster": {"pools": list(pools)}}


def test_a_job_that_cannot_continue_waits_for_one_reason(
    tmp_path: Path, failures: Failures
) -> None:
    host = {"levels": ["host", "shared"], "replicas": 0}
    rows = {
        "uses a single node": _pools(POOL | {"nodes": 1, "devices_per_node": 4}),
        "planned on one pool": spec_keys()
        | {
            "cluster": {
                "pools": [POOL, POOL | {"name": "b"}],
                "links": [{"between": ["a", "b"], "bandwidth": "50GB/s", "latency": "10us"}],
            },
            "search": {name: values for name, values in LIMITS.items() if "pipeline" not in name},
        },
        "share a scale-up domain": _pools(POOL | {"scale_up_domain": 6}),
        "until ds_to_universal.py has converted it": _emit(
            "deepspeed", search=LIMITS | {"recompute": ["full"]}
        ),
        "no layout of 2 to 2 nodes": spec_keys() | {"search": LIMITS | {"data_parallel_size": [6]}},
        "beside checkpoints on hosts": spec_keys(checkpoint=host)
        | {"search": LIMITS | {"zero_stage": [1]}},
    }
    for reason, keys in rows.items():
        with failures.of(reason):
            made = plan_keys(keys, tmp_path)
            record = _record(made.plan)
            assert (record.decision, made.fewer, record.fewer) == ("wait", None, None)
            assert reason in record.reason
            assert "\n" not in record.reason


def test_checkpoints_that_the_other_layout_has_no_time_for_are_a_reason(
    continued: Planned, tmp_path: Path
) -> None:
    # Copies on hosts more often than steps of fewer nodes end, but not than those of all nodes.
    between_s = (
        present(continued.plan.predicted).step_time_s + _fewer(continued).step_time_s
    ) / 2.0
    host = {"levels": ["host", "shared"], "replicas": 0, "host_interval": f"{between_s:.6f}s"}
    other = plan_keys(
        spec_keys(checkpoint=host) | {"search": LIMITS | {"zero_stage": [0]}}, tmp_path
    )
    record = _record(other.plan)
    assert (record.decision, other.fewer) == ("wait", None)
    assert record.reason.startswith("no plan of 2 nodes: ")
    assert "host_interval" in record.reason


def test_bad_values_are_refused_in_a_line(tmp_path: Path, failures: Failures) -> None:
    path = tmp_path / "spec.yaml"
    rows = {
        "'wait', 'continue' or 'auto'": spec_keys(without_spare="go on"),
        "without_spare: continue needs repair": spec_keys(repair=None),
        "without_spare: auto needs repair": spec_keys(without_spare="auto", repair=None),
    }
    for message, keys in rows.items():
        path.write_text(yaml.safe_dump(keys), encoding="utf-8")
        with failures.of(message), refused(SpecError, message):
            read_spec(path)
    result = CliRunner().invoke(app, ["plan", str(path), "-o", str(tmp_path / "plan")])
    assert result.exit_code == 2 or isinstance(result.exception, SpecError)


def test_an_engine_that_needs_as_many_replicas_gets_them(tmp_path: Path) -> None:
    # torchtitan's data loader asserts it: 3 stages of 2 replicas each, then 2 stages.
    stages = {"pipeline_model_parallel_size": [1, 2, 3], "zero_stage": [2]}
    made = plan_keys(
        _emit("torchtitan", search=LIMITS | stages | {"data_parallel_size": [2]}), tmp_path
    )
    decisions = [one.decision for one in (made.plan, present(made.fewer).plan)]
    assert [one and one.data_parallel_size for one in decisions] == [2, 2]
    assert [one and one.num_devices for one in decisions] == [6, 4]
    # Without a pipeline every replica is another rank, and none fits fewer nodes.
    alone = plan_keys(_emit("torchtitan", search=LIMITS | {"zero_stage": [2]}), tmp_path)
    assert _record(alone.plan).reason.startswith("no layout of 2 to 2 nodes")


def test_unequal_replicas_leave_no_node_idle(tmp_path: Path) -> None:
    # 32 micro-batches: 11+11+10 on three of four nodes; 16+16 where replicas must run as many.
    four = {"cluster": {"pools": [POOL | {"nodes": 4, "devices_per_node": 1}]}}
    goal = spec_keys()["goal"] | {"global_batch_size": 32, "sequence_length": 4096}
    same = four | {"goal": goal, "search": LIMITS | {"expert_model_parallel_size": [1]}}
    able, equal = (
        plan_keys(_emit(name, **same), tmp_path) for name in ("reference", "megatron-lm")
    )
    assert (_fewer(able).nodes, _fewer(able).idle_nodes) == (3, 0)
    assert (_fewer(equal).nodes, _fewer(equal).idle_nodes) == (2, 1)
    assert _fewer(able).layout == "dp3 with 11+11+10 micro-batches"
    assert _fewer(equal).layout == "dp2"
    # The most-loaded replica runs 11 micro-batches instead of 8: at best 32/3/11 = 0.97 of three
    # quarters of the throughput. What a step does once is as long as before.
    assert 8 / 11 < _fewer(able).throughput_ratio < 0.75
    assert _fewer(equal).throughput_ratio < 0.6


def test_megatron_keeps_expert_ranks_or_none(tmp_path: Path) -> None:
    for sizes in ([1], [2], [2, 1, 4]):
        made = plan_keys(
            spec_keys() | {"search": LIMITS | {"expert_model_parallel_size": sizes}}, tmp_path
        )
        has_ranks = present(made.plan.decision).expert_model_parallel_size > 1
        same = tuple(one for one in sizes if (one > 1) is has_ranks)
        assert present(made.fewer).spec.search.expert_model_parallel_size == same, sizes
        assert present(present(made.fewer).plan.decision).expert_model_parallel_size in same, sizes


def test_the_folder_holds_both_plans_and_forgets_the_other(
    continued: Planned, tmp_path: Path
) -> None:
    folder = tmp_path / "plan"
    write = partial(
        write_plan, folder, continued.plan, spec=continued.spec, profiles=continued.profiles
    )
    written = write(fewer=continued.fewer)
    inside = folder / "fewer-nodes"
    small = read_plan(inside)
    assert set(written.files) == {
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()
    }
    assert set(small.files) == {
        str(file.relative_to(inside)) for file in inside.rglob("*") if file.is_file()
    }
    text = (inside / "used" / "spec.yaml").read_bytes()
    assert hashlib.sha256(text).hexdigest() == small.provenance.spec_sha256
    keys = yaml.safe_load(text)
    assert keys["cluster"]["pools"][0]["nodes"] == 2
    assert "without_spare" not in keys["goal"]["reliability"]
    for one, nodes in ((folder, 3), (inside, _fewer(continued).nodes)):
        launch = one / "launch" / "megatron-lm"
        assert (launch / "run.sh").stat().st_mode & 0o100
        assert f"NNODES:-{nodes}" in (launch / "run.sh").read_text(encoding="utf-8")
    (inside / "trials").mkdir()
    (inside / "trials" / "0001.json").write_text("{}", encoding="utf-8")
    write(fewer=None)
    assert not (inside / "plan.json").exists()
    assert not (inside / "launch").exists()
    assert not (inside / "trials" / "0001.json").exists()


def test_its_checkpoints_are_on_shared_storage_alone_where_those_of_all_nodes_are(
    tmp_path: Path,
) -> None:
    levels = {"levels": "auto", "replicas": 1, "host_interval": "5min", "host_memory": "40GB"}
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec_keys(checkpoint=levels)), encoding="utf-8")
    spec = read_spec(path)
    for is_shared_only, keeps in ((True, False), (False, True)):
        fewer = fewer_nodes(2, spare_nodes=0, limits={}, is_shared_only=is_shared_only)
        path_of_fewer = tmp_path / "fewer.yaml"
        path_of_fewer.write_bytes(changed_yaml(spec, fewer.values))
        stated = present(changed_spec(spec, fewer.values).goal.reliability)
        assert stated.checkpoint.keeps_host_copies is keeps
        assert read_spec(path_of_fewer).goal.reliability == stated
