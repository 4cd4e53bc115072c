import numpy as np

from profilers.routing.recording import Recording
from tests.benchmarks.recording_length import floors, lengths, measured

PASSES, LAYERS, EXPERTS = 64, 2, 64


def recording_of(count_PLE: np.ndarray) -> Recording:
    return Recording(
        model="", workload="w", layer_ids=(0, 1), top_k=8, count_PLE=count_PLE.astype(np.int64)
    )


def drawn(*, copies_at_once: int, drift: float = 0.0) -> Recording:
    """Passes of 4,096 copies a layer, constant within blocks, of drifting traffic."""
    rng = np.random.default_rng(5)
    share_LE = rng.dirichlet(np.ones(EXPERTS), size=LAYERS)
    moved_LE = rng.permuted(share_LE, axis=1)
    passes = []
    for number in range(PASSES):
        part = drift * number / PASSES
        share = share_LE * (1 - part) + moved_LE * part
        passes.append(rng.multinomial(4096 // copies_at_once, share) * copies_at_once)
    return recording_of(np.array(passes))


def test_lengths_are_halved() -> None:
    assert list(lengths(64)) == [64, 32, 16, 8]


def test_independent_copies_differ_as_the_closed_form_says() -> None:
    recording = drawn(copies_at_once=1)
    for length in lengths(PASSES):
        assert 0.8 < measured(recording, length)["effect"] < 1.25
    whole, quarter = (measured(recording, length)["apart"] for length in (64, 16))
    assert 1.6 < quarter / whole < 2.5


def test_copies_that_come_together_are_worth_fewer_at_every_length() -> None:
    recording = drawn(copies_at_once=16)
    for length in lengths(PASSES):
        assert 11.0 < measured(recording, length)["effect"] < 22.0


def test_drifting_traffic_is_distinguished_from_noise() -> None:
    for drift, least, most in ((0.0, 0.8, 1.25), (1.0, 3.0, 100.0)):
        result = measured(drawn(copies_at_once=1, drift=drift), PASSES)
        assert least < result["apart"] / result["by lot"] < most, drift


def test_the_floor_of_a_longer_recording_is_lower() -> None:
    recording = drawn(copies_at_once=16)
    (whole,) = floors(recording, PASSES, 8, 9, blocks=1, seconds=1.0)
    short = floors(recording, 8, 8, 9, blocks=2, seconds=1.0)
    assert 1.0 < whole < min(short)
