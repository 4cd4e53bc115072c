import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from tests.rows import each_row
from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.option_table import way_table
from tuner.planner.analytic.options import Ways, ways_of
from tuner.planner.analytic.problem import Question
from tuner.spec.manifests.deepspeed import DEEPSPEED_0_19
from tuner.spec.manifests.manifest import Capabilities
from tuner.spec.manifests.megatron_lm import MEGATRON_0_18
from tuner.spec.search import Search

MakeQuestion = Callable[..., Question]

FACTS = [
    Facts(has_pipeline=p, has_virtual=v, is_sharded=s, has_experts_apart=e)
    for p, v, s, e in itertools.product((False, True), repeat=4)
    if p or not v
]
TARGETS = (MEGATRON_0_18, DEEPSPEED_0_19, Capabilities(names=("any",)))


def brute(ways: Ways, facts: Facts) -> tuple[int, Counter[str]]:
    """One way after the other, by the first rule it breaks."""
    legal, illegal = 0, Counter[str]()
    axes = tuple(ways.choices)
    for chosen in itertools.product(*ways.choices.values()):
        way = dict(zip(axes, chosen, strict=True))
        broken = next(
            (
                rule.text
                for rule in ways.rules
                if rule.is_broken(facts, *(way[axis] for axis in rule.axes))
            ),
            None,
        )
        if broken is None:
            legal += 1
        else:
            illegal[broken] += 1
    return legal, illegal


@each_row("facts", FACTS[::5])
def test_counting_is_trying_every_way(ask: MakeQuestion, facts: Facts) -> None:
    # A small dense model has the fewest ways.
    ways = ways_of(ask("llama-3.1-8b", capabilities=MEGATRON_0_18))
    assert ways.counted(facts) == brute(ways, facts)


@pytest.mark.parametrize(
    "cases",
    [
        list(zip(FACTS, itertools.cycle(TARGETS), strict=False)),
        pytest.param(list(itertools.product(FACTS, TARGETS)), marks=pytest.mark.slow),
    ],
    ids=["every facts", "all pairs"],
)
def test_as_many_ways_are_listed_as_are_counted(
    ask: MakeQuestion, cases: list[tuple[Facts, Capabilities]]
) -> None:
    for facts, target in cases:
        _check_count(ways_of(ask("deepseek-v2-lite", capabilities=target)), facts)


def _check_count(ways: Ways, facts: Facts) -> None:
    legal, illegal = ways.counted(facts)
    listed = ways.legal(facts)

    assert len(listed) == legal, facts
    assert len(np.unique(listed, axis=0)) == legal, facts
    assert legal + sum(illegal.values()) == ways.num_ways, facts


def test_limits_leave_what_they_allow(ask: MakeQuestion) -> None:
    limits = Search(zero_stage=(1,), chunks=(1, 4), cuda_graph=("none",))
    ways = ways_of(ask(limits=limits))
    listed = ways.legal(FACTS[-1])
    chosen = {axis: set(listed[:, at].tolist()) for at, axis in enumerate(ways.choices)}

    assert {ways.choices["zero_stage"][i] for i in chosen["zero_stage"]} == {1}
    assert {ways.choices["chunks"][i] for i in chosen["chunks"]} == {1, 4}
    assert {ways.choices["cuda_graph"][i] for i in chosen["cuda_graph"]} == {"none"}


def test_a_table_holds_every_legal_way_or_one_that_is_never_worse(ask: MakeQuestion) -> None:
    ways = ways_of(ask(capabilities=MEGATRON_0_18))
    table = way_table(ways, FACTS[-1])

    assert table.num_legal == ways.counted(FACTS[-1])[0]
    assert 0 < len(table.ways_TA) < table.num_legal
    assert int(table.count_of_G.sum()) == len(table.ways_TA)
    legal = {tuple(way) for way in ways.legal(FACTS[-1]).tolist()}
    assert all(tuple(way) in legal for way in table.ways_TA.tolist())
