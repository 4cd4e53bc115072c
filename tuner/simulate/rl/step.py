"""Seconds of one step of reinforcement learning, by phase.

    colocated                      rollout + forwards + training + sync + offload
    disaggregated, on-policy       rollout + forwards + training + sync
    disaggregated, versions late   max(rollout as a closed loop, forwards + training) + sync

Forwards are those for old and reference log-probabilities and for a critic's values, over all
sequences; training is K updates in each of E epochs. Updates of engines in flight hide a sync from
rollout alone: the trainer takes part in it.

Not covered: rewards, tools and validation; what prepares data between the phases.
"""

from dataclasses import dataclass
from enum import StrEnum

from tuner.costs.rl.packing import MicroBatches, TokenBudget, pack
from tuner.costs.rl.residuals import RlResiduals
from tuner.costs.rl.trainer import Trainer, num_tensors
from tuner.prices.weight_sync import SyncPath, offload_s, sync_s
from tuner.simulate.rl.rollout import Batch, RolloutSide, roll_out


class RlPlacement(StrEnum):
    """Devices of the two sides."""

    COLOCATED = "colocated"
    """The same devices roll out and train in turn."""
    DISAGGREGATED = "disaggregated"
    """Some devices roll out, others train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Work of the training side in a step."""

    mini_batches: int = 1
    """Parts of the responses, each of which is an optimizer step."""
    epochs: int = 1
    """Passes over the responses."""
    forwards: int = 2
    """Forward passes over all sequences: old, reference log-probabilities, values."""
    trained: int = 1
    """Models that are trained: the actor, and a critic of its size."""

    @property
    def steps(self) -> int:
        """Return the optimizer steps of all trained models."""
        return self.mini_batches * self.epochs * self.trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds of a step by phase."""

    placement: RlPlacement
    versions: float
    rollout_s: float
    """Seconds of generation, those behind training included."""
    rolled_s: float
    """Seconds until nine of ten responses have ended."""
    forward_s: float
    """Seconds of all forward passes for log-probabilities and values."""
    train_s: float
    """Seconds of all updates."""
    sync_s: float
    """Seconds in which new weights reach the engines."""
    offload_s: float
    """Seconds in which the state of colocated sides leaves the devices and comes back."""

    @property
    def is_late(self) -> bool:
        """Return whether both sides work at once."""
        return self.placement is RlPlacement.DISAGGREGATED and self.versions > 0.0

    @property
    def trainer_s(self) -> float:
        """Return the seconds of the training side's passes."""
        return self.forward_s + self.train_s

    @property
    def step_s(self) -> float:
        """Return the seconds of the step."""
        if self.is_late:
            return max(self.rollout_s, self.trainer_s) + self.sync_s
        return self.rollout_s + self.trainer_s + self.sync_s + self.offload_s

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the phases by name."""
        return {
            "rollout": self.rollout_s,
            "forward": self.forward_s,
            "train": self.train_s,
            "sync": self.sync_s,
            "offload": self.offload_s,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RlStep:
    """A described step: both sides, the batch, and how weights get across."""

    placement: RlPlacement
    versions: float
    """Versions of the weights that responses may be behind; 0: on-policy."""
    release: str
    """Framework and its release, `NeMo-RL 0.6`."""
    batch: Batch
    trainer: Trainer
    train_budget: TokenBudget
    forward_budget: TokenBudget
    updates: Updates
    side: RolloutSide
    path: SyncPath
    offload_bytes: float
    """Bytes of one device that leave for the host and come back in a step."""

    def phases(self, residuals: RlResiduals) -> Phases:
        """Price every phase."""
        whole = pack(self.batch.length_N, self.forward_budget, ranks=self.trainer.data_ranks)
        update_s = self.trainer.update_s(self.update_batches())
        is_late = self.placement is RlPlacement.DISAGGREGATED and self.versions > 0.0
        rollout = roll_out(
            self.batch,
            self.side,
            versions=self.versions if is_late else 0.0,
            gap_s=residuals.decode_gap_s,
        )
        factor = residuals.release_factor(self.release)
        devices = self.side.iteration.degrees.devices
        return Phases(
            placement=self.placement,
            versions=self.versions,
            rollout_s=factor * rollout.last_s,
            rolled_s=factor * rollout.most_s,
            forward_s=factor
            * residuals.pass_factor
            * self.updates.forwards
            * self.trainer.forward_s(whole),
            train_s=factor * residuals.pass_factor * self.updates.steps * update_s,
            sync_s=sync_s(
                self.path,
                weight_bytes=self.side.weight_bytes * devices,
                tensors=num_tensors(self.trainer.shape),
                link_bytes_per_s=self.trainer.link_bytes_per_s,
            ),
            offload_s=offload_s(self.offload_bytes),
        )

    def update_batches(self) -> MicroBatches:
        """Return the micro-batches of one update."""
        share = -(-len(self.batch.length_N) // self.updates.mini_batches)
        return pack(self.batch.length_N[:share], self.train_budget, ranks=self.trainer.data_ranks)
