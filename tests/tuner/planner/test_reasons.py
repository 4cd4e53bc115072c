from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tuner.plan import TrainPrediction
from tuner.planner.reasons import (
    binding_constraint,
    commonest_rules,
    needed_memory_bytes,
    why_lost,
)


def _prediction(breakdown_s: Mapping[str, float]) -> TrainPrediction:
    step_s = sum(breakdown_s.values())
    return TrainPrediction(
        step_time_s=step_s,
        step_time_s_band=(step_s, step_s),
        tokens_per_s_per_device=1.0,
        tokens_per_s_per_device_band=(1.0, 1.0),
        peak_memory_bytes=(1,),
        peak_memory_bytes_band=((1.0, 1.0),),
        activation_bytes=(1,),
        breakdown_s=dict(breakdown_s),
        communication_s=0.0,
        stages=(),
    )


CHOSEN = _prediction({"experts": 3.0, "attention": 1.0})


@pytest.mark.parametrize(
    ("unlimited_s", "start"),
    [
        (4.0, "experts: 3.00 s of the step (75"),
        (3.999, "experts:"),
        (None, "experts:"),
        (3.0, "memory_per_device: with more than 1.00 KiB usable a step would take 3.00 s, 25"),
    ],
)
def test_memory_binds_only_where_more_of_it_would_help(
    unlimited_s: float | None, start: str
) -> None:
    found = binding_constraint(CHOSEN, unlimited_s=unlimited_s, memory_limit_bytes=1024)
    assert found.startswith(start)


def test_a_runner_up_lost_by_what_grew_most() -> None:
    other = _prediction({"experts": 2.5, "attention": 1.0, "bubble": 1.5})
    assert why_lost(CHOSEN, other) == "1.00 s (25.0 %) slower, of it 1.50 s in bubble"
    assert why_lost(CHOSEN, CHOSEN) == "nothing: the model predicts the same time"


def test_the_commonest_rules_come_first_and_ties_by_name() -> None:
    found = commonest_rules({"b": 2, "a": 2, "c": 5, "d": 1})
    assert [one.limit for one in found] == ["c", "a", "b"]
    assert found[0].change == "5 of 10 combinations break it"


def test_the_least_memory_is_that_of_the_leanest_candidate(ask: Callable[..., Any]) -> None:
    limit = 1_000_000
    result = ask(
        machine={"memory_limit_bytes": limit},
        search={"micro_batch_size": [2], "virtual_pipeline_model_parallel_size": [1]},
    ).searched()
    assert len(result.infeasible) > 1
    least = needed_memory_bytes(result.infeasible, time_limit_s=10.0)
    alone = [needed_memory_bytes([one], time_limit_s=10.0) for one in result.infeasible]
    assert least == min(one for one in alone if one is not None)
    assert least is not None
    assert least > limit
    assert needed_memory_bytes([], time_limit_s=10.0) is None
