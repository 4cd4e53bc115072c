"""Traffic per token against the objective's own checker."""

from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.coactivation import check
from solvers.placement.ranks import Placement
from tuner.planner.place.candidates import coactivation_problem, rule_of
from tuner.planner.place.evidence import evidence_of
from tuner.planner.place.traffic import Tokens, problem_scale, token_costs_T, traffic_of
from tuner.spec.place_read import PlaceSpec, read_place_spec


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
    placement = Placement(expert_LS=np.tile(np.arange(8), (2, 1)))
    costs = token_costs_T(spec, one, placement, tokens=Tokens.ALL)
    assert one.recording.token_LTK is not None
    # Two experts a rank, two ranks a node; a rank costs 1 and a node 5 on top.
    by_hand = sum(
        len({expert // 2 for expert in layer[0]}) + 5.0 * len({expert // 4 for expert in layer[0]})
        for layer in one.recording.token_LTK.tolist()
    )
    assert costs[0] == by_hand


def test_planned_traffic_is_the_checkers_objective_per_token(spec: PlaceSpec) -> None:
    evidence = evidence_of(spec)
    rule = rule_of(evidence, ranks=spec.ranks, groups=None)
    placement = Placement(expert_LS=np.random.default_rng(1).permuted([[*range(8)]] * 2, axis=1))
    problem = coactivation_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
    scale = problem_scale(spec, evidence, rule)
    assert scale == 20.0
    stated = traffic_of(spec, evidence, placement, rule, tokens=Tokens.PLANNED)
    assert stated == pytest.approx(check.objective(problem, placement) / scale)


def test_judged_tokens_are_not_planned_from(spec: PlaceSpec) -> None:
    (one,) = evidence_of(spec)
    assert one.planned_LTK is not None
    assert one.judged_LTK is not None
    assert one.recording.token_LTK is not None
    both = np.concatenate([one.planned_LTK, one.judged_LTK], axis=1)
    assert both.tolist() == one.recording.token_LTK.tolist()
    assert one.judged_LTK.shape[1] == 20
