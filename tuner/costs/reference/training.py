"""Trained weights of a layer, and where gradients end, on the reference step.

Beside frozen weights only adapters have gradients. A matrix then passes the gradient of its inputs
on, unless nothing before it is trained: the layers before the first adapter have no backward pass,
and of the layer with it only what comes after has one.
"""

from dataclasses import dataclass

from profilers.steps.config import LayerKind
from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, GQA_PROJECTIONS, NETWORK, Adapters, adapted


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraining:
    """Trained weights of one layer."""

    rank: int
    """Rank of the adapters; 0: all weights are trained."""
    names: frozenset[str]
    """Matrices of the layer that have adapters."""
    has_input_gradient: bool
    """Whether something before the layer is trained."""

    @property
    def is_full(self) -> bool:
        """Return whether all weights are trained."""
        return not self.rank

    def trains(self, *names: str) -> bool:
        """Return whether the weights of one of these matrices, or an adapter of it, are trained."""
        return self.is_full or any(name in self.names for name in names)

    def reaches(self, *names: str) -> bool:
        """Return whether the outputs of these matrices have a gradient, or their inputs had one."""
        return self.has_input_gradient or self.trains(*names)

    def after_attention(self) -> "LayerTraining":
        """Return the training of the second half of the layer, after attention."""
        return LayerTraining(
            rank=self.rank, names=self.names, has_input_gradient=self.reaches(*GQA_PROJECTIONS)
        )

    def adapter_ranks(self, *names: str) -> int:
        """Count the columns of all x A^T of these matrices."""
        return self.rank * sum(name in self.names for name in names)


FULL = LayerTraining(rank=0, names=frozenset(), has_input_gradient=True)


def layer_trainings(model: ModelSpec, tune: Adapters | None) -> tuple[LayerTraining, ...]:
    """Return what each layer trains; None: all weights.

    Raises:
        ValueError: the model lacks a target, or the rank exceeds it.
    """
    if tune is None:
        return (FULL,) * model.num_layers
    chosen = frozenset(adapted(tune, model))
    trainings, has_gradient = [], False
    for kind in model.layers:
        names = chosen & _matrices(model, kind)
        trainings.append(
            LayerTraining(rank=tune.rank, names=names, has_input_gradient=has_gradient)
        )
        has_gradient = has_gradient or bool(names)
    return tuple(trainings)


def _matrices(model: ModelSpec, kind: LayerKind) -> frozenset[str]:
    if kind is LayerKind.DENSE:
        return frozenset((*GQA_PROJECTIONS, *NETWORK))
    shared = NETWORK if model.moe is not None and model.moe.shared_ffn_size else ()
    return frozenset((*GQA_PROJECTIONS, *shared, EXPERTS))
