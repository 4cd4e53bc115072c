"""Plans with checkpoint levels: which engines have them, what is chosen, what is said of it."""

from pathlib import Path
from typing import Any

import pytest

from tests.expect import present, refused
from tests.printed import unwrapped
from tests.rows import Failures
from tests.tuner.search.train import testing
from tuner.cli.plan_text import plan_text
from tuner.config.columns import Strategies
from tuner.costs.train.calibration import shipped
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.faults.policies import choose_policy
from tuner.goals.train_notes import analytic_notes, with_assumptions
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.plan_fields import failure_model
from tuner.search.train.pools.build_problem import build_pools_problem
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Cluster, Link, Pool
from tuner.spec.goal import Checkpoint, Reliability
from tuner.spec.huggingface.read import read_model
from tuner.spec.spec import Spec
from tuner.spec.tune import FULL, Adapters

HOUR = 3600.0
WORKED = Path(__file__).parents[4] / "examples" / "worked" / "mixtral-8x7b-64-a100" / "spec.yaml"
OLMOE = Path(__file__).parents[4] / "examples" / "models" / "olmoe-1b-7b"
NICS = 8
FEW = {
    "context_parallel_size": (1,),
    "micro_batch_size": (1,),
    "tensor_model_parallel_size": (1,),
    "expert_model_parallel_size": (1, 8),
    "zero_stage": (0, 1),
    "activation_offload": (False,),
    "optimizer_offload": (False,),
}


def spec_with(checkpoint: Checkpoint, *, emit: str = "megatron-lm", **more: Any) -> Spec:
    """OLMoE on two H100 servers."""
    spec = read_spec(WORKED)
    pool = Pool(
        name="h", device="h100-sxm", nodes=2, devices_per_node=8, nics_per_node=NICS, nic=25e9
    )
    values: dict[str, Any] = {
        "device_mtbf": 3000 * HOUR,
        "process_mtbf": 20 * HOUR,
        "restart": 300.0,
    }
    stated = Reliability(checkpoint=checkpoint, **(values | more))
    goal = spec.goal.model_copy(update={"reliability": stated, "global_batch_size": 64})
    return spec.model_copy(
        update={
            "cluster": Cluster(pools=(pool,)),
            "goal": goal,
            "programs": programs((emit,)),
            "model": read_model(OLMOE),
            "search": spec.search.model_copy(update=FEW),
        }
    )


def planned(spec: Spec) -> Plan:
    return with_assumptions(testing.planned(spec))


SLOW_STORAGE: dict[str, Any] = {"bandwidth": 5e8}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned(spec_with(Checkpoint(levels="auto", **SLOW_STORAGE)))


def test_levels_are_chosen_and_said(plan: Plan) -> None:
    run = present(present(plan.predicted).run)
    levels = present(run.checkpoint_levels)
    assert levels.levels == ("host", "shared")
    assert present(run.checkpoint_interval_steps) % present(levels.host_interval_steps) == 0
    assert present(run.checkpoint_interval_steps) > present(levels.host_interval_steps)
    # Two nodes are one pair, and no group of three.
    assert {one.replicas for one in levels.compared if "host" in one.levels} == {0, 1}
    only = next(one for one in levels.compared if one.levels == ("shared",))
    assert only.effective_time_ratio < run.effective_time_ratio
    text = unwrapped(plan_text(plan, folder=Path("p"), verbose=True))
    for words in (
        f"every {levels.host_interval_steps:,} step",
        "in the memory of every machine",
        f"every {run.checkpoint_interval_steps:,} steps",
        "on shared storage",
        "on shared storage alone",
        "of restarts continue from copies on hosts",
        "not possible: 2 replicas of every node's copy need groups of 3 nodes",
    ):
        assert words in text, words


