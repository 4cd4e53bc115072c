from pathlib import Path
from typing import Any

import pytest

from tuner.errors import SpecError
from tuner.planner.analytic.planning import question_of, site_of
from tuner.planner.analytic.question import Question
from tuner.spec.read import read_spec
from tuner.spec.search import Search

WORKED = Path(__file__).parents[4] / "examples" / "worked" / "mixtral-8x7b-64-a100" / "spec.yaml"


def question(*, emit: tuple[str, ...] = ("megatron-lm",), **limits: Any) -> Question:
    spec = read_spec(WORKED).model_copy(update={"search": Search(**limits), "emit": emit})
    return question_of(spec, site_of(spec.cluster.pools[0], residuals=None))


def test_gradients_have_four_bytes_unless_two_are_named() -> None:
    assert question().gradient_bytes == 4.0
    assert question(gradient_bytes=(2,)).gradient_bytes == 2.0
    assert question(gradient_bytes=(4, 2)).gradient_bytes == 2.0


def test_a_target_without_bf16_gradients_refuses_them() -> None:
    with pytest.raises(SpecError, match="cannot be launched by torchtitan; 4 can"):
        question(emit=("torchtitan",), gradient_bytes=(2,))


def test_the_dispatcher_that_nothing_prices_is_refused() -> None:
    with pytest.raises(SpecError, match="'alltoall' works"):
        question(dispatcher=("allgather",))
