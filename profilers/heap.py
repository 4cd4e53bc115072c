"""Set what the C library does with freed blocks: keep them for speed, or return them at once.

glibc returns large blocks to the kernel when they are freed and faults every page in anew at the
next allocation. A training step allocates and frees the same large blocks every micro-batch: on a
processor that cost 2 to 13 % of a step and most of its noise. Ranks that measure and ranks that
train both call `keep_heap` first, so that a profile and a step run on the same machine.

Kept blocks get fragmented: PyTorch asks for aligned blocks, which glibc before 2.38 cuts out of
larger ones, so that a freed block is too small for the next one of its size (sourceware bug 14581).
The heap of a step came to 1.5 times its live memory. Where bytes are measured instead of seconds,
`map_blocks` gives every large block a mapping of its own, which is freed with the block: nothing is
wasted but the rest of a page, and a step takes up to twice as long.

Not covered: other C libraries, and accelerators, whose allocators cache by themselves.
"""

import ctypes
from collections.abc import Iterable

# malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8

NEVER_TRIM = 2**31 - 1
TOP_PAD_BYTES = 64 * 2**20

MAPPED_BYTES = 64 * 2**10
"""Blocks from here on get mappings of their own; smaller ones are mostly objects of Python."""
MOST_MAPPINGS = 2**15
"""Half of what Linux allows a process (vm.max_map_count, 65530)."""


def keep_heap() -> bool:
    """Make the allocator keep freed blocks; false if it cannot be set."""
    return _set_options(
        ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES)),
    )


def map_blocks() -> bool:
    """Make the allocator map large blocks one by one; false if it cannot be set.

    One arena serves all threads, because every further one reserves unused addresses.
    """
    return _set_options(
        (
            (M_ARENA_MAX, 1),
            (M_MMAP_THRESHOLD, MAPPED_BYTES),
            (M_MMAP_MAX, MOST_MAPPINGS),
            (M_TRIM_THRESHOLD, MAPPED_BYTES),
            (M_TOP_PAD, MAPPED_BYTES),
        ),
    )


def _set_options(settings: Iterable[tuple[int, int]]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(setting, value) == 1 for setting, value in settings)
