import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from profilers.imports.link_matrix import LinkMatrix
from tuner.errors import SpecError, UnknownDeviceError
from tuner.plan import Provenance
from tuner.planner.nodes.told import on_measured_nodes
from tuner.planner.unlike.asked import pools_question
from tuner.planner.unlike.planning import OverPools, plan_over_pools
from tuner.planner.unlike.search import Settings
from tuner.spec.capabilities import intersection
from tuner.spec.refusals import refusals
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
PLAIN = {"tensor_model_parallel_size": (1,), "virtual_pipeline_model_parallel_size": (1,)}
TWO: dict[str, Any] = {
    "limits": PLAIN | {"data_parallel_size": (2,)},
    "sequence_length": 8192,
    "global_batch_size": 64,
}


def plan(spec: Spec, provenance: Provenance, **settings: Any) -> OverPools:
    return plan_over_pools(
        spec,
        residuals=None,
        settings=Settings(top=2, clock=time.perf_counter),
        provenance=provenance,
        **settings,
    )


@pytest.fixture
def together(spec: MakeSpec, provenance: Provenance) -> OverPools:
    return plan(spec("olmoe-1b-7b", **TWO), provenance)


def test_a_plan_over_two_pools_is_a_plan(together: OverPools) -> None:
    made, placement = together.plan, together.placement
    assert made.decision is not None
    assert made.predicted is not None
    assert placement is not None
    assert {stage.pool for stage in placement.stages} == {"new", "old"}
    assert tuple(stage.layers for stage in placement.stages) == made.decision.pipeline_layout
    assert sum(made.decision.pipeline_layout) == 16
    assert made.certificate.objective == pytest.approx(made.predicted.step_time_s)
    assert made.certificate.bound is not None
    assert made.certificate.bound <= made.predicted.step_time_s
    assert made.certificate.gap_ratio < 0.05
    assert sum(made.predicted.breakdown_s.values()) == pytest.approx(made.predicted.step_time_s)
    assert made.predicted.mfu_ratio is not None
    assert 0.0 < made.predicted.mfu_ratio < 1.0
    assert "sets the pace" in made.binding_constraint


def test_the_plan_is_launchable_by_its_target(spec: MakeSpec, provenance: Provenance) -> None:
    made = plan(spec("llama-3.1-8b", **TWO), provenance).plan
    assert made.decision is not None
    assert len(set(made.decision.pipeline_layout)) > 1
    assert refusals(intersection(made.emit), model=made.model, decision=made.decision) == ()


def test_hosts_follow_the_stages(together: OverPools) -> None:
    placement = together.placement
    assert placement is not None
    pools = list(dict.fromkeys(stage.pool for stage in placement.stages))
    assert list(placement.hosts) == [f"{pool}-{node}" for pool in pools for node in range(2)]
    assert any("order of hosts" in note for note in placement.notes)


def test_what_each_pool_does_alone_stands_beside(together: OverPools) -> None:
    made, placement = together.plan, together.placement
    assert placement is not None
    assert made.predicted is not None
    steps_s = {alone.pool: alone.step_time_s for alone in placement.alone}
    assert set(steps_s) == {"new", "old"}
    for step_s in steps_s.values():
        assert step_s is None or step_s > made.predicted.step_time_s


def test_a_link_that_takes_forever_leaves_a_pool_out(
    spec: MakeSpec, provenance: Provenance
) -> None:
    made = plan(spec("olmoe-1b-7b", bandwidth=1e5, **TWO), provenance)
    assert made.placement is not None
    assert {stage.pool for stage in made.placement.stages} == {"new"}
    assert made.placement.unused_devices == {"old": 4}
    assert [pool.name for pool in made.plan.cluster.pools] == ["new"]
    assert any("only pool 'new' is used" in note for note in made.plan.provenance.notes)


def test_too_little_memory_is_said_pool_by_pool(spec: MakeSpec, provenance: Provenance) -> None:
    small = {"memory_per_device": 4 * 10**9}
    made = plan(spec("olmoe-1b-7b", new=small, old=small, **TWO), provenance)
    assert made.placement is None
    assert made.plan.decision is None
    assert made.plan.certificate.status == "infeasible"
    said = made.plan.binding_constraint
    assert said.startswith("memory_per_device: of 16 layers, pool 'new' has room for ")
    assert "pool 'old' has room for" in said


def test_a_batch_that_no_width_divides_is_said(spec: MakeSpec, provenance: Provenance) -> None:
    limits = {"tensor_model_parallel_size": (3,)}
    made = plan(spec(limits=limits), provenance)
    assert made.plan.binding_constraint == "search.tensor_model_parallel_size leaves it out"


@pytest.mark.parametrize(
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
            r"search\.pipeline_model_parallel_size: over unlike pools the partition decides",
        ),
    ],
)
def test_impossible_questions_are_one_clear_line(
    spec: MakeSpec, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said) as raised:
        pools_question(spec(**changes), residuals=None)
    assert "\n" not in str(raised.value)


def test_an_unknown_device_is_said(spec: MakeSpec) -> None:
    with pytest.raises(UnknownDeviceError, match="'h1000'"):
        pools_question(spec(old={"device": "h1000"}), residuals=None)


def crossed(nodes: int) -> LinkMatrix:
    """Fast links between a node and the one half the list away, slow ones elsewhere."""
    rates = np.full((nodes, nodes), 5e9)
    for node in range(nodes):
        rates[node, (node + nodes // 2) % nodes] = 50e9
    return LinkMatrix(nodes=tuple(f"host{n}" for n in range(nodes)), bytes_per_s_NN=rates)


def test_nodes_with_measured_links_are_put_in_order(spec: MakeSpec, provenance: Provenance) -> None:
    asked = spec(
        "olmoe-1b-7b",
        new={"nodes": 4},
        limits=PLAIN | {"data_parallel_size": (4,)},
        sequence_length=8192,
        global_batch_size=64,
    )
    over = plan(asked, provenance)
    assert over.placement is not None
    assert [stage.pool for stage in over.placement.stages].count("new") == 2
    unordered = over.plan.model_copy(update={"placement": over.placement})
    made = on_measured_nodes(
        unordered, {"new": crossed(4)}, cluster=asked.cluster, time_limit_s=30.0
    )
    assert made.placement is not None
    (order,) = made.placement.node_orders
    assert order.bound_s <= order.step_time_after_s < order.step_time_before_s
    # Rings of gradient sums take the fast links: hosts 0 and 2, and 1 and 3.
    pairs = {frozenset(order.nodes[:2]), frozenset(order.nodes[2:])}
    assert pairs == {frozenset({"host0", "host2"}), frozenset({"host1", "host3"})}
    assert set(order.nodes) <= set(made.placement.hosts)
    assert "old-0" in made.placement.hosts
    assert made.predicted is not None
    assert made.predicted.step_time_s == pytest.approx(order.step_time_after_s)
    with pytest.raises(SpecError, match="is of 2 nodes, the plan runs on 4"):
        on_measured_nodes(unordered, {"new": crossed(2)}, cluster=asked.cluster, time_limit_s=9.0)
