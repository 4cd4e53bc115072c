"""Slower decisions with headroom are searched, and chosen where running out costs much."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.printed import unwrapped
from tests.tuner.models import MODELS, example_model
from tests.tuner.search.train import testing
from tests.tuner.search.train.testing import every_decision, make_problem
from tuner.cli.plan_text import plan_text
from tuner.costs.train.calibration import shipped
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.engines.targets import programs
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.headroom_search import Headroom, search_headroom
from tuner.search.train.memory_risk import LIKELY, SMALL, LossPrices
from tuner.search.train.preference import (
    TOLERANCE_RATIO,
    LeastExpected,
    fastest_within_chance,
    find_least_expected,
    oom_chances,
)
from tuner.search.train.problem import TrainProblem
from tuner.search.train.relaxations import least_sufficient_memory
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, Solutions
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.goal import TrainGoal
from tuner.spec.search import Search
from tuner.spec.spec import Spec
from tuner.units import parse_bytes

QWEN = Path(__file__).parents[4] / "examples" / "worked" / "qwen3-30b-a3b-16-h100" / "spec.yaml"
A_MILLION_STEPS = LossPrices(run_steps=1e6)


def planned(
    *, memory_per_device: float, usable_ratio: float, failed_start_s: float | None = None
) -> Plan:
    """Qwen3-30B-A3B on 16 H100 of so much memory."""
    spec = read_spec(QWEN)
    (pool,) = spec.cluster.pools
    memory = {"usable_memory_ratio": usable_ratio, "memory_per_device": int(memory_per_device)}
    pool = pool.model_copy(update=memory)
    spec = spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"pools": (pool,)}),
            "goal": spec.goal.model_copy(update={"failed_start": failed_start_s}),
        }
    )
    return testing.planned(spec)


@pytest.mark.slow
def test_a_safe_decision_beyond_the_rows_of_the_search_is_found() -> None:
    """Worth its 3 s: a fastest decision that may run out is rare in a small space."""
    plan = planned(memory_per_device=68e9, usable_ratio=0.93)
    assert (present(plan.predicted).out_of_memory_probability or 0.0) > SMALL
    assert present(plan.roomier).out_of_memory_probability <= SMALL
    rows = (present(plan.predicted), *(one.predicted for one in plan.alternatives))
    assert present(plan.roomier).step_time_s > max(one.step_time_s for one in rows) * (
        1.0 + TOLERANCE_RATIO
    )


def llama_70b(**pool: object) -> Plan:
    """Llama 3.1 70B for 90 days on 128 H100 under torchtitan."""
    model = example_model("llama-3.1-70b")
    h100 = {"name": "h100", "device": "h100-sxm", "nodes": 16, "devices_per_node": 8, "nic": 5e10}
    cluster = Cluster(pools=(Pool.model_validate(h100 | pool),))
    goal = {"kind": "train", "sequence_length": 8192, "global_batch_size": 512}
    limits = {"micro_batch_size": (1,), "virtual_pipeline_model_parallel_size": (1, 2, 20)}
    spec = Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / "llama-3.1-70b",
        model=model,
        cluster=cluster,
        goal=TrainGoal.model_validate(goal | {"tokens": 1e12, "failed_start": 1800.0}),
        search=Search.model_validate(limits),
        programs=programs(("torchtitan",)),
    )
    return testing.planned(spec)


def test_what_runs_out_more_likely_than_not_is_not_planned_however_cheap_a_failed_start() -> None:
    """Half an hour of 90 days is nothing, but the faster step is never delivered."""
    plan = llama_70b(usable_memory_ratio=1.0, memory_per_device=76 * 10**9)
    assert (present(plan.preferred).fastest_out_of_memory_probability or 0.0) > LIKELY
    assert (present(plan.predicted).out_of_memory_probability or 0.0) <= SMALL
    assert present(plan.preferred).slower_ratio > TOLERANCE_RATIO
    assert present(plan.preferred).expected_step_s is not None
    assert (
        present(present(plan.preferred).fastest_expected_step_s)
        > present(plan.preferred).fastest_step_s * 1.005
    )
    assert plan.relaxations == ()


@pytest.mark.slow
def test_where_nothing_is_likely_to_fit_the_plan_warns_and_offers_nodes_and_memory() -> None:
    problem = pipeline_problem("mixtral-8x7b", memory_per_device=80 * 10**9)
    least_bytes = least_sufficient_memory(problem)
    plan = planned_pipeline("mixtral-8x7b", memory_per_device=int(1.03 * least_bytes))
    assert (present(plan.predicted).out_of_memory_probability or 0.0) > LIKELY
    assert plan.roomier is None
    assert plan.no_roomier
    assert present(plan.preferred).expected_step_s is None
    assert [one.limit for one in plan.relaxations] == ["nodes", "memory_per_device"]
    warning = unwrapped(plan_text(plan, folder=Path("plan"))).splitlines()[0]
    for words in (
        "WARNING",
        "Every decision found is likely to run out",
        "nodes instead of 2",
        "per device",
    ):
        assert words in warning, warning
    # With the memory that it names, what is planned fits more likely than not.
    said = plan.relaxations[1].change.split(" per device")[0]
    roomy = planned_pipeline("mixtral-8x7b", memory_per_device=int(parse_bytes(said) * 1.01))
    assert (present(roomy.predicted).out_of_memory_probability or 0.0) <= LIKELY
    assert roomy.relaxations == ()


def pipeline_spec(model: str, *, memory_per_device: int) -> Spec:
    """Two nodes of A100 under torchtitan, in a pipeline of two ranks."""
    pool = {"name": "a100", "device": "a100-80gb", "nodes": 2, "devices_per_node": 8, "nic": 2.5e10}
    limits = {
        "pipeline_model_parallel_size": (2,),
        "micro_batch_size": (1,),
        "context_parallel_size": (1,),
    }
    memory = {"memory_per_device": memory_per_device, "usable_memory_ratio": 1.0}
    goal = {"kind": "train", "sequence_length": 4096, "global_batch_size": 64, "precision": "bf16"}
    return Spec(
        path=Path("spec.yaml"),
        model_path=MODELS / model,
        model=example_model(model),
        cluster=Cluster(pools=(Pool.model_validate(pool | memory),)),
        goal=TrainGoal.model_validate(goal),
        search=Search.model_validate(limits),
        programs=programs(("torchtitan",)),
    )


def pipeline_problem(model: str, *, memory_per_device: int) -> TrainProblem:
    spec = pipeline_spec(model, memory_per_device=memory_per_device)
    return build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped()))


def planned_pipeline(model: str, *, memory_per_device: int) -> Plan:
    return testing.planned(pipeline_spec(model, memory_per_device=memory_per_device))


def shrunk() -> Iterator[tuple[SearchOutcome, Headroom, LeastExpected, Solutions]]:
    """OLMoE without a pipeline on devices of ever less memory, and all decisions that fit.

    Few enough to be priced one by one; without a pipeline no layout depends on the memory.
    """
    limits = {"micro_batch_size": (1, 2), "cuda_graph": ("none",), "zero_stage": (1,)}
    problem = make_problem(
        "olmoe-1b-7b",
        devices=16,
        capabilities=MEGATRON_0_18,
        limits=Search.model_validate(limits | {"pipeline_model_parallel_size": (1,)}),
    )
    settings = SearchSettings(clock=time.perf_counter, top=2, band_ratio=TOLERANCE_RATIO)
    usable_ratio = 0.95

    def of(capacity_bytes: float) -> TrainProblem:
        limit_bytes = usable_ratio * capacity_bytes
        return replace(problem, memory_limit_bytes=limit_bytes, usable_memory_ratio=usable_ratio)

    every = every_decision(search(of(1e15), settings))
    for ratio in (1.9, 1.8, 1.55, 1.45, 1.25, 1.2, 1.15, 1.12, 1.1):
        outcome = search(of(ratio * float(every.peak_bytes.min())), settings)
        full = present(outcome.solutions).taken(np.array([0]))
        headroom = search_headroom(outcome, settings, full=full, step_s=float(full.step_s[0]))
        least = find_least_expected(outcome, prices=A_MILLION_STEPS, headroom=headroom.searches)
        fits = every.peak_bytes <= outcome.problem.memory_limit_bytes
        yield outcome, headroom, least, every.taken(np.flatnonzero(fits))


@pytest.mark.slow
def test_less_memory_never_shortens_the_expected_step_nor_hides_headroom() -> None:
    """And the result is nearly the least of all decisions that fit."""
    before_s, denied, with_room = 0.0, 0, 0
    for outcome, headroom, least, every in shrunk():
        risks = oom_chances(outcome, every)
        roomy_s = float(every.step_s[risks.ever_C <= SMALL].min(initial=np.inf))
        if headroom.complete_s is not None:
            denied += 1
            assert roomy_s >= headroom.complete_s, ("denied", roomy_s, headroom.complete_s)
        if not np.isfinite(roomy_s):
            continue  # no run is sure to end
        if headroom.searches:
            with_room += 1
            fastest = [fastest_within_chance(one, most_chance=SMALL) for one in headroom.searches]
            assert any(fastest), ("not found", roomy_s, outcome.problem.capacity_bytes)
        expected_s = A_MILLION_STEPS.expected_s(every.step_s, risks)
        least_s = float(expected_s[risks.ever_C <= LIKELY].min())
        # What lies between is looked for in few steps of chance only, which shows where what has
        # room takes seven times as long.
        most_ratio = 1.02 if roomy_s < 2.0 * float(every.step_s.min()) else 1.15
        assert least.expected_s >= before_s * (1.0 - 1e-3), (
            "expected",
            least.expected_s,
            max(before_s, least_s),
        )
        assert least.expected_s <= most_ratio * least_s, (
            "expected",
            least.expected_s,
            max(before_s, least_s),
        )
        before_s = least.expected_s
    assert denied
    assert with_room > 3
