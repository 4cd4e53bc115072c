"""Meter what autograd keeps: the live sum of distinct storages saved for the backward pass.

A storage counts once, with all its bytes, from the first tensor saved on it until the graph drops
the last. Parameters (sharded, gathered or cast) do not count: they are counted as parameters.
Metering slows a step down, so it has a step of its own.

Not covered: temporaries that no backward needs, communication buffers, the allocator's waste.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class ActivationMeter:
    """Counts bytes while a metered step runs.

    Args:
        parameters: current storages of parameters; called at each tensor saved.
        gradient_bytes: gradient bytes in memory now; called at each tensor used.
    """

    def __init__(
        self,
        *,
        parameters: Callable[[], Iterable[Tensor]],
        gradient_bytes: Callable[[], int],
    ) -> None:
        self._parameters = parameters
        self._gradient_bytes = gradient_bytes
        self._references: dict[int, int] = {}
        self._live_bytes = 0
        self.peak_bytes = 0
        """Largest live sum so far."""
        self.peak_gradient_bytes = 0
        """Largest gradient bytes seen while the backward ran."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Meter the graph built inside."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> "Tensor | _Kept":
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in {
            weight.untyped_storage().data_ptr() for weight in self._parameters()
        }:
            return tensor
        references = self._references.get(address, 0)
        self._references[address] = references + 1
        if not references:
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        return _Kept(tensor, lambda: self._release(address, size))

    def _unpack(self, kept: "Tensor | _Kept") -> Tensor:
        self.peak_gradient_bytes = max(self.peak_gradient_bytes, self._gradient_bytes())
        return kept.tensor if isinstance(kept, _Kept) else kept

    def _release(self, address: int, size: int) -> None:
        self._references[address] -= 1
        if not self._references[address]:
            del self._references[address]
            self._live_bytes -= size


class _Kept:
    """A saved tensor that says when the graph lets go of it."""

    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Add up the distinct storages behind some tensors."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def allocator_peak(device: torch.device) -> int | None:
    """Peak bytes of the device's allocator; None on a CPU, which keeps no such count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
