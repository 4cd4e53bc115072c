import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from profilers.records import Case
from solvers.layout import exact
from solvers.layout.check import objective
from solvers.layout.problem import Layout
from solvers.result import Claim, Status
from tests.expect import present
from tests.rows import each_row
from tests.solvers.layout import brute_force
from tuner.costs.reference.workload import StepDegrees
from tuner.search.reference.decisions import options
from tuner.search.reference.layer_costs import CandidateCosts, layout_problem
from tuner.search.reference.predict import predict
from tuner.search.reference.search import ReferenceOutcome
from tuner.search.reference.space import enumerate_degrees

MakeCase = Callable[..., Any]

# Three layers, so that 1F1B and interleaving have uneven stages to choose from.
THREE_LAYERS: dict[str, Any] = {"model": {"num_hidden_layers": 3}}
UNSOLVED: Claim[Layout] = Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
INTERLEAVED_ONLY = {
    "pipeline_model_parallel_size": [2],
    "virtual_pipeline_model_parallel_size": [2],
}

NOT_INTERLEAVED: dict[str, Any] = {
    "search": {
        "micro_batch_size": [2],
        "zero_stage": [0, 1],
        "chunks": [1, 4],
        "virtual_pipeline_model_parallel_size": [1],
    }
}


def _oracle(case: Any) -> dict[StepDegrees, float]:
    """The best objective of every legal candidate by trying every layout; inf where none fits."""
    problem = case.problem
    stage_options = options(
        has_experts=True, capabilities=problem.capabilities, search=problem.spec.search
    )
    legal = enumerate_degrees(
        problem.work,
        num_devices=problem.machine.num_devices,
        capabilities=problem.capabilities,
        search=problem.spec.search,
    ).legal
    best = {}
    for degrees in legal:
        costs = CandidateCosts(work=problem.work, degrees=degrees, machine=problem.machine)
        layouts = layout_problem(costs, options=stage_options, capabilities=problem.capabilities)
        claim = brute_force.solve(layouts, time_limit_s=math.inf)
        best[degrees] = math.inf if claim.solution is None else objective(layouts, claim.solution)
    return best


@each_row("memory", [2**40, 8_000_000])
def test_the_search_finds_what_trying_everything_finds(make_case: MakeCase, memory: int) -> None:
    case = make_case(machine={"memory_limit_bytes": memory}, **THREE_LAYERS)
    result: ReferenceOutcome = case.search()
    oracle = _oracle(case)
    fitting = sorted(value for value in oracle.values() if value < math.inf)
    assert fitting
    assert (len(fitting) < len(oracle)) == (memory < 2**40)
    certificate = result.certificate
    assert certificate.status == "optimal"
    assert certificate.objective == pytest.approx(fitting[0], rel=1e-6)
    assert certificate.space.priced + certificate.space.bounded == len(oracle)
    assert certificate.space.open == 0
    assert [one.objective_s for one in result.solved[:3]] == pytest.approx(fitting[:3], rel=1e-6)
    for one in result.solved:
        assert one.objective_s == pytest.approx(oracle[one.costs.degrees], rel=1e-6)
        assert predict(one.costs, one.decision).step_time_s == pytest.approx(one.objective_s)
        assert max(predict(one.costs, one.decision).peak_memory_bytes) <= memory


def test_all_ties_of_the_best_are_found_and_counted(make_case: MakeCase) -> None:
    case = make_case(machine={"band_ratio": 0.2}, settings={"top": 1}, **NOT_INTERLEAVED)
    result = case.search()
    values = sorted(_oracle(case).values())
    # A band of 20 % around the best holds measurements up to best / 0.8.
    tied = [value for value in values if value <= values[0] / 0.8]
    assert 1 < len(tied) < len(values)
    assert result.certificate.within_band == len(tied) - 1
    assert len(result.solved) >= len(tied)


def test_without_time_the_best_bounded_candidate_is_solved_and_the_rest_left_open(
    make_case: MakeCase,
) -> None:
    result = make_case(settings={"time_limit_s": 0.0}).search()
    certificate = result.certificate
    assert certificate.space.priced == 1
    assert certificate.space.open == len(result.enumeration.legal) - 1 > 0
    # It is optimal only where the bounds of all others say so.
    assert (certificate.status == "optimal") == (
        present(certificate.bound) >= present(certificate.objective) * (1 - 1e-6)
    )


