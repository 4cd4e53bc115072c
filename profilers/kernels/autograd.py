"""Prepare a function so that its forward and its backward are timed as training runs them.

The forward records the graph. The backward consumes the graph of a forward of its own and computes
the gradients of every operand that requires one; they are returned, not accumulated, so a repeat
never pays for adding into the gradients of the one before. Operands are random, as zeros draw less
power and may be cheaper to multiply; several sets of small operands take turns, so that none is
found in a core's own cache merely because it was just used. Parameters and their gradients, which a
step uses once a micro-batch, are evicted from the last-level cache as well.

On a processor the sets also lie at different places within a page. A load that agrees with an
earlier store in its low twelve address bits waits for it, so the same kernel differs by tens of
percent with where its operands happen to lie (Intel, Optimization Reference Manual, "4K aliasing";
Mytkowicz et al., Producing Wrong Data, ASPLOS 2009). A step uses all places; so does a repeat.

Where a kernel branches on the values, as top-k does, a processor learns the order of those that
repeat: the same 128 x 64 logits took 25 us, new ones 87 us. Such kernels get so many
sets of values of their own that none can be learnt.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from profilers.devices import cache_bytes

DRAWN = 2**18
"""Elements that are drawn; larger operands repeat them, as drawing takes ten times a copy."""
MAX_SETS = 8
PLACED_SETS = 4
"""Sets at different places, at least, on a processor..."""
PLACED_BYTES = 64 * 2**20
"""...as long as they fit in here together."""
UNLEARNT = 2**17
"""Values that no branch predictor remembers: 2**15 were learnt, 2**16 were not (an AMD EPYC)."""
PAGE_BYTES = 4096
LINE_BYTES = 64
GOLDEN_RATIO = 0.6180339887498949
"""Step of Weyl's sequence: its multiples modulo 1 spread evenly, however many there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tape:
    """A forward that has run: what a backward needs."""

    outputs: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """A case ready to be timed."""

    forward: Callable[[], object]
    backward: Callable[[], Callable[[], object]] | None
    """Runs a fresh forward and returns its backward; absent where there is no such half."""


def through_autograd(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    *,
    operands: Callable[[], tuple[Tensor, ...]],
    device: torch.device,
    cold_bytes: int | None = None,
    num_values: int = 0,
) -> Prepared:
    """Time `function(*operands)`; operands that require a gradient get one in the backward.

    Args:
        function: what to time.
        operands: makes one set of operands.
        device: where they lie.
        cold_bytes: cache that the operands must not be found in; None means a core's own.
        num_values: how many operands a processor reads, in all sets, before one repeats.
    """
    if cold_bytes is None:
        cold_bytes = cache_bytes(device)
    turns = in_turns(operands, cold_bytes=cold_bytes, num_values=num_values)
    gradients = tuple(
        random(*output.shape, dtype=output.dtype, device=device, grad=False)
        for output in _run(function, turns).outputs
    )

    def backward() -> Callable[[], object]:
        tape = _run(function, turns)
        return lambda: torch.autograd.grad(tape.outputs, tape.inputs, gradients)

    return Prepared(forward=lambda: _run(function, turns), backward=backward)


def in_turns(
    operands: Callable[[], tuple[Tensor, ...]], *, cold_bytes: int, num_values: int = 0
) -> Iterator[tuple[Tensor, ...]]:
    """Make sets of operands and hand them out in turn.

    There are enough of them to fill a cache twice over and, on a processor, to hold `num_values`
    drawn elements, which its branch predictor must not have seen before.
    """
    sets = [operands()]
    one_set_bytes = sum(tensor.nbytes for tensor in sets[0])
    on_host = all(tensor.device.type == "cpu" for tensor in sets[0])
    one_set_values = max(1, sum(tensor.numel() for tensor in sets[0]))
    placed = min(PLACED_SETS, PLACED_BYTES // max(one_set_bytes, 1)) if on_host else 1
    while (on_host and len(sets) * one_set_values < num_values) or (
        len(sets) < MAX_SETS and (len(sets) < placed or len(sets) * one_set_bytes < 2 * cold_bytes)
    ):
        values = operands() if num_values or not on_host else sets[0]
        sets.append(_moved(values, number=len(sets)) if on_host else values)
    return itertools.cycle(sets)


def _moved(operands: tuple[Tensor, ...], *, number: int) -> tuple[Tensor, ...]:
    """Copy a set of operands to other places within their pages, by whole cache lines."""
    copies = []
    for index, tensor in enumerate(operands):
        share = GOLDEN_RATIO * (number + index * MAX_SETS) % 1.0
        ahead = int(share * PAGE_BYTES) // LINE_BYTES * LINE_BYTES // tensor.itemsize
        room = torch.empty(ahead + tensor.numel(), dtype=tensor.dtype)
        copy = room[ahead:].view(tensor.shape).copy_(tensor.detach())
        copies.append(copy.requires_grad_(tensor.requires_grad))
    return tuple(copies)


def random(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True) -> Tensor:
    """A normal operand, scaled to keep products of a few hundred terms near one."""
    count = math.prod(shape)
    part = torch.randn(min(count, DRAWN), dtype=torch.float32, device=device).mul_(0.1).to(dtype)
    return repeated(part, count).view(shape).requires_grad_(grad)


def repeated(part: Tensor, count: int) -> Tensor:
    """Make a flat tensor of `count` elements out of a drawn part, over and over."""
    if len(part) == count:
        return part
    whole = torch.empty(count, dtype=part.dtype, device=part.device)
    fill(whole, part)
    return whole


def fill(whole: Tensor, part: Tensor) -> None:
    """Fill a flat tensor with a drawn part, over and over."""
    for start in range(0, len(whole), len(part)):
        piece = whole[start : start + len(part)]
        piece.copy_(part[: len(piece)])


def _run(
    function: Callable[..., Tensor | tuple[Tensor, ...]], turns: Iterator[tuple[Tensor, ...]]
) -> Tape:
    operands = next(turns)
    outputs = function(*operands)
    return Tape(
        outputs=outputs if isinstance(outputs, tuple) else (outputs,),
        inputs=tuple(tensor for tensor in operands if tensor.requires_grad),
    )
