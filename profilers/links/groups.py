"""Every group shape that the ranks allow.

A shape is (ranks, stride): groups of `ranks` processes that lie `stride` apart. Blocks of
ranks * stride consecutive ranks hold `stride` interleaved groups each, and the blocks tile the
world; so every rank is in exactly one group of every shape, and all groups of a shape can
communicate at the same time, as the groups of one kind of parallelism do.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Groups of `ranks` processes that lie `stride` apart."""

    ranks: int
    stride: int

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.stride < 1:
            raise ValueError(f"a group of {self.ranks} ranks {self.stride} apart has no links")


def shapes(world: int) -> tuple[Shape, ...]:
    """List the shapes of a world, the smallest groups and nearest members first."""
    return tuple(
        Shape(ranks=ranks, stride=stride)
        for ranks in range(2, world + 1)
        for stride in range(1, world // ranks + 1)
        if world % (ranks * stride) == 0
    )


def members(shape: Shape, *, world: int) -> tuple[tuple[int, ...], ...]:
    """List the groups of a shape; together they hold every rank once.

    Raises:
        ValueError: the shape does not tile the world.
    """
    block = shape.ranks * shape.stride
    if world % block:
        raise ValueError(f"{shape.ranks} ranks {shape.stride} apart do not tile {world} ranks")
    return tuple(
        tuple(start + offset + place * shape.stride for place in range(shape.ranks))
        for start in range(0, world, block)
        for offset in range(shape.stride)
    )
