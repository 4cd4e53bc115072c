import time

import numpy as np
import pytest

from solvers.registry import LAYOUT
from tests.expect import present
from tests.tuner.search.train.testing import make_problem
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.search.settings import SearchSettings
from tuner.search.train import finalists
from tuner.search.train.finalists import (
    layout_problem,
    rank_by_simulation,
    refine_finalist,
    simulated_s,
)
from tuner.search.train.search import search
from tuner.search.train.search_result import SearchOutcome, price_solution
from tuner.simulate.pipeline import SimulatedStep
from tuner.spec.search import Search

SETTINGS = SearchSettings(clock=time.perf_counter, time_limit_s=60.0, top=6)


@pytest.fixture(scope="module")
def outcome() -> SearchOutcome:
    """Pipelines of two and four devices, one stage on each."""
    limits = Search(pipeline_model_parallel_size=(2, 4), virtual_pipeline_model_parallel_size=(1,))
    problem = make_problem(
        "deepseek-v2-lite",
        devices=32,
        global_batch_size=256,
        capabilities=MEGATRON_0_18,
        limits=limits,
    )
    return search(problem, SETTINGS)


def test_the_ranking_simulates_until_closed_forms_rule_out_the_rest(outcome: SearchOutcome) -> None:
    ranking = rank_by_simulation(outcome, time_limit_s=60.0, clock=time.perf_counter)
    assert sorted(ranking.order) == list(range(len(present(outcome.solutions))))
    assert list(ranking.objective_s) == sorted(ranking.objective_s)
    for rank, objective_s in enumerate(ranking.objective_s):
        index = ranking.order[rank]
        simulated = simulated_s(price_solution(outcome, index))
        assert objective_s == max(present(outcome.solutions).step_s[index], simulated)
    unsimulated = present(outcome.solutions).step_s[len(ranking.objective_s) :]
    assert (unsimulated >= ranking.objective_s[0]).all()


def test_the_integer_program_never_makes_a_row_slower(outcome: SearchOutcome) -> None:
    for index in range(3):
        best = refine_finalist(outcome, index, time_limit_s=30.0)
        assert best.row.step_s[0] <= present(outcome.solutions).step_s[index] * (1.0 + 1e-9)
        assert best.row.layers_PC.sum() == outcome.problem.model.num_layers
        assert float(best.detail.memory.total_PC.max()) <= outcome.problem.memory_limit_bytes


def test_the_program_counts_a_pipeline_as_the_closed_form_does(outcome: SearchOutcome) -> None:
    one = present(outcome.solutions).candidates.taken(np.array([0]))
    layout_outcome = LAYOUT.solve(layout_problem(outcome, one), time_limit_s=30.0)
    rest_s = float(np.ravel(price_solution(outcome, 0).step.once_s)[0])
    # What the closed form adds beside both: sending between stages.
    assert layout_outcome.solution is not None
    assert layout_outcome.objective + rest_s <= present(outcome.solutions).step_s[0] * (1.0 + 1e-9)
    assert layout_outcome.objective + rest_s >= 0.9 * present(outcome.solutions).step_s[0]


def test_no_solution_has_no_finalist() -> None:
    nothing = search(make_problem("mixtral-8x7b", memory_limit_bytes=4e9), SETTINGS)
    assert rank_by_simulation(nothing, time_limit_s=1.0, clock=time.perf_counter).order == ()
    with pytest.raises(ValueError, match="found nothing that fits"):
        refine_finalist(nothing, 0, time_limit_s=1.0)


def test_an_extrapolated_schedule_that_may_be_off_is_stated(
    outcome: SearchOutcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    detail = price_solution(outcome, 0)
    assert finalists.unsettled_notes(detail) == ()

    def simulate_step(_: object) -> SimulatedStep:
        return SimulatedStep(step_s=10.0, max_error_s=0.25)

    monkeypatch.setattr(finalists, "simulate_step", simulate_step)
    (note,) = finalists.unsettled_notes(detail)
    assert note.endswith("the step may be off by 250 ms (2.5 %)")
