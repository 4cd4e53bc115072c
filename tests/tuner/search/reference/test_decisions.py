from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from solvers.layout.problem import Layout
from tests.rows import each_row
from tuner.costs.reference.workload import StepDegrees
from tuner.search.reference.decisions import decision, decode, degrees_of, layers_of, options_of
from tuner.search.reference.options import RecomputeOption

Cut = Callable[..., StepDegrees]

WAYS = (
    RecomputeOption(recompute=Recompute.NONE, chunks=1),
    RecomputeOption(recompute=Recompute.SELECTIVE, chunks=4),
    RecomputeOption(recompute=Recompute.FULL, chunks=8),
)


@given(
    tensor=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 8]),
    pipeline=st.integers(1, 3),
    virtual=st.integers(1, 3),
    draws=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_a_decision_gives_back_what_it_was_made_of(
    cut: Cut, tensor: int, data: int, pipeline: int, virtual: int, draws: st.DataObject
) -> None:
    stages = pipeline * virtual
    expert = draws.draw(st.sampled_from([e for e in (1, 2, 4, 8) if tensor * data % e == 0]))
    degrees = cut(
        tensor=tensor,
        data=data,
        pipeline=pipeline,
        virtual_pipeline=virtual,
        expert=expert,
        ranks_per_node=4 if expert == 8 else None,
    )
    layers = tuple(draws.draw(st.lists(st.integers(0, 5), min_size=stages, max_size=stages)))
    ways = draws.draw(st.lists(st.sampled_from(WAYS), min_size=stages, max_size=stages))
    made = decision(degrees, layers=layers, options=ways)
    assert degrees_of(made, ranks_per_node=4) == degrees
    assert (made.dispatcher == "hierarchical") == (degrees.ranks_per_node is not None)
    assert options_of(made) == tuple(ways)
    assert [len(held) for held in layers_of(made)] == list(layers)
    assert [layer for held in layers_of(made) for layer in held] == list(range(sum(layers)))
    assert made.num_devices == degrees.world
    assert made.sequence_parallel == (tensor > 1)


def test_a_solved_layout_adds_its_runs_up(cut: Cut) -> None:
    made = decode(cut(pipeline=2), Layout(layers_SR=((2, 1), (0, 3)), option_S=(2, 0)), WAYS)
    assert made.pipeline_layout == (3, 3)
    assert made.stage_recompute == (Recompute.FULL, Recompute.NONE)
    assert made.chunks == (8, 1)


@each_row(
    ("ways", "strongest", "modules"),
    [
        ((0, 0), Recompute.NONE, ()),
        ((0, 1), Recompute.SELECTIVE, ("moe",)),
        ((2, 1), Recompute.FULL, ()),
    ],
)
def test_the_strongest_level_speaks_for_all_stages(
    cut: Cut, ways: tuple[int, int], strongest: Recompute, modules: tuple[str, ...]
) -> None:
    made = decision(cut(pipeline=2), layers=(2, 2), options=[WAYS[way] for way in ways])
    assert (made.recompute, made.recompute_modules) == (strongest, modules)


def test_hierarchical_dispatch_is_over_nodes_that_must_be_known(cut: Cut) -> None:
    made = decision(cut(data=4, expert=4, ranks_per_node=2), layers=(4,), options=WAYS[:1])
    with pytest.raises(ValueError, match="ranks on a node"):
        degrees_of(made)
