"""Sizes that are offered are enough as they are printed."""

import random

from tuner.search.reference.memory_offer import MemoryOffer, memory_words, printed_bytes
from tuner.units import format_bytes

UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def test_the_printed_size_is_enough_and_little_more() -> None:
    draw, wrong = random.Random(5), []
    for _ in range(2000):
        needed = 2.0 ** draw.uniform(20.0, 43.0)
        size, unit = format_bytes(printed_bytes(needed)).split()
        printed = float(size) * UNITS[unit]
        if not needed * (1.0 - 1e-9) <= printed <= 1.02 * needed:
            wrong.append((needed, size, unit))
    assert not wrong


def test_pools_are_named_where_there_are_several() -> None:
    one = MemoryOffer(90.1 * 2**30, 80 * 2**30)
    assert memory_words([one]) == "90.1 GiB per device instead of 80.0 GiB"
    two = [one._replace(pool="a"), one._replace(pool="b", needed_bytes=100.01 * 2**30)]
    assert memory_words(two) == (
        "90.1 GiB per device of pool 'a' instead of 80.0 GiB; "
        "101 GiB per device of pool 'b' instead of 80.0 GiB"
    )
