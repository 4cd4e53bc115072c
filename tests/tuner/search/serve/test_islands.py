"""Two vendors: caches pass where a connector lets them, else islands stand side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from solvers.instances.problem import (
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstanceRole,
    InstancesProblem,
    Route,
)
from tests.expect import present
from tests.tuner.search.serve.testing import problem_of
from tuner.config.serve import Role
from tuner.goals.serve_plan import deploy
from tuner.goals.serve_spec import read_serve_spec
from tuner.plans.serve import ServePlan
from tuner.search.serve.islands import capacity_per_s, island_layouts, island_shares, prefixes_kept
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.simulation import InstanceGroup
from tuner.search.serve.solve_mode import KEPT_TOLERANCE
from tuner.search.serve.to_plan import plan_cautions

EXAMPLES = Path(__file__).parents[4] / "examples" / "serving"


@pytest.fixture(scope="module")
def ascend() -> ServePlan:
    """Worth its 5 s: no other plan keeps pools apart."""
    return deploy(EXAMPLES / "h100-ascend.yaml", time_limit_s=20.0).plan


@pytest.fixture(scope="module")
def mi300x() -> ServePlan:
    return deploy(EXAMPLES / "h100-mi300x.yaml", time_limit_s=20.0).plan


@pytest.mark.slow
def test_h100_and_ascend_are_two_islands_that_use_both_pools(ascend: ServePlan) -> None:
    decision = present(ascend.decision)
    assert {one.name for one in decision.islands} == {"nvidia", "huawei"}
    assert sum(one.share_ratio for one in decision.islands) == pytest.approx(1.0)
    assert {(one.role.value, one.pool, one.island) for one in decision.instances} == {
        (role, pool, island)
        for role in ("prefill", "decode")
        for pool, island in (("h100", "nvidia"), ("ascend", "huawei"))
    }
    assert [(one.from_pool, one.to_pool, one.connector) for one in decision.handovers] == [
        ("h100", "h100", "nixl"),
        ("ascend", "ascend", "ascend"),
    ]


def test_pairs_that_no_connector_joins_are_listed_with_rule_and_gain(tmp_path: Path) -> None:
    # So little traffic that either pair of pools would serve it.
    text = (EXAMPLES / "h100-ascend.yaml").read_text(encoding="utf-8")
    text = text.replace("../models", str(EXAMPLES.parent / "models"))
    text = text.replace("25/s", "1/s\n    requests: 800")
    text = text.replace("nodes: 3, devices_per_node: 8", "nodes: 1, devices_per_node: 4")
    (tmp_path / "spec.yaml").write_text(text, encoding="utf-8")
    plan = deploy(tmp_path / "spec.yaml", time_limit_s=20.0).plan
    listed = {one.feature.partition(":")[0]: one for one in plan.unlaunchable if one.rule}
    assert set(listed) == {
        "prefill on h100 and decode on ascend",
        "prefill on ascend and decode on h100",
    }
    assert {one.rule for one in listed.values()} == {"connector"}
    assert listed["prefill on ascend and decode on h100"].gain_ratio > 0.05


@pytest.mark.slow
def test_h100_and_mi300x_share_the_work_through_host_memory(mi300x: ServePlan) -> None:
    decision = present(mi300x.decision)
    (way,) = decision.handovers
    assert {way.from_pool, way.to_pool} == {"h100", "mi300x"}
    assert (way.connector, way.path) == ("nixl", "host")
    assert not decision.islands
    assert any("TRITON_ATTN" in note for note in mi300x.provenance.notes)


def test_one_vendor_is_one_island() -> None:
    assert island_layouts(read_serve_spec(EXAMPLES / "mixed-pool.yaml"), "disaggregated") == ({},)
    two = read_serve_spec(EXAMPLES / "h100-ascend.yaml")
    joined, apart = island_layouts(two, "disaggregated")
    assert (joined, apart) == ({}, {"h100": "nvidia", "ascend": "huawei"})
    # Nothing passes between aggregated instances, so that two releases are always two islands.
    assert island_layouts(two, "aggregated") == (apart,)
    assert island_layouts(two, "shared_device") == ({},)


def test_islands_together_serve_the_least_of_the_roles_of_each() -> None:
    problem = problem_of(EXAMPLES / "h100-ascend.yaml")
    groups, each = [], {}
    for pool, prefills, decodes in (("h100", 1, 4), ("ascend", 3, 1)):
        own = {
            one.role: one for one in problem.options.options if one.serving_pool.pool.name == pool
        }
        served = [(own[Role.PREFILL], prefills), (own[Role.DECODE], decodes)]
        groups += [InstanceGroup(option=one, count=count, island=pool) for one, count in served]
        each[pool] = min(count * one.rate_per_s for one, count in served)
    assert capacity_per_s(groups) == pytest.approx(sum(each.values()))
    assert {
        name: share * capacity_per_s(groups) for name, share in island_shares(groups).items()
    } == (pytest.approx(each))
    # Every batch of both vendors' ways is there for the front of speeds.
    drawn = {curve.option.serving_pool.pool.name for curve in problem.options.curves}
    assert drawn == {"h100", "ascend"}


def test_a_session_finds_its_prefix_on_its_own_island_alone(tmp_path: Path) -> None:
    text = (EXAMPLES / "h100-ascend.yaml").read_text(encoding="utf-8")
    path = tmp_path / "spec.yaml"
    path.write_text(
        text.replace("../models", str(EXAMPLES.parent / "models"))
        .replace("modes: [disaggregated]", "modes: [aggregated]")
        .replace("arrival:", "prefix_hit: 0.5\n    requests: 800\n    arrival:"),
        encoding="utf-8",
    )
    problem = problem_of(path)
    found = present(solve_goal(problem, "aggregated"))
    shares = island_shares(found.groups).values()
    assert len(shares) == 2
    kept = sum(share**2 for share in shares)
    assert prefixes_kept(found.groups, loses=False) == pytest.approx(kept)
    assert present(found.prefix_hit) <= 0.5 * kept * (1.0 + 2.0 * KEPT_TOLERANCE)
    assert any("islands looks for no prefixes" in line for line in plan_cautions(found, problem))
    # Where no router of an island looks either, one of its instances is met by chance.
    (first, *_) = found.groups
    alone = [replace(first, island="", count=4)]
    assert prefixes_kept(alone, loses=True) == 0.25
    assert prefixes_kept(alone, loses=False) == 1.0


def test_a_route_never_leaves_an_island() -> None:
    with pytest.raises(ValueError, match="joins two islands"):
        InstancesProblem(
            pools=(DevicePool(name="one", devices=8),),
            groups=(
                ColumnGroup(name="p", role=InstanceRole.PREFILL),
                ColumnGroup(name="d", role=InstanceRole.DECODE, island=1),
            ),
            columns=(),
            routes=(Route(sender=0, receiver=1),),
            objective=InstanceObjective.DEVICES,
            demand_per_s=1.0,
        )
