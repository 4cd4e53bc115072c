import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.expect import present
from tests.rows import each_row
from tuner.costs.reference.workload import StepDegrees
from tuner.plans.train import TrainPrediction
from tuner.search.reasons import (
    MemoryOffer,
    binding_constraint,
    memory_words,
    printed_bytes,
    why_lost,
)
from tuner.search.reference.plan_profiled import blocking_rules, needed_memory_bytes
from tuner.search.reference.space import Enumeration
from tuner.search.train.rules import MICRO_RULE
from tuner.units import format_bytes


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


@each_row(
    ("unlimited_s", "start"),
    [
        (4.0, "experts: 3.00 s (75.0 %) of the step"),
        (3.999, "experts:"),
        (None, "experts:"),
        (
            3.0,
            "memory_per_device: with unlimited memory the fastest step takes 3.00 s, 25.0 % less "
            "than the fastest found (4.00 s); 1.00 KiB of a device may be used",
        ),
    ],
)
def test_memory_binds_only_where_more_of_it_would_help(
    unlimited_s: float | None, start: str
) -> None:
    assert binding_constraint(
        CHOSEN, fastest_s=4.0, unlimited_s=unlimited_s, memory_limit_bytes=1024
    ).startswith(start)


def test_a_runner_up_lost_by_what_grew_most() -> None:
    other = _prediction({"experts": 2.5, "attention": 1.0, "bubble": 1.5})
    assert why_lost(CHOSEN, other) == "1.00 s (25.0 %) slower; pipeline bubble takes 1.50 s more"
    faster = _prediction({"experts": 2.9, "attention": 1.0})
    assert why_lost(CHOSEN, faster) == "preference: the plan gives up 100 ms (2.5 %)"
    assert why_lost(CHOSEN, CHOSEN) == "nothing: the model predicts the same time"


def test_rules_that_alone_block_come_first(cut: Callable[..., StepDegrees]) -> None:
    # Seven combinations are illegal; three of them break one rule only.
    named = blocking_rules(
        Enumeration(
            legal=(),
            illegal={"a": 5, "b": 2},
            nearly=(
                ("b", cut()),
                (MICRO_RULE, cut(data=2, micro_batch_size=2)),
                (MICRO_RULE, cut(data=4, micro_batch_size=2)),
            ),
        ),
        global_batch_size=31,
    )
    assert [one.limit for one in named] == [MICRO_RULE, "b"]
    # Micro-batches of 2 over 2 or 4 replicas need multiples of 4 or 8: 28 is three away, 32 one.
    assert named[0].change == (
        "this rule alone excludes 2 of 7 combinations; global_batch_size 32 instead of 31 would do"
    )


def test_where_nothing_is_one_rule_away_the_commonest_rules_come_first() -> None:
    illegal = {"b": 2, "a": 2, "c": 5, "d": 1}
    named = blocking_rules(Enumeration(legal=(), illegal=illegal, nearly=()), global_batch_size=8)
    assert [one.limit for one in named] == ["c", "a", "b"]
    assert named[0].change == "this rule excludes 5 of 10 combinations"


def test_the_least_memory_is_that_of_the_leanest_candidate(make_case: Callable[..., Any]) -> None:
    limit = 1_000_000
    result = make_case(
        machine={"memory_limit_bytes": limit},
        search={"micro_batch_size": [2], "virtual_pipeline_model_parallel_size": [1]},
    ).search()
    assert len(result.infeasible) > 1
    least = needed_memory_bytes(result.infeasible, time_limit_s=10.0)
    alone = [needed_memory_bytes([one], time_limit_s=10.0) for one in result.infeasible]
    assert least == min(one for one in alone if one is not None)
    assert present(least) > limit
    assert needed_memory_bytes([], time_limit_s=10.0) is None


UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def test_the_printed_size_is_enough_and_little_more() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        needed = 2.0 ** draw.uniform(20.0, 43.0)
        size, unit = format_bytes(printed_bytes(needed)).split()
        printed = float(size) * UNITS[unit]
        assert needed * (1.0 - 1e-9) <= printed <= 1.02 * needed, (needed, size, unit)


def test_pools_are_named_where_there_are_several() -> None:
    one = MemoryOffer(90.1 * 2**30, 80 * 2**30)
    assert memory_words([one]) == "90.1 GiB per device instead of 80.0 GiB"
    two = [one._replace(pool="a"), one._replace(pool="b", needed_bytes=100.01 * 2**30)]
    assert memory_words(two) == (
        "90.1 GiB per device of pool 'a' instead of 80.0 GiB; "
        "101 GiB per device of pool 'b' instead of 80.0 GiB"
    )
