from tests.benchmarks.strategy_search import question_of, searched


def test_a_space_of_16_devices_is_searched_to_a_certificate() -> None:
    _, one = searched(question_of("qwen3-30b-a3b", "h100-sxm", nodes=2, batch=64))
    assert one["status"] in ("optimal", "feasible")
    assert 0.0 <= one["gap_ratio"] <= 0.01
    assert one["decisions"] > 1e6
