"""What ranks tell each other about checkpoints, as JSON: a peer's message runs no code.

A group of its own, over the host's memory, so that it may be used beside training.
"""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

from profilers.errors import CheckpointDamagedError

SAVE_TIMEOUT: Final = timedelta(minutes=30)
"""Of a rank that waits for the slowest one to write; one that died closes its connections."""


def checkpoint_group() -> dist.ProcessGroup:
    """Connect all ranks once more."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=SAVE_TIMEOUT)
    return group


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Give every rank the values of all, by rank; values are what JSON can hold."""
    own = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8)
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [json.loads(one.numpy().tobytes()) for one in everyone]


def attempt(action: Callable[[], None], group: dist.ProcessGroup) -> str | None:
    """Do something on every rank, and say what went wrong first on any of them; None: nothing.

    PyTorch's writer reports a full disk as RuntimeError.
    """
    reason = None
    try:
        action()
    except (OSError, RuntimeError, CheckpointDamagedError) as error:
        reason = describe(error)
    reasons = gather(reason, group)
    return next((one for one in reasons if one is not None), None)


def describe(error: BaseException) -> str:
    """Say in one line what went wrong."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return (str(error) or type(error).__name__).splitlines()[0][:400]
