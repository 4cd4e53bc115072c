"""Bands that hold what they promise, and widen where less is known."""

import math

import numpy as np
import pytest

from tuner.calibrate.bands import covered_ratio, error_bands
from tuner.costs.train.calibration import GENERIC_BAND, ModelKind, Regime, narrowest_band
from tuner.devices.datasheet import Generation
from tuner.prices.train.constants import GemmPrecision, Software

KEYS = ("group", "release", "generation", "family", "both")


def _regime(
    family: str,
    release: str = "",
    generation: str = "hopper",
    model_kind: ModelKind = "experts",
) -> Regime:
    return Regime(
        device="h100-sxm",
        generation=Generation(generation),
        precision=GemmPrecision.BF16,
        software=Software.MEGATRON_2025,
        family=family,
        model_kind=model_kind,
        release=release,
    )


def test_a_band_is_the_conformal_quantile_of_what_was_held_out() -> None:
    # 19 recipes off by 1, 2, ... 19 percent: ceil(20 * 0.9) = 18 of them are to be held.
    size_C = np.arange(1, 20) / 100.0
    regimes = [_regime("nemo", "26.04")] * 19
    bands = error_bands(regimes, [f"g{place}" for place in range(19)], dict.fromkeys(KEYS, size_C))
    low, high = narrowest_band(_regime("nemo", "26.04"), bands)
    assert high == pytest.approx(math.exp(0.18), abs=1e-4)
    assert low == pytest.approx(math.exp(-0.18), abs=1e-4)


def test_recipes_have_equal_weight_however_many_runs_they_have() -> None:
    # One recipe with a thousand bad runs is one of twenty.
    sizes = [0.01] * 19 + [0.9] * 1000
    groups = [f"g{place}" for place in range(19)] + ["big"] * 1000
    bands = error_bands([_regime("nemo")] * 1019, groups, dict.fromkeys(KEYS, np.array(sizes)))
    assert narrowest_band(_regime("nemo"), bands)[1] == pytest.approx(math.exp(0.01), abs=1e-4)


def test_the_less_is_known_the_wider_the_band() -> None:
    regimes = [_regime("nemo", "26.04")] * 20 + [_regime("lab", "1.0", "blackwell")] * 20
    groups = [f"g{place}" for place in range(40)]
    by = {"group": 0.05, "release": 0.1, "generation": 0.2, "family": 0.4, "both": 0.5}
    bands = error_bands(regimes, groups, {key: np.full(40, size) for key, size in by.items()})

    def high(regime: Regime) -> float:
        return math.log(narrowest_band(regime, bands)[1])

    assert high(_regime("nemo", "26.04")) == pytest.approx(0.05, abs=1e-4)
    assert high(_regime("nemo", "27.01")) == pytest.approx(0.1, abs=1e-4)
    assert high(_regime("nemo", "27.01", "blackwell")) == pytest.approx(0.2, abs=1e-4)
    assert high(_regime("new", "1.0", "blackwell")) == pytest.approx(0.4, abs=1e-4)
    assert high(_regime("new", "1.0", "cdna3")) == pytest.approx(0.5, abs=1e-4)


def test_runs_of_dense_models_make_no_band_of_models_with_experts() -> None:
    regimes = [_regime("nemo", model_kind="dense")] * 20
    groups = [f"g{place}" for place in range(20)]
    bands = error_bands(regimes, groups, dict.fromkeys(KEYS, np.full(20, 0.05)))
    assert narrowest_band(regimes[0], bands)[1] == pytest.approx(math.exp(0.05), abs=1e-4)
    assert narrowest_band(_regime("nemo"), bands) == GENERIC_BAND


def test_a_new_generation_errs_like_the_worst_that_was_held_out() -> None:
    regimes = [_regime("nemo", generation="hopper")] * 10
    regimes += [_regime("nemo", generation="blackwell")] * 90
    size_C = np.array([0.7] * 10 + [0.1] * 90)
    bands = error_bands(regimes, [f"g{place}" for place in range(100)], dict.fromkeys(KEYS, size_C))
    known = narrowest_band(_regime("nemo", generation="blackwell"), bands)
    new = narrowest_band(_regime("nemo", generation="ampere"), bands)
    assert (known[1], new[1]) == pytest.approx((math.exp(0.1), math.exp(0.7)), abs=1e-3)


def test_too_few_recipes_make_no_band() -> None:
    bands = error_bands([_regime("nemo")] * 5, list("abcde"), dict.fromkeys(KEYS, np.zeros(5)))
    assert bands == ()
    assert narrowest_band(_regime("nemo"), bands) == GENERIC_BAND


def test_coverage_is_counted_by_recipe() -> None:
    residual_C = np.array([0.0, 0.5, np.nan, 0.05])
    regimes = [_regime("nemo")] * 20
    bands = error_bands(
        regimes, [f"g{i}" for i in range(20)], dict.fromkeys(KEYS, np.full(20, 0.1))
    )
    shares = covered_ratio(regimes[:4], ["a", "a", "b", "c"], residual_C, bands)
    assert shares == {"a": 0.5, "c": 1.0}
