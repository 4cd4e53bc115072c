"""Prepare a function so that its forward and its backward are timed as training runs them.

The forward records the graph. The backward consumes the graph of a forward of its own and computes
the gradients of every operand that requires one; they are returned, not accumulated, so a repeat
never pays for adding into the gradients of the one before. Operands are random, as zeros draw less
power and may be cheaper to multiply; on an accelerator several sets of small operands take turns,
so that none is found in the cache merely because it was just used.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from profilers.devices import cache_bytes

MAX_SETS = 8


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
) -> Prepared:
    """Time `function(*operands)`; operands that require a gradient get one in the backward."""
    first = operands()
    sets = [first]
    one_set_bytes = sum(tensor.nbytes for tensor in first)
    while len(sets) < MAX_SETS and len(sets) * one_set_bytes < 2 * cache_bytes(device):
        sets.append(operands())
    turns = itertools.cycle(sets)
    gradients = tuple(torch.randn_like(output) for output in _run(function, turns).outputs)

    def backward() -> Callable[[], object]:
        tape = _run(function, turns)
        return lambda: torch.autograd.grad(tape.outputs, tape.inputs, gradients)

    return Prepared(forward=lambda: _run(function, turns), backward=backward)


def random(*shape: int, dtype: torch.dtype, device: torch.device, grad: bool = True) -> Tensor:
    """A normal operand, scaled to keep products of a few hundred terms near one."""
    tensor = torch.randn(*shape, dtype=torch.float32, device=device).mul_(0.1).to(dtype)
    return tensor.requires_grad_(grad)


def _run(
    function: Callable[..., Tensor | tuple[Tensor, ...]], turns: Iterator[tuple[Tensor, ...]]
) -> Tape:
    operands = next(turns)
    outputs = function(*operands)
    return Tape(
        outputs=outputs if isinstance(outputs, tuple) else (outputs,),
        inputs=tuple(tensor for tensor in operands if tensor.requires_grad),
    )
