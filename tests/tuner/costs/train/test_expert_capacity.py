import numpy as np
import pytest

from tuner.costs.train.expert_capacity import kept_ratio


def test_the_closed_form_is_the_mean_of_capped_log_normal_loads() -> None:
    rng = np.random.default_rng(1)
    for num_experts, spread in ((128, 0.63), (8, 0.11)):
        loads = np.exp(spread * rng.standard_normal(400_000) - spread**2 / 2)
        for capacity in (0.5, 1.0, 1.25, 2.0, 8.0):
            kept = np.minimum(loads, capacity).mean()
            assert kept_ratio(capacity, num_experts=num_experts) == pytest.approx(kept, abs=0.005)


def test_no_more_is_kept_than_capacity_or_routing_allow() -> None:
    for capacity in (0.1, 0.9, 1.0, 3.0, 100.0):
        for num_experts in (8, 64, 256):
            assert 0.0 < kept_ratio(capacity, num_experts=num_experts) <= min(1.0, capacity) + 1e-12
