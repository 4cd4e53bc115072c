"""Bands of ratios from pairs of runs of one setting."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tuner.backtest.columns import PublishedRun, build_run
from tuner.backtest.rows import read_rows
from tuner.calibrate.ratio_bands import (
    PairClass,
    Pairs,
    band_width,
    build_pairs,
    build_ratio_bands,
    is_covered,
    pair_weights,
)

RUNS = Path(__file__).parents[1] / "backtest" / "runs.csv"
KIND = PairClass(generation="hopper", has_experts=True, same_kernels=False)
OTHER = PairClass(generation="ampere", has_experts=False, same_kernels=False)


def _pairs(errors: list[list[float]], kinds: list[PairClass], *, apart: bool = True) -> Pairs:
    """Pairs of one setting per list, each of two distinct recipes unless stated."""
    rows = sorted(
        (error, number, number if not apart else 100 * number + place)
        for number, own in enumerate(errors)
        for place, error in enumerate(own)
    )
    distinct = tuple(dict.fromkeys(kinds))
    recipes = {code: place for place, code in enumerate(sorted({row[2] for row in rows}))}
    return Pairs(
        kinds=distinct,
        settings=tuple(f"setting {number}" for number in range(len(errors))),
        error_P=np.array([row[0] for row in rows]),
        kind_P=np.array([distinct.index(kinds[row[1]]) for row in rows], dtype=np.intp),
        setting_P=np.array([row[1] for row in rows], dtype=np.intp),
        recipes_P=np.array([recipes[row[2]] for row in rows], dtype=np.intp),
    )


def test_a_setting_weighs_the_root_of_its_pairs_of_recipes() -> None:
    pairs = _pairs([[0.1, 0.2, 0.3, 0.4], [0.5]], [KIND, KIND])
    weight = pair_weights(pairs)
    by_setting = [weight[pairs.setting_P == number].sum() for number in (0, 1)]
    assert by_setting == pytest.approx([2.0, 1.0])
    # Four pairs of the same two recipes are one piece of evidence.
    again = _pairs([[0.1, 0.2, 0.3, 0.4], [0.5]], [KIND, KIND], apart=False)
    assert pair_weights(again) == pytest.approx([0.25] * 4 + [1.0])


def test_too_few_settings_give_no_band() -> None:
    assert band_width(_pairs([[0.1]] * 11, [KIND] * 11), KIND) is None
    assert build_ratio_bands(_pairs([[0.1]] * 11, [KIND] * 11)) is None
    assert build_ratio_bands(_pairs([[0.1]] * 12, [KIND] * 12)) is not None


def test_the_band_holds_the_stated_share_of_settings_and_of_one_more() -> None:
    pairs = _pairs([[0.01 * number] for number in range(1, 21)], [KIND] * 20)
    # ceil((20 + 1) 0.8) = 17 of 20.
    assert band_width(pairs, KIND) == pytest.approx(0.17)


def test_a_kind_with_few_settings_is_drawn_to_the_others_and_one_with_many_is_not() -> None:
    def size(num_own: int) -> float:
        kinds = [KIND] * num_own + [OTHER] * 40
        return present(band_width(_pairs([[0.5]] * num_own + [[0.1]] * 40, kinds), KIND))

    assert size(1) == 0.1
    assert size(40) == 0.5


def test_coverage_is_of_settings_that_the_band_was_made_without() -> None:
    pairs = _pairs([[0.1]] * 19 + [[0.9, 0.95]], [KIND] * 20)
    inside = is_covered(pairs)
    assert inside[pairs.setting_P != 19].all()
    assert not inside[pairs.setting_P == 19].any()
    bands = present(build_ratio_bands(pairs))
    # 19 settings of weight 1 of 19 + sqrt(2)
    assert bands.covered_ratio == pytest.approx(19 / (19 + math.sqrt(2)))


def test_runs_pair_inside_one_setting_only() -> None:
    (base,) = (row for row in read_rows(RUNS) if row.id == "dense-a")

    def run(group: str, model: str = "Small", **numbers: float) -> PublishedRun:
        texts = {**base.texts, "id": group, "group": group, "model": model}
        return build_run(replace(base, texts=texts, numbers={**base.numbers, **numbers}))

    plain, wider, elsewhere = run("a"), run("b", mbs=4.0), run("c", model="Other")
    runs = (plain, plain, wider, elsewhere)
    pairs = build_pairs(runs, np.array([0.1, 0.12, -0.2, 9.0]))
    assert pairs.error_P == pytest.approx([0.02, 0.3, 0.32])
    assert [pairs.kinds[kind].same_kernels for kind in pairs.kind_P] == [True, False, False]
    assert len(set(pairs.recipes_P)) == 2
    assert len(build_pairs(runs, np.full(len(runs), np.nan)).error_P) == 0
