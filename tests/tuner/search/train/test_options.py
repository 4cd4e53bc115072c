import itertools
from collections import Counter

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.search.train.testing import make_problem
from tuner.catalog.manifest import Capabilities, anything
from tuner.engines.deepspeed.capabilities import DEEPSPEED_0_19
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18
from tuner.search.train.option_table import build_option_table
from tuner.search.train.options import Facts, OptionSpace, option_space
from tuner.spec.search import Search

FACTS = [
    Facts(has_pipeline=p, has_virtual=v, is_sharded=s, has_expert_parallel=e)
    for p, v, s, e in itertools.product((False, True), repeat=4)
    if p or not v
]
TARGETS = (MEGATRON_0_18, DEEPSPEED_0_19, anything("any"))


def brute(options: OptionSpace, facts: Facts) -> tuple[int, Counter[str]]:
    """One option after the other, by the first rule it breaks."""
    legal, illegal = 0, Counter[str]()
    axes = tuple(options.choices)
    for chosen in itertools.product(*options.choices.values()):
        way = dict(zip(axes, chosen, strict=True))
        broken = next(
            (
                rule.text
                for rule in options.rules
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
def test_counting_equals_trying_every_option(facts: Facts) -> None:
    # A small dense model has the fewest ways.
    options = option_space(make_problem("llama-3.1-8b", capabilities=MEGATRON_0_18))
    assert options.count_legal(facts) == brute(options, facts)


@pytest.mark.parametrize(
    "cases",
    [
        list(zip(FACTS, itertools.cycle(TARGETS), strict=False)),
        pytest.param(list(itertools.product(FACTS, TARGETS)), marks=pytest.mark.slow),
    ],
    ids=["every facts", "all pairs"],
)
def test_as_many_options_are_listed_as_are_counted(cases: list[tuple[Facts, Capabilities]]) -> None:
    for facts, target in cases:
        _check_count(option_space(make_problem("deepseek-v2-lite", capabilities=target)), facts)


def _check_count(options: OptionSpace, facts: Facts) -> None:
    legal, illegal = options.count_legal(facts)
    listed = options.legal(facts)

    assert len(listed) == legal, facts
    assert len(np.unique(listed, axis=0)) == legal, facts
    assert legal + sum(illegal.values()) == options.num_options, facts


def test_limits_leave_what_they_allow() -> None:
    limits = Search(zero_stage=(1,), chunks=(1, 4), cuda_graph=("none",))
    options = option_space(make_problem(limits=limits))
    listed = options.legal(FACTS[-1])
    chosen = {axis: set(listed[:, at].tolist()) for at, axis in enumerate(options.choices)}

    assert {options.choices["zero_stage"][i] for i in chosen["zero_stage"]} == {1}
    assert {options.choices["chunks"][i] for i in chosen["chunks"]} == {1, 4}
    assert {options.choices["cuda_graph"][i] for i in chosen["cuda_graph"]} == {"none"}


def test_a_table_holds_every_legal_option_or_one_that_is_never_worse() -> None:
    options = option_space(make_problem(capabilities=MEGATRON_0_18))
    table = build_option_table(options, FACTS[-1])

    assert table.num_legal == options.count_legal(FACTS[-1])[0]
    assert 0 < len(table.options_TA) < table.num_legal
    assert int(table.count_of_N.sum()) == len(table.options_TA)
    legal = {tuple(way) for way in options.legal(FACTS[-1]).tolist()}
    assert all(tuple(way) in legal for way in table.options_TA.tolist())
