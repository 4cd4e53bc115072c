"""Published depths of drafting: the chosen depth is as good as the measured best at every load."""

from tests.benchmarks.draft_depths import curves, judged


def test_the_chosen_depth_is_the_measured_best_or_beside_it() -> None:
    found = curves("instructcoder")
    assert len(found) == 9
    for by_depth in found.values():
        steps, cost = judged(by_depth)
        assert steps <= 1
        assert cost < 1.05
        assert all(0.5 < predicted / measured < 1.7 for measured, predicted in by_depth.values())
    # The best depth falls with the load, in both.
    single, busy = (found["qwen3-32b-eagle3-h100-instructcoder", count] for count in (1, 128))
    for column in (0, 1):
        depth, shallow = (
            min(by_depth, key=lambda depth, column=column: by_depth[depth][column])  # type: ignore[misc]
            for by_depth in (single, busy)
        )
        assert (depth, shallow) == (4, 2)
