"""Experts in copies on expert devices, by recorded loads."""

import numpy as np
import numpy.typing as npt
import pytest

from tuner.costs.serve.afd_step import uniform_activated
from tuner.costs.serve.decoder import Experts
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.search.serve.replicas import ReplicaCounts

EXPERTS = Experts(num=160, top_k=6, ffn=1536)
TOKENS_Q = np.array([8.0, 16.0, 64.0, 256.0])
DEVICES = 8


def loads(share_E: npt.NDArray[np.float64]) -> ExpertLoads:
    return ExpertLoads(share_LE=np.tile(share_E / share_E.sum(), (2, 1)), top_k=6)


ZIPF = loads(1.0 / np.arange(1.0, 161.0))
EVEN = loads(np.ones(160))


def test_even_loads_without_copies_are_counted_as_under_uniform_routing() -> None:
    counts = ReplicaCounts(loads=EVEN, slots=20)
    expected_Q = uniform_activated(EXPERTS, TOKENS_Q, DEVICES)
    assert counts(EXPERTS, TOKENS_Q, DEVICES).tolist() == pytest.approx(
        expected_Q.tolist(), rel=0.12
    )


def test_copies_lower_what_the_most_loaded_device_reads() -> None:
    # Janus' own case, 160 experts on 8 devices of 27 slots, gains 1.4 to 2.6 experts by choosing
    # among copies.
    single = ReplicaCounts(loads=ZIPF, slots=20)(EXPERTS, TOKENS_Q, DEVICES)
    copied = ReplicaCounts(loads=ZIPF, slots=27)(EXPERTS, TOKENS_Q, DEVICES)
    assert (copied < single).all()


def test_no_device_reads_less_than_its_part_of_all() -> None:
    counts = ReplicaCounts(loads=ZIPF, slots=27)
    reach_E = np.minimum(6.0 * ZIPF.share_LE[0], 1.0)
    for tokens, read in zip(TOKENS_Q, counts(EXPERTS, TOKENS_Q, DEVICES), strict=True):
        distinct = float((1.0 - (1.0 - reach_E) ** tokens).sum())
        assert 0.9 * distinct / DEVICES <= read <= 27.0


def test_every_slot_holds_a_copy_and_loaded_experts_have_the_most() -> None:
    placed = ReplicaCounts(loads=ZIPF, slots=27).placement(DEVICES).expert_LS
    assert placed.shape == (2, DEVICES * 27)
    copies_E = np.bincount(placed[0], minlength=160)
    assert copies_E.min() == 1
    assert copies_E[0] == copies_E.max() > 1
