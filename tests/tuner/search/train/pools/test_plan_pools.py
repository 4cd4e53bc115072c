import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from profilers.imports.link_matrix import LinkMatrix
from tests.expect import present, refused
from tests.printed import unwrapped
from tests.rows import each_row
from tests.tuner.search.train.pools.testing import PROVENANCE, spec
from tuner.cli.plan_text import plan_text
from tuner.engines.targets import programs
from tuner.errors import SpecError, UnknownDeviceError
from tuner.plans.train import Plan, TrainPrediction
from tuner.report.memory_headroom import memory_warning
from tuner.search.nodes.to_plan import with_node_order
from tuner.search.settings import SearchSettings
from tuner.search.train.memory_risk import LIKELY, SMALL
from tuner.search.train.pools.build_problem import PoolsProblem, build_pools_problem
from tuner.search.train.pools.chains import Chain
from tuner.search.train.pools.headroom_search import ChainHeadroom, search_chain_headroom
from tuner.search.train.pools.plan_pools import plan_over_pools, to_certificate
from tuner.search.train.pools.ranking import price_risks
from tuner.search.train.pools.search import PoolsSearchOutcome, search
from tuner.search.train.pools.to_plan import SimulatedChain, chain_memory_risk, simulate_chain
from tuner.spec.goal import Reliability
from tuner.spec.refusals import refusals
from tuner.spec.spec import Spec
from tuner.units import format_bytes, format_ratio

PLAIN = {"tensor_model_parallel_size": (1,), "virtual_pipeline_model_parallel_size": (1,)}
TWO: dict[str, Any] = {
    "limits": PLAIN | {"data_parallel_size": (2,)},
    "sequence_length": 8192,
    "global_batch_size": 64,
}

TIGHT: dict[str, Any] = TWO | {"limits": PLAIN}


def plan(requested: Spec, *, top: int = 2) -> Plan:
    return plan_over_pools(
        requested,
        residuals=None,
        settings=SearchSettings(top=top, clock=time.perf_counter),
        provenance=PROVENANCE,
    )


@pytest.fixture(scope="module")
def together() -> Plan:
    return plan(spec("olmoe-1b-7b", **TWO))


def test_a_plan_over_two_pools_is_a_plan(together: Plan) -> None:
    made, placement = together, present(together.placement)
    assert made.predicted is not None
    assert {stage.pool for stage in placement.stages} == {"new", "old"}
    assert (
        tuple(stage.layers for stage in placement.stages) == present(made.decision).pipeline_layout
    )
    assert sum(present(made.decision).pipeline_layout) == 16
    assert made.certificate.objective == pytest.approx(made.predicted.step_time_s)
    assert present(made.certificate.bound) <= made.predicted.step_time_s
    assert made.certificate.gap_ratio < 0.05
    assert sum(made.predicted.breakdown_s.values()) == pytest.approx(made.predicted.step_time_s)
    assert 0.0 < present(made.predicted.mfu_ratio) < 1.0
    chance = present(made.predicted.out_of_memory_probability)
    assert 0.0 <= present(made.predicted.out_of_memory_at_start_probability) <= chance <= 1.0
    assert "the slowest stage, " in made.binding_constraint


def test_the_plan_is_launchable_by_its_target() -> None:
    made = plan(spec("llama-3.1-8b", **TWO))
    assert len(set(present(made.decision).pipeline_layout)) > 1
    assert (
        refusals(
            programs(made.emit).capabilities(), model=made.model, decision=present(made.decision)
        )
        == ()
    )


def test_every_peak_of_a_pipeline_has_its_band(together: Plan) -> None:
    for made in (together, plan(spec("olmoe-1b-7b", emit="torchtitan", **TWO))):
        peaks = present(made.predicted).peak_memory_bytes
        assert len(peaks) > 1
        highs = [high for _, high in present(made.predicted).peak_memory_bytes_band]
        assert highs == pytest.approx([peak / 0.88 for peak in peaks]), made.emit


