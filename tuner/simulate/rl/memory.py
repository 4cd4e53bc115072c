"""Memory of a step of reinforcement learning at three moments, on a device and on a node's host.

    rollout    the engine's share, and what the trainer leaves on the device
    train      the peak of an update, and what a sleeping engine and a resident reference keep
    switch     weights of both sides and the buffer between them, before caches are made again

Disaggregated sides each have their own devices: rollout and training are alone there, and a switch
adds the buffer to either. The host holds what is offloaded: optimizer states of the host, state
that leaves the devices between phases, the reference, and weights of engines that keep them asleep.

Not covered: object stores of the framework, checkpoints, page caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tuner.arrays import Floats
from tuner.costs.rl.packing import MicroBatches
from tuner.costs.rl.trainer import Trainer
from tuner.costs.serve.reserve import Reserve, step_reserve
from tuner.costs.train.host_memory import offloaded_bytes
from tuner.costs.train.prices import MemoryPrice
from tuner.simulate.rl.rollout import RolloutSide
from tuner.simulate.rl.step import RlPlacement

Parts = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """State that stays on the devices of a side while the other one works."""

    offloads_weights: bool = False
    offloads_optimizer: bool = False
    offloads_reference: bool = False
    has_reference: bool = False
    has_critic: bool = False
    sleeps: bool = True
    sleep_keeps_weights: bool = False
    bucket_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlMemory:
    """Bytes by moment and part."""

    device: Mapping[str, Parts]
    """Bytes of the fullest device at each moment."""
    host: Parts
    """Bytes of a node's host."""
    kv_tokens: float
    """Tokens that the caches of a rank hold; not above 0 where weights leave no room."""

    @property
    def train_bytes(self) -> float:
        """Return the peak of an update."""
        return sum(self.device["train"].values())

    @property
    def peak_bytes(self) -> float:
        """Return the most that a device holds at any moment."""
        return max(sum(parts.values()) for parts in self.device.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Side:
    """Bytes of the trainer on its fullest device, and over all ranks on the mean one."""

    price: MemoryPrice
    rank: int
    residency: Residency

    def peak(self, *names: str) -> float:
        return float(sum(getattr(self.price, name)[self.rank, 0] for name in names))

    def mean(self, *names: str) -> float:
        return float(np.mean(sum((getattr(self.price, name) for name in names), np.zeros(1))))

    @property
    def trained(self) -> int:
        return 1 + self.residency.has_critic

    def resident(self, *, gradients: bool) -> Parts:
        """Return what stays on a device while the trainer does not work."""
        stays = self.residency
        parts = {"trainer's context": self.peak("context_PC")}
        if not stays.offloads_weights:
            names = ("weights_PC", "gradients_PC") if gradients else ("weights_PC",)
            parts["trainer's weights"] = self.trained * self.peak(*names)
        if not stays.offloads_optimizer:
            parts["optimizer"] = self.trained * self.peak("optimizer_PC")
        return parts | self.reference()

    def reference(self) -> Parts:
        if not self.residency.has_reference or self.residency.offloads_reference:
            return {}
        return {"reference": self.peak("weights_PC")}


def price_memory_of_step(
    trainer: Trainer,
    micro: MicroBatches,
    side: RolloutSide,
    residency: Residency,
    *,
    placement: RlPlacement,
    longest: int,
    devices_per_node: int,
) -> RlMemory:
    """Price all three moments."""
    price = trainer.memory(micro)
    rank = int(np.argmax(price.total_PC[:, 0]))
    kept = _Side(price=price, rank=rank, residency=residency)
    reserve = step_reserve(
        side.iteration, step_tokens=side.step_tokens, running=side.most_running, longest=longest
    )
    is_colocated = placement is RlPlacement.COLOCATED
    moments = (_colocated if is_colocated else _disaggregated)(kept, side, reserve, longest)
    return RlMemory(
        device=moments,
        host=_host(trainer, micro, kept, side, devices_per_node, is_colocated=is_colocated),
        kv_tokens=side.kv_tokens(longest=longest),
    )


def _engine(side: RolloutSide, reserve: Reserve, longest: int) -> Parts:
    return {
        "engine's weights": side.weight_bytes,
        "KV cache": max(side.room(longest=longest).cache_bytes, 0.0),
        "engine's steps": reserve.steps,
        "engine's context": reserve.context + reserve.communicators,
    }


def _training(kept: _Side) -> Parts:
    beside = kept.trained - 1
    parts = {
        "weights": kept.peak("weights_PC"),
        "gradients": kept.peak("gradients_PC"),
        "optimizer": kept.peak("optimizer_PC"),
        "activations": kept.peak("activations_PC", "buffers_PC"),
        "allocator and context": kept.peak("reserve_PC", "context_PC"),
    }
    stays = kept.residency
    if beside and not stays.offloads_weights:
        parts["critic's weights"] = kept.peak("weights_PC", "gradients_PC")
    if beside and not stays.offloads_optimizer:
        parts["critic's optimizer"] = kept.peak("optimizer_PC")
    return parts | kept.reference()


def _colocated(kept: _Side, side: RolloutSide, reserve: Reserve, longest: int) -> dict[str, Parts]:
    engine = _engine(side, reserve, longest)
    asleep = {"engine's context": engine["engine's context"]} if kept.residency.sleeps else engine
    weights = {"trainer's weights": kept.trained * kept.peak("weights_PC")}
    return {
        "rollout": engine | kept.resident(gradients=True),
        "train": _training(kept) | asleep,
        "switch": asleep
        | kept.resident(gradients=False)
        | weights
        | {
            "engine's weights": engine["engine's weights"],
            "buffer": kept.residency.bucket_bytes,
        },
    }


def _disaggregated(
    kept: _Side, side: RolloutSide, reserve: Reserve, longest: int
) -> dict[str, Parts]:
    engine = _engine(side, reserve, longest)
    buffer = {"buffer": kept.residency.bucket_bytes}
    switches = (
        engine | buffer,
        {**kept.resident(gradients=True), **buffer},
    )
    return {
        "rollout": engine,
        "train": _training(kept),
        "switch": max(switches, key=lambda parts: sum(parts.values())),
    }


def _host(
    trainer: Trainer,
    micro: MicroBatches,
    kept: _Side,
    side: RolloutSide,
    devices_per_node: int,
    *,
    is_colocated: bool,
) -> Parts:
    """Return the bytes of one node; ranks are taken to hold as much each."""
    stays, devices = kept.residency, min(devices_per_node, trainer.devices)
    packed = trainer.packed(micro)
    offloaded = offloaded_bytes(
        trainer.shape,
        packed,
        trainer.hardware,
        trainer.stages,
        constants=trainer.memory_constants,
        devices_per_node=devices_per_node,
        inside_C=np.zeros(1, dtype=np.bool_),
    )
    parts: Parts = {what: float(size_C[0]) for what, size_C in offloaded.items()}
    if stays.offloads_weights:
        parts["trainer's weights"] = kept.trained * devices * kept.mean("weights_PC")
    if stays.offloads_optimizer:
        parts["optimizer between updates"] = kept.trained * devices * kept.mean("optimizer_PC")
    if stays.has_reference and stays.offloads_reference:
        parts["reference"] = devices * kept.mean("weights_PC")
    if is_colocated and stays.sleeps and stays.sleep_keeps_weights:
        parts["weights of sleeping engines"] = devices * side.weight_bytes
    return {what: size for what, size in parts.items() if size > 0.0}


def moved_bytes(price: MemoryPrice, residency: Residency) -> float:
    """Return the bytes of a device that leave for the host and come back in a step."""
    parts: list[Floats] = []
    if residency.offloads_weights:
        parts.append(price.weights_PC)
    if residency.offloads_optimizer:
        parts.append(price.optimizer_PC)
    moved = sum((grid.max() for grid in parts), 0.0) * (1 + residency.has_critic)
    if residency.has_reference and residency.offloads_reference:
        moved += 0.5 * float(price.weights_PC.max())
    return float(moved)
