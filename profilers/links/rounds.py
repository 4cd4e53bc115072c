"""Rounds of disjoint pairs in which everyone meets everyone once.

The circle method: the first stays, the others move one place on each round, and those who face
each other meet. N members take N - 1 rounds, or N where N is odd and one sits out each time, which
is the least there can be (a member meets N - 1 others, one a round). Source: Kirkman, Cambridge
and Dublin Mathematical Journal 2, 1847.
"""

Pair = tuple[int, int]


def rounds(members: int) -> tuple[tuple[Pair, ...], ...]:
    """Pairs of every round; each pair of members once in all, the smaller one first."""
    if members < 2:
        return ()
    # An odd number gets one more, whom nobody meets.
    even = members + members % 2
    found = []
    for turn in range(even - 1):
        ring = [0, *(1 + (place + turn) % (even - 1) for place in range(even - 1))]
        faced = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
        found.append(tuple((min(pair), max(pair)) for pair in faced if max(pair) < members))
    return tuple(found)
