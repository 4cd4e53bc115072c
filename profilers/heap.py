"""Keep freed host memory in the process, so that time does not go into asking for it again.

glibc hands large blocks back to the kernel when they are freed and faults every page in anew at the
next allocation. A training step allocates and frees the same large blocks every micro-batch: on a
processor that cost 2 to 13 % of a step and most of its noise. Ranks that measure and ranks that
train both call this first, so that a profile and a step see the same machine.

Not covered: other C libraries, and accelerators, whose allocators cache by themselves.
"""

import ctypes

# malloc.h
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_MAX = -4

NEVER_TRIM = 2**31 - 1
TOP_PAD_BYTES = 64 * 2**20


def keep_heap() -> bool:
    """Tell the allocator to keep what is freed; whether there was one to tell."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER_TRIM), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(setting, value) == 1 for setting, value in settings)
