"""Counts that make experts even over ranks, against a search over all of them."""

from tuner.spec.serving.expert_slots import are_even, even_counts, even_ranks, fewest_redundant


def test_sglangs_deployment_of_256_experts_on_72_ranks() -> None:
    # Four slots a rank: 288 - 256.
    assert fewest_redundant(256, 72) == 32
    assert are_even(256, 32, 72)
    assert even_counts(256, 16, 72) == (32,)
    assert even_counts(256, 40, 72) == (32, 104)
    assert even_ranks(256, 72) == (64, 128)


def test_named_counts_are_the_nearest_that_are_even() -> None:
    for experts in (8, 60, 64, 256):
        for ranks in (2, 3, 12, 24, 72):
            even = [
                count for count in range(3 * ranks + experts) if are_even(experts, count, ranks)
            ]
            assert fewest_redundant(experts, ranks) == even[0]
            for wanted in range(2 * ranks):
                below = [count for count in even if count <= wanted]
                above = [count for count in even if count > wanted]
                counts = (below[-1], above[0]) if below else (above[0],)
                assert even_counts(experts, wanted, ranks) == counts, (experts, ranks, wanted)
            sizes = [size for size in range(1, experts + 1) if experts % size == 0]
            assert set(even_ranks(experts, ranks)) == {
                *[size for size in sizes if size <= ranks][-1:],
                *[size for size in sizes if size >= ranks][:1],
            }