def test_a_configuration_that_an_engine_cannot_copy_keeps_to_shared_storage(
    failures: Failures,
) -> None:
    no_level = "has no checkpoints on hosts; they exist in megatron-lm, megatron-bridge"
    for emit, columns, message in (
        ("torchtitan", {}, f"torchtitan {no_level}"),
        ("deepspeed", {}, f"deepspeed {no_level}"),
        ("megatron-bridge", {}, ""),
        ("megatron-lm", {"zero_stage": 2.0}, "zero_stage 0 or 1 in megatron-lm, and it is 2"),
        ("megatron-lm", {"optimizer_offload": 1.0}, "of an optimizer that is offloaded"),
        ("megatron-lm", {}, ""),
    ):
        spec = spec_with(Checkpoint(levels="auto", replicas=1), emit=emit)
        strategies = Strategies(
            sequence=4096.0, micro_batch=1.0, num_microbatches=4.0, data=16.0, **columns
        )
        priced_pool = price_pool(spec.cluster.pools[0], residuals=shipped())
        jobs, model = failure_model(spec, priced_pool, strategies)
        assert model is not None
        choice = choose_policy(jobs, model, step_s=2.0)
        with failures.of(emit, columns):
            assert message in present(model.host).obstacle
            assert bool(message) == bool(choice.left_out)
            assert bool(message) == (choice.chosen is None)
            # Eight NICs of 200 Gbit/s a node.
            assert present(model.host).node_bytes_per_s == pytest.approx(NICS * 25e9)


def test_a_checkpoint_holds_what_its_engine_saves(failures: Failures) -> None:
    # Adapters of rank 16 on attention of OLMoE, 16 layers of four matrices 2048 x 2048: 16 * 4 *
    # 16 * 4096 parameters; 16 * 16 * (2048 * 4 + 4096) where q, k and v share one of them.
    separate, fused, full = 4_194_304, 3_145_728, num_parameters(read_model(OLMOE))
    lora = Adapters(method="lora", rank=16)
    half = lora.model_copy(update={"dtype": "bf16"})
    quantised = lora.model_copy(update={"method": "qlora"})
    for emit, tune, stage, saved, reread in (
        (("reference",), FULL, 1, 12 * full, 0),
        (("megatron-lm", "slurm"), FULL, 1, 14 * full, 0),
        (("megatron-lm",), FULL, 3, 12 * full, 0),
        (("megatron-lm", "reference"), FULL, 1, 14 * full, 0),
        (("torchtitan",), FULL, 2, 12 * full, 0),
        (("deepspeed",), FULL, 2, 14 * full, 0),
        (("deepspeed",), FULL, 3, 12 * full, 0),
        (("transformers-peft",), FULL, 3, 6 * full, 0),
        (("reference",), lora, 1, 12 * fused, 0),
        (("megatron-bridge",), half, 1, 14 * fused, 2 * full),
        (("megatron-bridge",), half, 2, 12 * fused, 2 * full),
        (("torchtitan",), lora, 3, 12 * fused + 4 * full, 0),
        (("torchtitan",), half, 3, 6 * fused + 2 * full, 0),
        (("deepspeed",), half, 1, 14 * separate + 2 * full, 0),
        (("deepspeed",), half, 2, 14 * separate + 4 * full, 0),
        (("deepspeed",), half, 3, 12 * separate + 2 * full, 0),
        (("transformers-peft",), quantised, 0, 12 * separate, 2 * full),
        (("transformers-peft",), half, 3, 6 * separate, 2 * full),
    ):
        spec = spec_with(Checkpoint())
        goal = spec.goal.model_copy(update={"tune": tune})
        spec = spec.model_copy(update={"goal": goal, "programs": programs(emit)})
        strategies = Strategies(
            sequence=4096.0, micro_batch=1.0, num_microbatches=4.0, data=16.0, zero_stage=stage
        )
        jobs, _ = failure_model(
            spec, price_pool(spec.cluster.pools[0], residuals=shipped()), strategies
        )
        with failures.of(emit, tune, stage):
            assert (jobs.checkpoint_bytes, jobs.reread_bytes) == (saved, reread)


def test_what_cannot_be_kept_is_refused_in_one_line(failures: Failures) -> None:
    stated: dict[str, Any] = {"levels": ("host", "shared"), **SLOW_STORAGE}
    for emit, more, message in (
        (
            "torchtitan",
            {},
            "levels: torchtitan has no checkpoints on hosts; they exist in megatron-lm",
        ),
        ("megatron-lm", {"host_memory": 2**30}, "of a node's memory, and 1.00 GiB may be taken"),
        (
            "megatron-lm",
            {"levels": ("shared",), "interval": 0.01},
            ".interval: 10.0 ms is shorter than a step of the plan, ",
        ),
    ):
        spec = spec_with(Checkpoint(**(stated | more)), emit=emit)
        with failures.of(emit, more), refused(SpecError, message, match="^goal.*checkpoint"):
            planned(spec)


