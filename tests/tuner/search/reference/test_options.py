import pytest

from profilers.steps.config import Recompute
from tuner.engines.capabilities import Capabilities, intersection
from tuner.errors import SpecError
from tuner.search.reference.options import RecomputeOption, options
from tuner.spec.search import Search


def _names(
    target: str = "reference", *, has_experts: bool = True, search: Search | None = None
) -> list[str]:
    actual = options(
        has_experts=has_experts,
        capabilities=intersection([target]),
        search=search or Search(),
    )
    return [option.name for option in actual]


def test_the_reference_step_runs_every_level_in_every_bin_of_the_paper() -> None:
    bins = (1, 2, 4, 8)
    assert _names() == [
        "none",
        *(f"selective/c{chunks}" for chunks in bins),
        *(f"full/c{chunks}" for chunks in bins),
    ]


def test_megatron_chunks_only_what_it_recomputes_selectively() -> None:
    actual = _names("megatron-lm")
    assert [name for name in actual if name.startswith("full")] == ["full/c1"]
    assert "selective/c8" in actual


def test_an_older_release_has_no_chunks() -> None:
    assert _names("megatron-lm-0.16") == ["none", "selective/c1", "full/c1"]


def test_a_model_without_experts_recomputes_all_or_nothing() -> None:
    assert _names(has_experts=False) == ["none", "full/c1"]


def test_the_user_s_limits_hold() -> None:
    assert _names(search=Search(recompute=(Recompute.FULL,), chunks=(3, 5))) == [
        "full/c3",
        "full/c5",
    ]
    assert _names(search=Search(chunks=(1,))) == ["none", "selective/c1", "full/c1"]


def test_nothing_left_is_an_error_that_says_what_would_do() -> None:
    with pytest.raises(SpecError, match="chunks above 1 need recompute, 1 always works"):
        _names(search=Search(recompute=(Recompute.NONE,), chunks=(2,)))


def test_a_level_that_the_target_lacks_is_not_an_option() -> None:
    lacking = Capabilities(names=("imaginary",), recompute=frozenset({Recompute.NONE}))
    assert options(has_experts=True, capabilities=lacking, search=Search()) == (
        RecomputeOption(recompute=Recompute.NONE, chunks=1),
    )
