"""Requests that are drawn, and those that cannot be."""

import numpy as np
import pytest

from tuner.simulate.serving.load import Requests, uniform_requests


def test_lengths_stay_between_the_least_and_the_nominal() -> None:
    drawn = uniform_requests(100, input_tokens=1000, output_tokens=200, least_ratio=0.8, seed=3)
    assert 800 <= drawn.input_R.min() <= drawn.input_R.max() <= 1000
    assert float(drawn.output_R.mean()) == pytest.approx(180.0, rel=0.01)


def test_the_mean_does_not_depend_on_the_seed() -> None:
    means = {
        float(
            uniform_requests(
                40, input_tokens=512, output_tokens=64, least_ratio=0.5, seed=seed
            ).input_R.mean()
        )
        for seed in range(5)
    }
    assert len(means) == 1


def test_refuses_requests_that_cannot_be() -> None:
    for inputs, outputs, arrivals in (
        ([], [], None),
        ([1], [1, 2], None),
        ([0], [1], None),
        ([1, 1], [1, 1], [1.0, 0.5]),
    ):
        with pytest.raises(ValueError, match=r"request|arrivals"):
            Requests(
                input_R=np.array(inputs, dtype=np.int64),
                output_R=np.array(outputs, dtype=np.int64),
                arrival_s_R=None if arrivals is None else np.array(arrivals),
            )
