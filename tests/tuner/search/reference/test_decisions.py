from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from solvers.layout.problem import Layout
from tests.rows import each_row
from tuner.catalog.manifest import Capabilities
from tuner.costs.reference.workload import StepDegrees
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.search.reference.decisions import (
    RecomputeOption,
    decision,
    decode,
    degrees_of,
    layers_of,
    options,
    options_of,
)
from tuner.spec.search import Search

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


def _names(
    target: str = "reference", *, has_experts: bool = True, search: Search | None = None
) -> list[str]:
    actual = options(
        has_experts=has_experts,
        capabilities=programs([target]).capabilities(),
        search=search or Search(),
    )
    return [option.name for option in actual]


SELECTIVE = [f"selective/c{chunks}" for chunks in (1, 2, 4, 8)]
"""Every bin of the paper."""


@each_row(
    ("stated", "names"),
    [
        ({}, ["none", *SELECTIVE, *(f"full/c{chunks}" for chunks in (1, 2, 4, 8))]),
        # Megatron-LM chunks only what it recomputes selectively, an older release nothing.
        ({"target": "megatron-lm"}, ["none", *SELECTIVE, "full/c1"]),
        ({"target": "megatron-lm-0.16"}, ["none", "selective/c1", "full/c1"]),
        ({"has_experts": False}, ["none", "full/c1"]),
        (
            {"search": Search(recompute=(Recompute.FULL,), chunks=(3, 5))},
            ["full/c3", "full/c5"],
        ),
        ({"search": Search(chunks=(1,))}, ["none", "selective/c1", "full/c1"]),
    ],
)
def test_levels_and_chunks_are_those_of_target_model_and_limits(
    stated: dict[str, Any], names: list[str]
) -> None:
    assert _names(**stated) == names


def test_nothing_left_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(SpecError, match="chunks above 1 need recompute, 1 always works"):
        _names(search=Search(recompute=(Recompute.NONE,), chunks=(2,)))


def test_a_level_that_the_target_lacks_is_not_an_option() -> None:
    lacking = Capabilities(names=("imaginary",), recompute=frozenset({Recompute.NONE}))
    assert options(has_experts=True, capabilities=lacking, search=Search()) == (
        RecomputeOption(recompute=Recompute.NONE, chunks=1),
    )
