from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.problem import TrainProblem
from tuner.spec.goal import Precision, Reliability
from tuner.spec.search import Search

WORKED = Path(__file__).parents[4] / "examples" / "worked" / "mixtral-8x7b-64-a100" / "spec.yaml"


def problem(*, emit: tuple[str, ...] = ("megatron-lm",), **limits: Any) -> TrainProblem:
    spec = read_spec(WORKED).model_copy(
        update={"search": Search(**limits), "programs": programs(emit)}
    )
    return build_problem(spec, price_pool(spec.cluster.pools[0], residuals=None))


def test_gradients_have_four_bytes_unless_two_are_named() -> None:
    assert problem().gradient_bytes == 4.0
    assert problem(gradient_bytes=(2,)).gradient_bytes == 2.0
    assert problem(gradient_bytes=(4, 2)).gradient_bytes == 2.0


def test_a_target_without_bf16_gradients_refuses_them() -> None:
    with pytest.raises(SpecError, match="cannot be launched by torchtitan; 4 can"):
        problem(emit=("torchtitan",), gradient_bytes=(2,))


@each_row(
    ("requested", "emit", "message"),
    [
        (("allgather",), "megatron-lm", "'allgather' is not priced: .*; 'alltoall', 'deepep'.* do"),
        (
            ("hierarchical",),
            "reference",
            "'hierarchical' is priced for the reference step alone, on a profile of"
            " `moetune profile`; 'alltoall' would do",
        ),
        (("hierarchical", "allgather"), "megatron-lm", "'hierarchical' is .*; 'allgather' is not"),
        (("hybridep",), "deepspeed", "'hybridep' cannot be launched by deepspeed; 'alltoall', 'de"),
    ],
)
def test_dispatchers_of_which_none_is_possible_are_named(
    requested: tuple[str, ...], emit: str, message: str
) -> None:
    with pytest.raises(SpecError, match=f"^search.dispatcher: {message}"):
        problem(emit=(emit,), dispatcher=requested)


def test_one_possible_dispatcher_among_others_is_enough() -> None:
    assert problem(dispatcher=("hierarchical", "alltoall")).num_devices == 64


def test_a_dense_model_has_no_other_dispatcher() -> None:
    spec = read_spec(WORKED)
    dense = spec.model.model_copy(update={"moe": None})
    requested = spec.model_copy(update={"model": dense, "search": Search(dispatcher=("deepep",))})
    with pytest.raises(SpecError, match="model without experts has nothing to dispatch"):
        build_problem(requested, price_pool(spec.cluster.pools[0], residuals=None))


@each_row(
    ("precision", "message"),
    [
        ("fp32", "measured profiles only; bf16 works"),
        ("mxfp8", "a100-80gb-sxm has no units for 'mxfp8'; bf16 works"),
        ("nvfp4", "no units for 'nvfp4'"),
    ],
)
def test_a_precision_without_units_or_evidence_is_refused(precision: str, message: str) -> None:
    spec = read_spec(WORKED)
    goal = spec.goal.model_copy(update={"precision": Precision(precision)})
    with pytest.raises(SpecError, match=message):
        build_problem(
            spec.model_copy(update={"goal": goal}),
            price_pool(spec.cluster.pools[0], residuals=None),
        )


def test_offloading_and_dropped_tokens_are_searched_only_when_named() -> None:
    limits = problem().limits
    assert limits.optimizer_offload == limits.activation_offload == (False,)
    assert limits.cuda_graph == ("none", "partial")
    assert problem(activation_offload=(True, False)).limits.activation_offload == (True, False)


def test_spare_nodes_are_kept_out_of_the_plan() -> None:
    spec = read_spec(WORKED)
    priced_pool = price_pool(spec.cluster.pools[0], residuals=None)

    def with_spares(nodes: int) -> TrainProblem:
        stated = Reliability(device_mtbf=1e8, restart=600.0, spare_nodes=nodes)
        goal = spec.goal.model_copy(update={"reliability": stated})
        return build_problem(spec.model_copy(update={"goal": goal}), priced_pool)

    assert with_spares(2).num_devices == 48
    with pytest.raises(SpecError, match="leaves none of the 8 nodes"):
        with_spares(8)
