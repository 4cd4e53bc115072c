import numpy as np
import pytest

from tests.rows import each_row
from tuner.prices.serve.activated_experts import most_loaded_activated


@each_row(("devices", "tokens"), [(8, 16), (8, 64), (16, 16), (4, 2)])
def test_the_most_loaded_device_reads_what_uniform_routing_does(devices: int, tokens: int) -> None:
    rng = np.random.default_rng(5)
    experts, top_k, draws = 160, 6, 300
    slots = experts // devices
    busiest = []
    for _ in range(draws):
        chosen = rng.random((tokens, experts)).argpartition(top_k, axis=1)[:, :top_k]
        read = np.zeros(experts, dtype=bool)
        read[chosen] = True
        busiest.append(read.reshape(devices, slots).sum(axis=1).max())
    near = most_loaded_activated(
        slots=slots, experts=experts, top_k=top_k, tokens_Q=np.array([tokens]), devices=devices
    )
    assert near[0] == pytest.approx(np.mean(busiest), rel=0.05)


def test_the_most_loaded_device_of_many_tokens_reads_all_its_experts() -> None:
    tokens_Q = np.geomspace(1.0, 1e5, 40)
    read_Q = most_loaded_activated(slots=20, experts=160, top_k=6, tokens_Q=tokens_Q, devices=8)
    assert np.all(np.diff(read_Q) >= -1e-9)
    assert read_Q[-1] == pytest.approx(20.0)
    all_Q = most_loaded_activated(slots=4, experts=8, top_k=8, tokens_Q=np.ones(2), devices=2)
    assert all_Q.tolist() == [4.0, 4.0]
    dense_Q = most_loaded_activated(slots=8, experts=8, top_k=2, tokens_Q=np.ones(1), devices=1)
    assert dense_Q[0] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="devices 0"):
        most_loaded_activated(slots=4, experts=8, top_k=2, tokens_Q=np.ones(1), devices=0)


@each_row(
    ("changes", "complaint"),
    [({"top_k": 9}, "top_k 9"), ({"slots": 0}, "slots 0"), ({"batch_tokens": 0.0}, "batch_tokens")],
)
def test_impossible_routing_is_refused(changes: dict[str, int], complaint: str) -> None:
    given = {"slots": 2, "experts": 8, "top_k": 2, "batch_tokens": 4} | changes
    tokens_Q = np.array([given.pop("batch_tokens")], dtype=np.float64)
    with pytest.raises(ValueError, match=complaint):
        most_loaded_activated(**given, tokens_Q=tokens_Q, devices=1)
