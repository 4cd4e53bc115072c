"""Optuna reaches the best measured settings of vLLM in fewer launches than the model's order."""

from tests.benchmarks.steering import noise, regrets, vllm_table

LAUNCHES = 6


def test_the_prior_saves_launches_on_measured_settings() -> None:
    table = vllm_table()
    assert len(table.points) >= 60
    assert min(map(len, table.repeats)) >= 3
    after = {
        name: regrets(table, name, seeds=24, launches=LAUNCHES)
        for name in ("random", "predicted", "prior")
    }
    spread = noise(table)
    assert 0.01 < spread < 0.2
    assert after["prior"][-1] <= 0.5 * after["random"][-1]
    for at in range(LAUNCHES):
        assert after["prior"][at] <= after["predicted"][at] + spread
    # The prior learns something: without it the sixth launch is not better than the first.
    assert after["prior"][-1] < 0.7 * after["prior"][0]
