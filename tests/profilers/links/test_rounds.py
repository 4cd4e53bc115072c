"""Rounds in which everyone meets everyone."""

import itertools

from profilers.links.rounds import rounds
from tests.rows import each_row


@each_row("members", [2, 3, 4, 5, 8, 9, 16, 33, 64])
def test_every_pair_occurs_once_in_the_fewest_rounds(members: int) -> None:
    schedule = rounds(members)
    assert len(schedule) == (members - 1 if members % 2 == 0 else members)
    pairs = [pair for each in schedule for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(members), 2))


@each_row("members", [4, 7, 64])
def test_no_member_is_in_two_pairs_of_a_round(members: int) -> None:
    for each in rounds(members):
        present = [member for pair in each for member in pair]
        assert len(present) == len(set(present)) == 2 * (members // 2)


def test_a_single_member_has_no_rounds() -> None:
    assert rounds(1) == ()
