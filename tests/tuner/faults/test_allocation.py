"""Which nodes a job runs on after losses and repairs."""

import numpy as np
import pytest

from tests.rows import Failures
from tests.tuner.faults.allocation import Allocation


def test_spare_idle_and_repaired_nodes_by_hand() -> None:
    # Four nodes and a spare; the layout of fewer nodes has two and leaves one idle.
    own = Allocation(nodes=4, spare_nodes=1, idle_nodes=1)
    own.lose([2], back_at_s=100.0)
    assert (own.allocate(10.0), own.is_full, own.places) == (False, True, [0, 1, 2, 3])
    own.lose([0], back_at_s=200.0)
    assert (own.allocate(20.0), own.is_full, own.places) == (True, False, [1, 2])
    assert own.full_at_s(20.0) == 100.0
    assert own.neighbours(2, 2) == [2, 1]
    assert (own.uses(0), own.uses(3), own.uses(1), own.uses(None)) == (False, False, True, True)
    # The idle one takes the place of another.
    own.lose([1], back_at_s=300.0)
    assert own.ready_at_s(30.0) == 30.0
    assert (own.allocate(30.0), own.places) == (False, [3, 2])
    # With one more it waits for the first that is back, which takes the first empty slot, 0.
    own.lose([3], back_at_s=400.0)
    assert own.ready_at_s(40.0) == 100.0
    assert (own.allocate(100.0), own.places) == (False, [0, 2])
    assert (own.full_at_s(100.0), own.allocate(300.0), own.is_full) == (300.0, True, True)
    assert own.places == [0, 1, 2, 3]


def test_a_job_without_another_layout_waits_until_all_nodes_are_there() -> None:
    own = Allocation(nodes=3)
    own.lose([0, 1], back_at_s=50.0)
    own.lose([2], back_at_s=70.0)
    assert own.ready_at_s(10.0) == 70.0
    with pytest.raises(ValueError, match="wait until"):
        own.allocate(60.0)
    assert not own.allocate(70.0)


def test_a_launch_never_uses_an_empty_slot_or_one_twice() -> None:
    failures = Failures()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        nodes, spare, idle = int(rng.integers(3, 9)), int(rng.integers(3)), int(rng.integers(2))
        own = Allocation(nodes=nodes, spare_nodes=spare, idle_nodes=idle)
        now_s = 0.0
        back_s: list[float] = []
        for _ in range(200):
            now_s = max(now_s + rng.exponential(10.0), own.ready_at_s(now_s))
            was_full = own.is_full
            assert own.allocate(now_s) is (own.is_full is not was_full)
            short = sum(one > now_s for one in back_s) - spare
            with failures.of(seed, now_s):
                assert own.is_full is (short <= 0)
                assert own.short(now_s) == max(0, short)
                assert len(set(own.places)) == len(own.places)
                assert len(own.places) == (nodes if own.is_full else nodes - 1 - idle)
            lost = own.places[int(rng.integers(len(own.places)))]
            back_s.append(now_s + float(rng.exponential(30.0)))
            own.lose([lost], back_at_s=back_s[-1])
            if own.ready_at_s(now_s) == now_s and not own.is_full:
                # Replaced at its place, while the others stay.
                before = list(own.places)
                own.allocate(now_s)
                with failures.of(seed, now_s, lost):
                    if not own.is_full:
                        kept = [new == old for new, old in zip(own.places, before, strict=True)]
                        assert kept.count(False) == 1
    failures.check()
