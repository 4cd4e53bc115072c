"""Weight syncs against published seconds of other models, paths and devices."""

from dataclasses import replace

import pytest

from tests.tuner.models import example_model
from tuner.costs.rl.trainer import num_tensors
from tuner.costs.train.columns_of import shape_of_model
from tuner.prices.weight_sync import RATES, SyncPath, offload_s, sync_s

PUBLISHED = (
    (SyncPath.PACKED, "qwen3-30b-a3b", 61e9, 50e9, 9.67),
    (SyncPath.PACKED, "qwen3-235b-a22b", 470e9, 50e9, 18.4),
    (SyncPath.BUCKETED, "qwen3-30b-a3b", 61e9, 50e9, 15.76),
    (SyncPath.BUCKETED, "qwen3-235b-a22b", 470e9, 50e9, 58.57),
    (SyncPath.CHECKPOINT_ENGINE, "qwen3-30b-a3b", 61e9, 50e9, 4.38),
    (SyncPath.CHECKPOINT_ENGINE, "qwen3-235b-a22b", 470e9, 50e9, 23.7),
)
"""NeMo-RL's pull request 3294 and verl's page on asynchronous training: seconds of one sync."""


def test_published_syncs_are_within_half() -> None:
    wrong = []
    for path, name, size, link, seconds in PUBLISHED:
        tensors = num_tensors(shape_of_model(example_model(name), mtp_layers=0))
        found = sync_s(path, weight_bytes=size, tensors=tensors, link_bytes_per_s=link)
        if not 0.67 < found / seconds < 1.5:
            wrong.append((path, name, found, seconds))
    assert not wrong


def test_experts_are_most_tensors() -> None:
    shape = shape_of_model(example_model("qwen3-30b-a3b"), mtp_layers=0)
    # 48 layers of 8 + 3 beside 3 x 128 matrices and a router, and embedding, head and norm.
    assert num_tensors(shape) == 48 * (11 + 3 * 128 + 1) + 3
    assert num_tensors(replace(shape, moe_layers=0.0, dense_layers=48.0)) == 48 * 11 + 3


def test_deltas_send_a_share() -> None:
    whole = RATES[SyncPath.BUCKETED]
    rates = RATES[SyncPath.DELTA]
    found = sync_s(SyncPath.DELTA, weight_bytes=100e9, tensors=1e4, link_bytes_per_s=50e9)
    assert found == pytest.approx(rates.start_s + 0.03 * 100e9 / (whole.link_ratio * 50e9))
    assert offload_s(11e9) == pytest.approx(4.0)
