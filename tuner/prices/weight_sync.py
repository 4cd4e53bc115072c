"""Seconds in which new weights reach the rollout engines, and in which state leaves for the host.

    sync      start + T a + r S / B      T tensors of the checkpoint, S bytes of weights, r of them
                                         sent, at B bytes a second
    offload   2 D / H                    D bytes of a device go to the host and come back

Trainers turn their shards into tensors of the checkpoint, one by one, and engines load them one by
one: software, a, bounds models with experts, which have thousands. Every engine gets the whole
model, so that the link of one device, or a share of it, is what S passes.

Source: published syncs. NeMo-RL (pull request 3294, CUDA IPC on B200) takes 9.7, 18.4 and 3.6 s for
    18,700, 37,000 and 6,100 tensors of 61, 470 and 63 GB; verl (docs/advance/fully_async.md, NCCL
    on H20) 15.8 and 58.6 s for the first two, 4.4 and 23.7 s by its checkpoint engine; deltas
    (docs/advance/delta_weight_sync.md) are 1 to 3 % of the bytes, 4 to 15 s from 7B to 235B.
    What NeMo-RL's switch takes beyond, 7 to 22 s, is state that pageable memory receives.
Not covered: quantisation on the way.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

PAGEABLE_BYTES_PER_S: Final = 5.5e9
"""Bytes a second and device that frameworks copy between devices and pageable host memory."""


class SyncPath(StrEnum):
    """Way of new weights to the engines."""

    PACKED = "packed"
    """Tensors gathered in buffers, handed over by CUDA IPC or NCCL (NeMo-RL)."""
    BUCKETED = "bucketed"
    """Tensors broadcast in buckets (verl's naive and nccl)."""
    CHECKPOINT_ENGINE = "checkpoint_engine"
    """Shards sent from host memory by an engine of its own (verl's kimi, nixl, mooncake)."""
    DELTA = "delta"
    """Changed bytes alone (verl's delta_sharded)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRates:
    """Speed of one path."""

    tensor_s: float = 0.0
    link_ratio: float
    """Share of a device's link that the bytes pass at."""
    sent_ratio: float = 1.0
    start_s: float = 0.0


RATES: Final = {
    SyncPath.PACKED: SyncRates(tensor_s=0.45e-3, link_ratio=1.0),
    SyncPath.BUCKETED: SyncRates(tensor_s=0.6e-3, link_ratio=0.25),
    SyncPath.CHECKPOINT_ENGINE: SyncRates(link_ratio=0.4, start_s=1.0),
    SyncPath.DELTA: SyncRates(link_ratio=0.25, sent_ratio=0.03, start_s=4.0),
}
"""Speeds by path."""


def sync_s(
    path: SyncPath, *, weight_bytes: float, tensors: float, link_bytes_per_s: float
) -> float:
    """Return the seconds in which all engines have new weights."""
    rates = RATES[path]
    sent_s = rates.sent_ratio * weight_bytes / (rates.link_ratio * link_bytes_per_s)
    return rates.start_s + tensors * rates.tensor_s + sent_s


def offload_s(device_bytes: float) -> float:
    """Return the seconds in which a device's state leaves for the host and comes back."""
    return 2.0 * device_bytes / PAGEABLE_BYTES_PER_S