def test_hosts_follow_the_stages(together: Plan) -> None:
    placement = present(together.placement)
    pools = list(dict.fromkeys(stage.pool for stage in placement.stages))
    assert list(placement.hosts) == [f"{pool}-{node}" for pool in pools for node in range(2)]
    assert any("order of hosts" in note for note in placement.notes)


def test_single_pool_baselines_are_reported(together: Plan) -> None:
    made, placement = together, present(together.placement)
    steps_s = {alone.pool: alone.step_time_s for alone in placement.alone}
    assert set(steps_s) == {"new", "old"}
    for step_s in steps_s.values():
        assert present(step_s) > present(made.predicted).step_time_s


def test_a_link_that_takes_forever_leaves_a_pool_out() -> None:
    made = plan(spec("olmoe-1b-7b", bandwidth=1e5, **TWO))
    assert {stage.pool for stage in present(made.placement).stages} == {"new"}
    assert present(made.placement).unused_devices == {"old": 4}
    assert [pool.name for pool in made.cluster.pools] == ["new"]
    assert any("only pool 'new' is used" in note for note in made.provenance.notes)


def test_too_little_memory_is_reported_pool_by_pool() -> None:
    small = {"memory_per_device": 4 * 10**9}
    made = plan(spec("olmoe-1b-7b", new=small, old=small, **TWO))
    assert made.placement is None
    assert made.decision is None
    assert made.certificate.status == "infeasible"
    said = made.binding_constraint
    assert said.startswith("memory_per_device: of 16 layers, pool 'new' has room for ")
    assert "pool 'old' has room for" in said


@each_row(
    ("changes", "said"),
    [
        (
            {"bandwidth": None},
            r"cluster\.links: nothing joins pool 'old' to 'new'; state \{between: \[new, old\]",
        ),
        (
            {"old": {"device": None, "profile": "somewhere"}},
            r"cluster\.pools: 'old' has no 'device'",
        ),
        ({"precision": "fp8"}, "a100-80gb-sxm has no units for 'fp8"),
        (
            {"limits": {"pipeline_model_parallel_size": (4,)}},
            r"search\.pipeline_model_parallel_size: over several pools the partition decides",
        ),
        (
            {"emit": "deepspeed"},
            r"emit: deepspeed needs as many layers on every stage",
        ),
    ],
)
def test_impossible_specs_are_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    with refused(SpecError, match=said):
        build_pools_problem(spec(**changes), residuals=None)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UnknownDeviceError, match="'h1000'"):
        build_pools_problem(spec(old={"device": "h1000"}), residuals=None)


