from tests.benchmarks import placement_methods


def test_clusters_of_two_ranks_are_ordered() -> None:
    assert "32 pairings: optimal" in placement_methods.named((2, 3), time_limit_s=5.0)
