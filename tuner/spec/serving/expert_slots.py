"""Redundant experts that give every rank of an instance equally many slots.

    E experts    C redundant ones    R expert ranks    (E + C) / R slots of a rank, a whole number

SGLang asserts it (0.5.23, eplb/expert_location.py, `_init_common`), vLLM raises under its expert
load balancer (0.33.0, fused_moe/layer.py), TensorRT-LLM where a load balancer has slots
(modules/fused_moe/interface.py).
"""


def fewest_redundant(experts: int, ranks: int) -> int:
    """Return the fewest redundant experts that give every rank equally many slots."""
    return -experts % ranks


def are_even(experts: int, redundant: int, ranks: int) -> bool:
    """Say whether every rank gets equally many slots."""
    return (experts + redundant) % ranks == 0


def even_counts(experts: int, redundant: int, ranks: int) -> tuple[int, ...]:
    """Return the nearest legal counts of redundant experts, below and above."""
    least = fewest_redundant(experts, ranks)
    below = redundant - (redundant - least) % ranks
    return tuple(dict.fromkeys(max(count, least) for count in (below, below + ranks)))


def even_ranks(slots: int, ranks: int) -> tuple[int, ...]:
    """Return the nearest legal numbers of ranks, below and above."""
    small = [size for size in range(1, int(slots**0.5) + 1) if slots % size == 0]
    sizes = {*small, *(slots // size for size in small)}
    below = max((size for size in sizes if size <= ranks), default=None)
    above = min((size for size in sizes if size >= ranks), default=None)
    return tuple(dict.fromkeys(size for size in (below, above) if size is not None))
