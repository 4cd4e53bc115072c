from tests.benchmarks import placement_methods


def test_small_cases_are_placed_by_every_method() -> None:
    lines = list(placement_methods.balanced((8, 4, 2), time_limit_s=1.0))
    assert [line.split(": ")[1].split()[0] for line in lines] == ["local_search", "cp_sat"]
    assert all("32 whole numbers" in line and "above its bound" in line for line in lines)


def test_clusters_of_two_ranks_are_ordered() -> None:
    assert "32 pairings: optimal" in placement_methods.named((2, 3), time_limit_s=5.0)
