from solvers.instances.problem import InstanceObjective
from tests.benchmarks.instances import solved
from tests.rows import each_row


@each_row("max_kinds", [None, 1])
def test_a_mixed_pool_is_solved_to_optimality(max_kinds: int | None) -> None:
    one = solved(InstanceObjective.COST, max_kinds=max_kinds, seed=0, time_limit_s=100.0)
    assert (one["status"], one["columns"]) == ("optimal", 306)
    assert one["gap_ratio"] <= 1e-6