def test_a_candidate_that_time_leaves_unsolved_proves_nothing_and_is_open(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    best_s = make_case().search().certificate.objective
    monkeypatch.setattr(exact, "solve", lambda problem, **_: UNSOLVED)
    result = make_case(search=INTERLEAVED_ONLY).search()
    certificate = result.certificate
    assert (certificate.status, certificate.objective) == ("unknown", None)
    assert certificate.gap_ratio == 1.0
    assert certificate.space.open == len(result.enumeration.legal) > 0
    assert certificate.space.priced == certificate.space.bounded == 0
    assert present(certificate.bound) <= best_s


def _ticking() -> Callable[[], float]:
    """A clock that reads one second more each time."""
    counter: Iterator[int] = itertools.count()
    return lambda: float(next(counter))


def test_time_that_runs_out_leaves_a_true_bound(make_case: MakeCase) -> None:
    # So little memory that layouts are slower than the bounds of candidates not yet solved.
    tight: dict[str, Any] = {"machine": {"memory_limit_bytes": 10_400_000}}
    best = make_case(**tight, **NOT_INTERLEAVED).search().certificate.objective
    statuses = set()
    for limit in range(1, 12):
        settings = {"time_limit_s": float(limit), "clock": _ticking(), "top": 50}
        certificate = make_case(settings=settings, **tight, **NOT_INTERLEAVED).search().certificate
        statuses.add(certificate.status)
        assert present(certificate.bound) <= best * (1 + 1e-9)
        if certificate.objective is not None:
            assert certificate.objective >= best * (1 - 1e-9)
            expected_gap = 1.0 - present(certificate.bound) / certificate.objective
            assert certificate.gap_ratio == pytest.approx(expected_gap)
        if certificate.status == "optimal":
            assert certificate.objective == pytest.approx(best)
        if certificate.status == "feasible":
            assert certificate.space.open > 0
            assert present(certificate.bound) < certificate.objective
    assert statuses == {"feasible", "optimal"}


def test_too_little_memory_is_infeasible_not_unknown(make_case: MakeCase) -> None:
    result = make_case(machine={"memory_limit_bytes": 1000}).search()
    certificate = result.certificate
    assert certificate.status == "infeasible"
    assert certificate.space.priced == len(result.infeasible) > 0
    assert certificate.gap_ratio == 0.0


def test_an_empty_space_is_infeasible_with_every_combination_counted(make_case: MakeCase) -> None:
    result = make_case(search={"context_parallel_size": [2]}).search()
    assert result.certificate.status == "infeasible"
    assert result.certificate.space.priced == 0
    assert result.certificate.space.illegal == result.enumeration.num_illegal > 0


def test_equal_times_prefer_less_parallelism(make_case: MakeCase) -> None:
    # Only the embedding costs anything, so all cuts with as many micro-batches tie.
    machine = {"seconds": lambda case: 1.0 if case.kind == "embedding" else 0.0}
    result = make_case(machine=machine, settings={"top": 100}, **NOT_INTERLEAVED).search()
    order = [
        (
            one.objective_s,
            one.costs.degrees.pipeline,
            one.costs.degrees.tensor,
            one.costs.degrees.expert,
            one.costs.degrees.zero_stage,
        )
        for one in result.solved
    ]
    assert order == sorted(order)
    assert len({one[0] for one in order}) < len(order) == len(set(order))


def _slow_between_nodes(case: Case) -> float:
    """Only exchanges between the two nodes of two cost time: a second a megabyte."""
    is_far = case.axes.get("ranks", 0) * case.axes.get("stride", 0) == 4
    if case.operation != "collective" or case.kind == "send_recv" or not is_far:
        return 1e-6
    return 1e-6 + case.axes["bytes"] * 1e-6


def test_experts_that_must_span_nodes_are_served_hop_by_hop(make_case: MakeCase) -> None:
    limits = {"micro_batch_size": [2], "zero_stage": [0], "chunks": [1], "recompute": ["none"]}
    machine = {"num_devices": 4, "ranks_per_node": 2, "seconds": _slow_between_nodes}
    pool = {"nodes": 2, "devices_per_node": 2}
    # Of four copies of a token two stay, and one of the other two is a duplicate.
    model = {"num_experts_per_tok": 4}

    def found(**more: Any) -> ReferenceOutcome:
        case = make_case(machine=machine, pool=pool, model=model, search=limits | more)
        result: ReferenceOutcome = case.problem.search(case.settings)
        return result

    spanning = {"expert_model_parallel_size": [4], "tensor_model_parallel_size": [1]}
    best = found(**spanning).solved[0]
    assert best.decision.dispatcher == "hierarchical"
    flat = found(**spanning, dispatcher=["alltoall"]).solved[0]
    assert flat.decision.dispatcher == "alltoall"
    assert flat.objective_s > best.objective_s
    # Where they need not, no exchange leaves its node.
    free = found(expert_model_parallel_size=[2, 4]).solved[0]
    assert free.decision.expert_model_parallel_size == 2