def test_an_assumed_share_of_losses_is_noted() -> None:
    words = "2.0 % of lost machines are assumed to take the replicas of their copies along"
    assumed = spec_with(Checkpoint(levels="auto"))
    stated = spec_with(Checkpoint(levels="auto"), lost_together=0.05)
    for spec, is_noted in ((assumed, True), (stated, False), (spec_with(Checkpoint()), False)):
        notes = analytic_notes(spec, {}, calibrated=False)
        assert any(note.startswith(words) for note in notes) == is_noted
    pools = tuple(
        spec.cluster.pools[0].model_copy(update={"name": name}) for name in ("one", "other")
    )
    several = assumed.model_copy(update={"cluster": Cluster(pools=pools)})
    note = "checkpoints on hosts are not priced over several pools at once"
    assert note in analytic_notes(several, {}, calibrated=False)
    assert note not in analytic_notes(assumed, {}, calibrated=False)


def test_several_pools_have_one_level() -> None:
    pools = tuple(
        Pool(name=name, device=device, nodes=2, devices_per_node=8, nic=50e9)
        for name, device in (("a", "a100-80gb"), ("h", "h100-sxm"))
    )
    links = (Link(between=("a", "h"), bandwidth=5e10, latency=1e-5),)
    both = spec_with(Checkpoint(levels=("host", "shared")))
    spec = both.model_copy(update={"cluster": Cluster(pools=pools, links=links)})
    with pytest.raises(SpecError, match="priced on one pool of identical machines"):
        build_pools_problem(spec, residuals=shipped(), measured={})


def test_a_stated_level_of_an_engine_that_has_it_is_built() -> None:
    for emit in ("megatron-lm", "megatron-lm-0.16"):
        spec = spec_with(Checkpoint(levels=("host", "shared")), emit=emit)
        made = build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped()))
        assert made.capabilities.host_checkpoint_zero_stages, emit


def test_a_restart_in_place_counts_where_the_engine_has_it() -> None:
    ratios = {}
    for emit, in_place in (
        ("megatron-lm", None),
        ("megatron-lm", 20.0),
        ("megatron-lm", 7200.0),
        ("megatron-bridge", 20.0),
        ("torchtitan", 20.0),
    ):
        made = planned(spec_with(Checkpoint(), emit=emit, in_process_restart=in_place))
        ratios[emit, in_place] = present(present(made.predicted).run).effective_time_ratio
        said = [note for note in made.provenance.notes if "in_process_restart" in note]
        restart, is_able = (
            present(present(made.predicted).run).process_restart,
            emit == "megatron-lm",
        )
        decisions = {None: None, 20.0: "in_process", 7200.0: "full"}
        chosen = None if restart is None else restart.decision
        assert chosen == (decisions[in_place] if is_able else None), (emit, in_place)
        words = {20.0: "restarts inside them in 20.0 s", 7200.0: "all of them start again in"}
        if is_able and in_place is not None:
            (note,) = [one for one in made.provenance.notes if "failures of processes alone" in one]
            assert words[in_place] in note
        has_none = in_place is not None and not is_able
        expected = [
            "goal.reliability.in_process_restart has no effect: restarts inside processes are"
            f" written for megatron-lm, not for {emit}"
        ]
        assert said == expected * has_none, emit
    assert ratios["megatron-lm", 20.0] > ratios["megatron-lm", None]
    # A longer restart inside the processes is not taken.
    assert ratios["megatron-lm", 7200.0] == ratios["megatron-lm", None]
    assert ratios["megatron-bridge", 20.0] == ratios["megatron-lm", None]


def test_a_plan_waits_for_writes_where_its_engine_does() -> None:
    runs = {}
    for emit, asynchronous, reason in (
        ("deepspeed", True, "deepspeed waits until a checkpoint is written"),
        ("deepspeed", False, ""),
        ("megatron-lm", True, ""),
        ("megatron-lm", "auto", "checkpoints are written in the background"),
    ):
        made = planned(spec_with(Checkpoint(asynchronous=asynchronous, **SLOW_STORAGE), emit=emit))
        runs[emit, asynchronous] = present(made.predicted).run
        said = [
            note for note in made.provenance.notes if "written" in note and "checkpoint" in note
        ]
        assert bool(said) == bool(reason), (emit, asynchronous)
        assert all(reason in note for note in said)
    waiting = present(runs["deepspeed", False])
    assert waiting.checkpoint_in_background is False
    assert runs["deepspeed", True] == waiting
    assert runs["megatron-lm", True] == runs["megatron-lm", "auto"]
    beside = present(runs["megatron-lm", "auto"])
    assert beside.checkpoint_in_background
    assert beside.effective_time_ratio > waiting.effective_time_ratio
