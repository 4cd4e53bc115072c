"""Rounds of disjoint pairs in which every member is paired with every other one once.

The circle method: the first member stays, the others move one place on each round, and members that
face each other form a pair. N members take N - 1 rounds, or N if N is odd and one sits out each
time, which is the least possible (a member has N - 1 partners, one a round). Source: Kirkman,
Cambridge and Dublin Mathematical Journal 2, 1847.
"""

Pair = tuple[int, int]


def rounds(members: int) -> tuple[tuple[Pair, ...], ...]:
    """Pairs of every round; each pair of members once in all, the smaller one first."""
    if members < 2:
        return ()
    # An odd number gets a dummy, whose partner sits out.
    even = members + members % 2
    schedule = []
    for turn in range(even - 1):
        ring = [0, *(1 + (place + turn) % (even - 1) for place in range(even - 1))]
        faced = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
        schedule.append(tuple((min(pair), max(pair)) for pair in faced if max(pair) < members))
    return tuple(schedule)
