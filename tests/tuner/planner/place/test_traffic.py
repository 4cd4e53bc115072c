"""Traffic per token against the objective's own checker."""

from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.coactivation import check
from solvers.placement.ranks import Placement
from tuner.place_api import place
from tuner.planner.place import candidates
from tuner.planner.place.candidates import coactivation_problem, rule_of
from tuner.planner.place.evidence import evidence_of
from tuner.planner.place.links import LinkCosts, LinkSource, links_between
from tuner.planner.place.sampled import Tokens
from tuner.planner.place.traffic import problem_scale, stretches, traffic_of, traffic_on_one
from tuner.spec.place_read import PlaceSpec, read_place_spec


def constant_links(spec: PlaceSpec) -> LinkCosts:
    return links_between(spec, evidence_of(spec), LinkSource())


@pytest.fixture
def spec(tmp_path: Path) -> PlaceSpec:
    rng = np.random.default_rng(4)
    token_LTK = np.argsort(rng.random((2, 40, 8)), axis=2)[:, :, :3].astype(np.int32)
    counts = np.stack([np.bincount(layer.ravel(), minlength=8) for layer in token_LTK])
    write_recording(
        tmp_path / "chat",
        Recording(
            model="tiny",
            workload="chat",
            layer_ids=(0, 1),
            top_k=3,
            count_PLE=counts[None],
            token_LTK=token_LTK,
        ),
    )
    path = tmp_path / "spec.yaml"
    path.write_text(
        "schema_version: 1\ngoal:\n  kind: place\n  ranks: 4\n  ranks_per_node: 2\n"
        "  objective: co_activation\n  workloads: [{name: chat, path: chat}]\n"
    )
    return read_place_spec(path)


def test_a_tokens_cost_is_the_ranks_and_nodes_it_touches(spec: PlaceSpec) -> None:
    (one,) = evidence_of(spec)
    rule = rule_of([one], ranks=spec.ranks, groups=None)
    placement = Placement(expert_LS=np.tile(np.arange(8), (2, 1)))
    assert one.recording.token_LTK is not None
    found = traffic_on_one(spec, one, placement, rule, constant_links(spec), tokens=Tokens.ALL)
    # Two experts a rank, two ranks a node. From half of the ranks a node is another one, which
    # costs 6, and from half of the ranks of a node a rank is another one, which costs 1.
    by_hand = [
        sum(
            0.5 * len({expert // 2 for expert in layer[token]})
            + 3.0 * len({expert // 4 for expert in layer[token]})
            for layer in one.recording.token_LTK.tolist()
        )
        for token in range(40)
    ]
    assert found == pytest.approx(np.mean(by_hand))


def test_stretches_of_judged_tokens_average_to_the_judged_traffic(spec: PlaceSpec) -> None:
    (one,) = evidence_of(spec)
    links = constant_links(spec)
    rule = rule_of([one], ranks=spec.ranks, groups=None)
    parts = stretches(spec, one, spec.current, rule, links)
    assert len(parts) == 10
    assert len(set(parts.tolist())) > 1
    judged = traffic_on_one(spec, one, spec.current, rule, links, tokens=Tokens.JUDGED)
    assert parts.mean() == pytest.approx(judged)


def test_planned_traffic_is_the_checkers_objective_per_token(spec: PlaceSpec) -> None:
    evidence = evidence_of(spec)
    links = constant_links(spec)
    rule = rule_of(evidence, ranks=spec.ranks, groups=None)
    placement = Placement(expert_LS=np.random.default_rng(1).permuted([[*range(8)]] * 2, axis=1))
    problem = coactivation_problem(
        evidence, goal=spec.goal, ranks=spec.ranks, rule=rule, links=links
    )
    scale = problem_scale(spec, evidence, rule, links)
    assert scale == 20.0
    stated = traffic_of(spec, evidence, placement, rule, links, tokens=Tokens.PLANNED)
    assert stated == pytest.approx(check.objective(problem, placement) / scale)
    assert stated == pytest.approx(
        traffic_on_one(spec, evidence[0], placement, rule, links, tokens=Tokens.PLANNED)
    )


def test_judged_tokens_are_not_planned_from(spec: PlaceSpec) -> None:
    (one,) = evidence_of(spec)
    assert one.planned_LTK is not None
    assert one.judged_LTK is not None
    assert one.recording.token_LTK is not None
    both = np.concatenate([one.planned_LTK, one.judged_LTK], axis=1)
    assert both.tolist() == one.recording.token_LTK.tolist()
    assert one.judged_LTK.shape[1] == 20


def test_the_problem_of_a_plan_is_stated_once(spec: PlaceSpec) -> None:
    text = spec.path.read_text()
    over = []
    for objective, stated in (
        ("co_activation", candidates._planned_coactivation),
        ("layer_chain", candidates._planned_chain),
    ):
        spec.path.write_text(text.replace("co_activation", objective))
        before = stated.cache_info().misses
        placed = place(spec.path, time_limit_s=0.5)
        assert placed.plan.alternatives
        # The plan's, and that of a relaxation.
        if stated.cache_info().misses - before > 2:
            over.append(objective)
    assert not over