def crossed(nodes: int) -> LinkMatrix:
    """Fast links between a node and the one half the list away, slow ones elsewhere."""
    rates = np.full((nodes, nodes), 5e9)
    for node in range(nodes):
        rates[node, (node + nodes // 2) % nodes] = 50e9
    return LinkMatrix(nodes=tuple(f"host{n}" for n in range(nodes)), bytes_per_s_NN=rates)


def test_nodes_with_measured_links_are_put_in_order() -> None:
    requested = spec(
        "olmoe-1b-7b",
        new={"nodes": 4},
        limits=PLAIN | {"data_parallel_size": (4,)},
        sequence_length=8192,
        global_batch_size=64,
    )
    over = plan(requested)
    assert [stage.pool for stage in present(over.placement).stages].count("new") == 2
    made = with_node_order(over, {"new": crossed(4)}, cluster=requested.cluster, time_limit_s=30.0)
    (order,) = present(made.placement).node_orders
    assert order.bound_s <= order.step_time_after_s < order.step_time_before_s
    # Rings of gradient sums take the fast links: hosts 0 and 2, and 1 and 3.
    pairs = {frozenset(order.nodes[:2]), frozenset(order.nodes[2:])}
    assert pairs == {frozenset({"host0", "host2"}), frozenset({"host1", "host3"})}
    assert set(order.nodes) <= set(present(made.placement).hosts)
    assert "old-0" in present(made.placement).hosts
    assert present(made.predicted).step_time_s == pytest.approx(order.step_time_after_s)
    with pytest.raises(SpecError, match="is of 2 nodes, the plan runs on 4"):
        with_node_order(over, {"new": crossed(2)}, cluster=requested.cluster, time_limit_s=9.0)


FAILING: dict[str, Any] = {
    "tokens": 1e11,
    "reliability": {"device_mtbf": 5e6, "restart": 600.0, "spare_nodes": 1, "repair": 86_400.0},
}


def test_a_run_over_pools_is_forecast() -> None:
    failure_prices: dict[str, Any] = {
        "new": {"nodes": 3, "price_per_device_hour": 3.0},
        "old": {"price_per_device_hour": 1.0},
    }
    made = plan(spec("olmoe-1b-7b", **failure_prices, **TWO, **FAILING))
    assert {stage.pool for stage in present(made.placement).stages} == {"new", "old"}
    run = present(present(made.predicted).run)
    assert run.failure_interval_s == pytest.approx(5e6 / present(made.decision).num_devices)
    assert present(run.effective_step_s) > present(made.predicted).step_time_s
    assert run.checkpoint_interval_s is not None
    assert run.wall_clock_s == pytest.approx((run.steps or 0) * present(run.effective_step_s))
    # One node of the larger pool stands by: 2 + 2 nodes of 2 devices train, 6 and 4 are paid.
    assert present(made.decision).num_devices == 8
    assert "spare nodes that replace those of their own pool: 1 of pool 'new'" in (
        present(made.placement).notes
    )
    assert present(made.placement).spare_nodes == {"new": 1}
    assert run.cost == pytest.approx((6 * 3.0 + 4 * 1.0) * present(run.wall_clock_s) / 3600)


def test_an_interval_shorter_than_a_step_over_pools_is_refused() -> None:
    short = {"device_mtbf": 5e6, "restart": 600.0, "checkpoint": {"interval": 0.001}}
    with pytest.raises(SpecError, match=r"interval: 1\.00 ms is shorter than a step"):
        plan(spec("olmoe-1b-7b", **TWO, reliability=short))


def test_tokens_without_reliability_give_the_length_of_a_run() -> None:
    made = plan(spec("olmoe-1b-7b", tokens=1e11, **TWO))
    assert present(present(made.predicted).run).wall_clock_s == pytest.approx(
        (present(present(made.predicted).run).steps or 0) * present(made.predicted).step_time_s
    )
    assert present(present(made.predicted).run).cost is None


def test_devices_that_fail_all_the_time_are_better_left_out(together: Plan) -> None:
    # Together a step is shorter, but twice as many devices stop the run twice as often.
    requested = TWO | {"reliability": {"device_mtbf": 20_000.0, "restart": 3_000.0}}
    troubled = plan(spec("olmoe-1b-7b", **requested))
    assert {stage.pool for stage in present(together.placement).stages} == {"new", "old"}
    assert {stage.pool for stage in present(troubled.placement).stages} == {"new"}
    (note,) = (n for n in troubled.provenance.notes if "only pool 'new' is used" in n)
    assert "of wall clock with failures" in note


def test_ties_that_were_not_searched_for_are_noted(together: Plan) -> None:
    # Two rows were asked for, and the band is far wider than the gap between these.
    assert together.certificate.within_band_is_least
    problem = build_pools_problem(spec("olmoe-1b-7b", **TWO), residuals=None)
    every = search(problem, SearchSettings(top=10**6, clock=time.perf_counter))
    assert every.proof.complete_s == math.inf
    whole = to_certificate(
        every,
        sorted((simulate_chain(chain) for chain in every.chains), key=lambda one: one.objective_s),
    )
    assert not whole.within_band_is_least
    assert whole.within_band >= together.certificate.within_band


@pytest.mark.slow
def test_what_would_fit_is_solved() -> None:
    small = {"memory_per_device": 14 * 10**9}
    made = plan(spec("olmoe-1b-7b", new=small, old=small, **TWO))
    assert made.decision is None
    assert made.certificate.status == "infeasible"
    limits = [one.limit for one in made.relaxations]
    assert {"memory_per_device", "nodes", "search.optimizer_offload"} <= set(limits)
    for one in made.relaxations:
        assert one.predicted is not None
        assert sum(present(one.decision).pipeline_layout) == 16
    first = next(one for one in made.relaxations if one.limit == "memory_per_device")
    assert max(present(first.predicted).peak_memory_bytes) > int(0.95 * 14 * 10**9)
    # With the memory that it names the planner finds a plan, and with a tenth less it does not.
    enough = max(present(first.predicted).peak_memory_bytes) / 0.95 + 1
    for share, fits in ((1.0, True), (0.9, False)):
        each = {"memory_per_device": int(share * enough)}
        assert (plan(spec("olmoe-1b-7b", new=each, old=each, **TWO)).decision is not None) == fits


def test_the_nearest_legal_value_of_a_limit_is_named() -> None:
    made = plan(spec(limits={"tensor_model_parallel_size": (3,)}))
    assert made.binding_constraint == "search.tensor_model_parallel_size leaves it out"
    (one,) = made.relaxations
    assert one.limit == "search.tensor_model_parallel_size"
    assert one.change == "3 leaves nothing legal; the nearest legal value is 2"
    assert present(one.decision).tensor_model_parallel_size in (1, 2)


@pytest.mark.slow
def test_a_chain_with_less_risk_comes_first_where_running_out_costs_much() -> None:
    chances, steps_s = [], []
    for failed_start_s in (1.0, 1e6):
        requested = spec("olmoe-1b-7b", failed_start=failed_start_s, **AT_RISK)
        made = plan(requested, top=12)
        chances.append(present(made.predicted).out_of_memory_probability or 0.0)
        steps_s.append(present(made.predicted).step_time_s)
        assert len(made.cluster.pools) == 2
    assert chances[1] < chances[0]
    assert steps_s[1] > steps_s[0]
    chance, other = chances[1], present(present(made.preferred).fastest_out_of_memory_probability)
    words = f"({format_ratio(chance)} instead of {format_ratio(other)})"
    assert present(made.preferred).reasons == (f"less chance of running out of memory {words}",)
    assert present(present(made.preferred).expected_step_s) < present(
        present(made.preferred).fastest_expected_step_s
    )
    # Failures that are priced but decide nothing are no reason.
    failing = requested.goal.model_copy(
        update={"reliability": Reliability(device_mtbf=1e9, restart=600.0)}
    )
    replanned = plan(requested.model_copy(update={"goal": failing}), top=12)
    assert replanned.decision == made.decision
    assert present(replanned.preferred).reasons == present(made.preferred).reasons


def roomiest(chains: Iterable[Chain], problem: PoolsProblem) -> SimulatedChain:
    """The fastest of those that hardly run out."""
    return min(
        (
            simulate_chain(one)
            for one in chains
            if chain_memory_risk(one, problem).out_of_memory_probability <= SMALL
        ),
        key=lambda one: one.objective_s,
    )


ONE = SearchSettings(top=1, clock=time.perf_counter)
MEMORY = {"memory_per_device": 30 * 10**9, "usable_memory_ratio": 1.0}
AT_RISK: dict[str, Any] = {"new": MEMORY, "old": MEMORY, **TIGHT}
"""Pools on which the fastest chain may run out of memory."""


@pytest.fixture(scope="module")
def headroom() -> tuple[PoolsProblem, PoolsSearchOutcome, ChainHeadroom]:
    """What is searched beside the fastest chain where a failed start costs much."""
    problem = build_pools_problem(spec("olmoe-1b-7b", failed_start=1e6, **AT_RISK), residuals=None)
    outcome = search(problem, ONE)
    full = simulate_chain(outcome.chains[0])
    return problem, outcome, present(search_chain_headroom(outcome, ONE, full=full))


def test_chains_with_headroom_are_searched_for_where_the_best_may_run_out(
    headroom: tuple[PoolsProblem, PoolsSearchOutcome, ChainHeadroom],
) -> None:
    problem, outcome, rooms = headroom
    full = simulate_chain(outcome.chains[0])
    assert chain_memory_risk(full.chain, problem).out_of_memory_probability > SMALL
    chances = [chain_memory_risk(one, problem).out_of_memory_probability for one in rooms.chains]
    assert min(chances) <= SMALL < max(chances)
    with_room = roomiest(rooms.chains, problem)
    assert with_room.objective_s >= full.objective_s
    assert search_chain_headroom(outcome, ONE, full=with_room) is None
    # With a step known that hardly runs out, only what is faster is searched for.
    known_s = with_room.objective_s * (1.0 - 1e-6)
    known = present(search_chain_headroom(outcome, ONE, full=full, known_s=known_s))
    assert known.complete_s == pytest.approx(known_s, abs=0.0)
    for one in known.chains:
        is_roomy = chain_memory_risk(one, problem).out_of_memory_probability <= SMALL
        assert not is_roomy or simulate_chain(one).objective_s > known_s
    # The plan launches it, or names it beside a chain that is expected to be faster.
    made = plan(spec("olmoe-1b-7b", failed_start=1e6, **AT_RISK), top=1)
    if (present(made.predicted).out_of_memory_probability or 0.0) > SMALL:
        assert present(made.roomier).out_of_memory_probability <= SMALL
    else:
        assert (present(made.preferred).fastest_out_of_memory_probability or 0.0) > SMALL
        assert present(made.preferred).expected_step_s is not None


def test_a_chain_that_surely_runs_out_is_expected_to_take_the_step_of_one_with_headroom(
    headroom: tuple[PoolsProblem, PoolsSearchOutcome, ChainHeadroom],
) -> None:
    problem = build_pools_problem(spec("olmoe-1b-7b", failed_start=1.0, **AT_RISK), residuals=None)
    full = simulate_chain(headroom[1].chains[0])
    with_room = roomiest(headroom[2].chains, problem)
    risks = price_risks((full, with_room), problem)
    chance = risks[full].chance
    assert risks[full].expected_s == pytest.approx(
        (1.0 - chance) * full.objective_s + chance * with_room.objective_s, rel=5e-3
    )
    assert with_room.objective_s > 1.01 * full.objective_s
    assert risks[full].is_fit == (chance <= LIKELY)


def distant_pools(new_bytes: float, *, limits: dict[str, Any], **others: Any) -> Spec:
    """Two pools whose link is so slow that either is better off alone; `new` has little memory."""
    small = {"memory_per_device": int(new_bytes), "usable_memory_ratio": 1.0}
    return spec("olmoe-1b-7b", new=small, bandwidth=1e5, **others, **TWO | {"limits": limits})


def test_a_single_pool_that_is_likely_to_run_out_loses_to_one_that_fits() -> None:
    only = PLAIN | {"data_parallel_size": (4,), "expert_model_parallel_size": (4,)}
    slow = {"device": "h20"}
    made = plan(distant_pools(37.0e9, limits=only, old=slow))
    fast, roomy = present(made.placement).alone
    assert (fast.out_of_memory_probability or 0.0) > LIKELY
    assert (roomy.out_of_memory_probability or 1.0) <= SMALL
    assert present(fast.step_time_s) < present(roomy.step_time_s)
    assert {stage.pool for stage in present(made.placement).stages} == {"old"}
    assert present(made.predicted).out_of_memory_probability == roomy.out_of_memory_probability
    assert present(made.predicted).step_time_s == roomy.step_time_s
    (note,) = (note for note in made.provenance.notes if "only pool 'old' is used" in note)
    assert "pool 'new' alone takes" in note


def test_a_single_pool_is_the_fallback_of_another_without_headroom() -> None:
    limits = PLAIN | {"expert_model_parallel_size": (2,), "zero_stage": (1,)}
    made = plan(distant_pools(40e9, limits=limits))
    assert {stage.pool for stage in present(made.placement).stages} == {"new"}
    assert (present(made.predicted).out_of_memory_probability or 0.0) > SMALL
    assert present(made.roomier).pools == ("old",)
    assert not made.no_roomier
    old = present(made.placement).alone[1]
    assert present(made.roomier).step_time_s == old.step_time_s
    assert present(made.roomier).out_of_memory_probability == old.out_of_memory_probability
    assert " on 'old' instead has 0.0 %" in present(memory_warning(made))
    # What runs on its own pool takes longer still.
    assert present(made.roomier).slower_ratio < 0.7


@pytest.mark.slow
def test_nodes_then_memory_are_offered_where_every_decision_is_likely_to_run_out() -> None:
    def planned(memory_bytes: float, *, nodes: int = 2) -> Plan:
        small = {"memory_per_device": int(memory_bytes), "usable_memory_ratio": 1.0}
        pools: dict[str, Any] = {"new": small | {"nodes": nodes}, "old": small}
        return plan(spec("olmoe-1b-7b", **pools, **TIGHT))

    (least, *_) = (one for one in planned(10e9).relaxations if one.limit == "memory_per_device")
    made = planned(1.001 * max(present(least.predicted).peak_memory_bytes))
    assert (present(made.predicted).out_of_memory_probability or 0.0) > LIKELY
    assert made.roomier is None
    assert [one.limit for one in made.relaxations] == ["nodes", "nodes", "memory_per_device"]
    for one in made.relaxations:
        assert (present(one.predicted).out_of_memory_probability or 0.0) <= SMALL, one.change
    said = present(memory_warning(made))
    assert "Relaxations: nodes: pool 'new': 4 working nodes instead of 2; " in said
    # Asked for, each way gives a plan that is likely to fit, or has a fallback that is.
    memory = present(made.relaxations[-1].predicted)
    for replanned in (
        planned(1.001 * max(present(least.predicted).peak_memory_bytes), nodes=4),
        planned(present(memory.rank_at_risk).memory_capacity_bytes),
    ):
        chances = [present(replanned.predicted).out_of_memory_probability or 0.0]
        assert chances[0] < LIKELY
        # A faster decision may be worth its chance, with one that has room as fallback.
        if replanned.roomier is not None:
            chances.append(replanned.roomier.out_of_memory_probability)
        assert min(chances) <= SMALL


def test_the_chance_peak_and_pool_of_a_plan_are_those_of_one_stage() -> None:
    # The old pool's devices have far less memory: their smaller peak is the one at risk.
    old = {"memory_per_device": 21 * 10**9, "usable_memory_ratio": 1.0}
    made = plan(spec("olmoe-1b-7b", old=old, **TIGHT))
    at_risk, peaks = (
        present(present(made.predicted).rank_at_risk),
        present(made.predicted).peak_memory_bytes,
    )
    assert at_risk.pool == "old" == present(made.placement).stages[at_risk.pipeline_rank].pool
    assert at_risk.peak_memory_bytes == peaks[at_risk.pipeline_rank] < max(peaks)
    assert at_risk.memory_capacity_bytes == 21 * 10**9
    said = unwrapped(plan_text(made, folder=Path("plan")))
    stated = format_bytes(at_risk.peak_memory_bytes)
    assert f"{stated} predicted on pipeline rank {at_risk.pipeline_rank} of the 19.6 GiB" in said
    for broken in (-1, len(peaks)):
        other = at_risk.model_dump() | {"pipeline_rank": broken}
        with pytest.raises(ValidationError, match="rank"):
            TrainPrediction.model_validate(
                present(made.predicted).model_dump() | {"rank_at_risk": other}
            )
