"""Traffic per token against the objective's own checker."""

from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.store import write_recording
from solvers.placement.coactivation import check
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement
from tests.expect import present
from tuner.goals.place_plan import place
from tuner.goals.place_spec import read_place_spec
from tuner.search.place.cost import batch_traffic, evaluate_workload, fit_cost, traffic_scale
from tuner.search.place.evidence import Split, split_recordings
from tuner.search.place.plan_place import state_problem
from tuner.search.place.problem import PlaceProblem, traffic_problem
from tuner.search.settings import SearchSettings
from tuner.spec.place_spec import PlaceSpec


def problem_of(spec: PlaceSpec) -> PlaceProblem:
    return state_problem(spec, settings=SearchSettings())


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
    problem = problem_of(spec)
    (one,) = problem.evidence
    placement = Placement(expert_LS=np.tile(np.arange(8), (2, 1)))
    found = evaluate_workload(problem, one, placement, split=Split.ALL).traffic
    # Two experts a rank, two ranks a node. From half of the ranks a node is another one, which
    # costs 6, and from half of the ranks of a node a rank is another one, which costs 1.
    by_hand = [
        sum(
            0.5 * len({expert // 2 for expert in layer[token]})
            + 3.0 * len({expert // 4 for expert in layer[token]})
            for layer in present(one.recording.token_LTK).tolist()
        )
        for token in range(40)
    ]
    assert found == pytest.approx(np.mean(by_hand))


def test_batches_of_holdout_tokens_average_to_their_traffic(spec: PlaceSpec) -> None:
    problem = problem_of(spec)
    (one,) = problem.evidence
    parts = batch_traffic(problem, one, spec.current)
    assert len(parts) == 10
    assert len(set(parts.tolist())) > 1
    found = evaluate_workload(problem, one, spec.current)
    assert found.value_P.tolist() == parts.tolist()
    assert parts.mean() == pytest.approx(found.traffic)


def test_fit_traffic_is_the_checkers_objective_per_token(spec: PlaceSpec) -> None:
    problem = problem_of(spec)
    placement = Placement(expert_LS=np.random.default_rng(1).permuted([[*range(8)]] * 2, axis=1))
    stated = traffic_problem(problem)
    assert isinstance(stated, CoactivationProblem)
    scale = traffic_scale(problem, stated)
    assert scale == 20.0
    assert fit_cost(problem, placement) == pytest.approx(check.objective(stated, placement) / scale)


def test_holdout_tokens_are_no_fit_tokens(spec: PlaceSpec) -> None:
    (one,) = split_recordings(spec)
    both = np.concatenate([present(one.fit_LTK), present(one.holdout_LTK)], axis=1)
    assert both.tolist() == present(one.recording.token_LTK).tolist()
    assert present(one.holdout_LTK).shape[1] == 20


def test_the_problem_of_a_plan_is_stated_once(spec: PlaceSpec) -> None:
    text = spec.path.read_text()
    for objective in ("co_activation", "layer_chain"):
        spec.path.write_text(text.replace("co_activation", objective))
        before = traffic_problem.cache_info().misses
        assert place(spec.path, time_limit_s=0.5).plan.alternatives
        assert traffic_problem.cache_info().misses - before <= 1, objective
