from typing import Any

import pytest

from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.catalog.manifest import Capabilities
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.search.reference.options import RecomputeOption, options
from tuner.spec.search import Search


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
