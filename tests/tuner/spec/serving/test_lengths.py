"""Laws of lengths: samples agree with the closed forms, and what is no law is refused."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.rows import each_row
from tuner.spec.serving.lengths import (
    LengthKind,
    LengthLaw,
    mean_tokens,
    quantile_tokens,
    sample_tokens,
)

CHAT = LengthLaw(kind=LengthKind.LOGNORMAL, mean=1000.0, cv=1.0)
REASONING = LengthLaw(
    kind=LengthKind.PARETO_TAILED, mean=4000.0, cv=1.0, tail_ratio=0.05, tail_index=2.5
)
LAWS = [
    LengthLaw(kind=LengthKind.FIXED, mean=7),
    LengthLaw(kind=LengthKind.UNIFORM, low=3, high=12),
    LengthLaw(kind=LengthKind.UNIFORM, low=3, high=12, most=8),
    CHAT,
    LengthLaw(kind=LengthKind.LOGNORMAL, mean=1000.0, cv=2.0, most=1500),
    REASONING,
    LengthLaw(**{**REASONING.model_dump(), "most": 16384}),
    LengthLaw(**{**REASONING.model_dump(), "most": 2000}),
    LengthLaw(kind=LengthKind.EMPIRICAL, values=(5, 1, 9), weights=(1.0, 2.0, 1.0)),
]


def drawn(law: LengthLaw, count: int = 200_000, seed: int = 0) -> np.ndarray:
    return sample_tokens(law, count=count, rng=np.random.default_rng(seed))


@each_row("law", LAWS)
def test_samples_have_the_mean_and_the_quantiles_of_the_law(law: LengthLaw) -> None:
    sample = drawn(law)
    assert sample.mean() == pytest.approx(mean_tokens(law), rel=0.02)
    for ratio in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(sample, ratio, method="inverted_cdf") == pytest.approx(
            quantile_tokens(law, ratio=ratio), rel=0.04, abs=0.5
        )
    assert sample.min() >= 1
    assert sample.max() <= law.most


def test_means_and_quantiles_by_hand() -> None:
    uniform = LengthLaw(kind=LengthKind.UNIFORM, low=1, high=4)
    assert mean_tokens(uniform) == 2.5
    assert [quantile_tokens(uniform, ratio=ratio) for ratio in (0.25, 0.26, 0.99)] == [1, 2, 4]
    seen = LengthLaw(kind=LengthKind.EMPIRICAL, values=(9, 1), weights=(1.0, 3.0))
    assert mean_tokens(seen) == 3.0
    assert quantile_tokens(seen, ratio=0.75) == 1
    assert quantile_tokens(seen, ratio=0.76) == 9
    # The median of a lognormal is its mean over sqrt(1 + c^2).
    assert quantile_tokens(CHAT, ratio=0.5) == pytest.approx(1000.0 / math.sqrt(2.0))
    # The tail begins at the body's 95 % quantile and thins out by 2.5 decades per decade.
    start = quantile_tokens(REASONING, ratio=0.95)
    assert quantile_tokens(REASONING, ratio=0.995) == pytest.approx(start * 10 ** (1 / 2.5))


def test_equal_seeds_draw_equal_lengths_and_the_tail_long_ones_more_often() -> None:
    body = LengthLaw(kind=LengthKind.LOGNORMAL, mean=4000.0, cv=1.0)
    assert quantile_tokens(REASONING, ratio=0.9999) > 1.5 * quantile_tokens(body, ratio=0.9999)
    assert quantile_tokens(REASONING, ratio=0.9) == quantile_tokens(body, ratio=0.9)
    for law in LAWS:
        assert np.array_equal(drawn(law, 100, 3), drawn(law, 100, 3))
    assert not np.array_equal(drawn(CHAT, 100, 3), drawn(CHAT, 100, 4))


@given(
    mean=st.floats(1.0, 1e5),
    cv=st.floats(0.05, 5.0),
    tail_ratio=st.floats(0.001, 0.5),
    tail_index=st.floats(1.05, 10.0),
    most=st.integers(1, 2**21),
)
@settings(max_examples=80, deadline=None)
def test_quantiles_rise_and_the_mean_lies_below_the_cut(
    mean: float, cv: float, tail_ratio: float, tail_index: float, most: int
) -> None:
    law = LengthLaw(
        kind=LengthKind.PARETO_TAILED,
        mean=mean,
        cv=cv,
        tail_ratio=tail_ratio,
        tail_index=tail_index,
        most=most,
    )
    length = [quantile_tokens(law, ratio=ratio) for ratio in (0.01, 0.3, 0.5, 0.7, 0.99, 0.9999)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(length))
    assert 0.0 < mean_tokens(law) <= most * (1.0 + 1e-9)


@each_row(
    ("fields", "said"),
    [
        ({"kind": "lognormal", "mean": 5}, "lognormal lengths need 'cv'; write {kind: lognormal"),
        ({"kind": "fixed", "mean": 5, "cv": 1}, "fixed lengths have no 'cv'"),
        ({"kind": "uniform", "low": 5, "high": 4}, "low 5 exceeds high 4"),
        ({"kind": "empirical", "values": [1, 2], "weights": [1]}, "1 weights for 2 values"),
        ({"kind": "zipf"}, "zipf"),
        ({"kind": "fixed", "mean": 0}, "mean"),
        (
            {"kind": "pareto_tailed", "mean": 5, "cv": 1, "tail_ratio": 0.1, "tail_index": 1},
            "tail_index",
        ),
    ],
)
def test_what_is_no_law_is_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said.replace("{", r"\{")):
        LengthLaw.model_validate(fields)


@each_row("ratio", [0.0, 1.0, -0.1, math.nan])
def test_a_quantile_outside_the_open_interval_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        quantile_tokens(CHAT, ratio=ratio)
