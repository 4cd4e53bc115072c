import time
from collections.abc import Callable

import numpy as np
import pytest

from solvers.registry import LAYOUT
from tuner.planner.analytic import finalists
from tuner.planner.analytic.finalists import finalist, layout_problem, played_s, ranked
from tuner.planner.analytic.incumbents import Search as Found
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.search import Settings, search
from tuner.planner.analytic.search_result import detail_of
from tuner.simulate.pipeline import Played
from tuner.spec.manifests.megatron_lm import MEGATRON_0_18
from tuner.spec.search import Search

MakeQuestion = Callable[..., Question]
SETTINGS = Settings(clock=time.perf_counter, time_limit_s=60.0, top=6)


@pytest.fixture(scope="module")
def found(ask: MakeQuestion) -> Found:
    """Pipelines of two and four devices, one stage on each."""
    limits = Search(pipeline_model_parallel_size=(2, 4), virtual_pipeline_model_parallel_size=(1,))
    question = ask(
        "deepseek-v2-lite",
        devices=32,
        global_batch_size=256,
        capabilities=MEGATRON_0_18,
        limits=limits,
    )
    return search(question, SETTINGS)


def test_the_ranking_plays_until_closed_forms_rule_out_the_rest(found: Found) -> None:
    ranking = ranked(found, time_limit_s=60.0, clock=time.perf_counter)
    assert found.found is not None
    assert sorted(ranking.order) == list(range(len(found.found)))
    assert list(ranking.objective_s) == sorted(ranking.objective_s)
    for rank, objective_s in enumerate(ranking.objective_s):
        index = ranking.order[rank]
        played = played_s(detail_of(found, index))
        assert objective_s == max(found.found.step_s[index], played)
    unplayed = found.found.step_s[len(ranking.objective_s) :]
    assert (unplayed >= ranking.objective_s[0]).all()


def test_the_integer_program_never_makes_a_row_slower(found: Found) -> None:
    assert found.found is not None
    for index in range(3):
        best = finalist(found, index, time_limit_s=30.0)
        assert best.step_s <= found.found.step_s[index] * (1.0 + 1e-9)
        assert sum(best.layers_S) == found.question.model.num_layers
        peak = float(best.detail.memory.total_PC.max())
        assert peak <= found.question.memory_limit_bytes


def test_the_program_counts_a_pipeline_as_the_closed_form_does(found: Found) -> None:
    assert found.found is not None
    one = found.found.candidates.taken(np.array([0]))
    outcome = LAYOUT.solve(layout_problem(found, one), method="exact", time_limit_s=30.0)
    step = detail_of(found, 0).step
    rest_s = float(np.ravel(step.once_s)[0])
    # What the closed form adds beside both: sending between stages.
    assert outcome.solution is not None
    assert outcome.objective + rest_s <= found.found.step_s[0] * (1.0 + 1e-9)
    assert outcome.objective + rest_s >= 0.9 * found.found.step_s[0]


def test_nothing_found_has_no_finalist(ask: MakeQuestion) -> None:
    nothing = search(ask("mixtral-8x7b", memory_limit_bytes=4e9), SETTINGS)
    assert ranked(nothing, time_limit_s=1.0, clock=time.perf_counter).order == ()
    with pytest.raises(ValueError, match="found nothing that fits"):
        finalist(nothing, 0, time_limit_s=1.0)


def test_an_extrapolated_schedule_that_may_be_off_is_stated(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    detail = detail_of(found, 0)
    assert finalists.unsettled_notes(detail) == ()

    def play(_: object) -> Played:
        return Played(step_s=10.0, idle_s_P=(0.0,), most_held_P=(1,), most_off_s=0.25)

    monkeypatch.setattr(finalists, "play", play)
    (note,) = finalists.unsettled_notes(detail)
    assert note.endswith("the step may be off by 250 ms (2.5 %)")
