"""The peak of software that frees gradients after every step, as plain PyTorch loops do.

A gradient exists from its layer's backward pass to the optimizer's step. Of G bytes in all, E of
one vocabulary matrix and L layers, the moments that can be the peak are, above parameters and
moments:

    loss            activations of all layers, and the head's temporaries
    last layer      activations of all layers, E, one layer's temporaries
    first layer     activations of one layer, G - E - G / L, one layer's temporaries
    its mixer       what the network's backward pass leaves, G - E
    end             G

With several micro-batches gradients exist from the second one on, beside everything else.

Not covered: pipelines; layers of different sizes.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats


class StepBytes(NamedTuple):
    """Bytes of one step by moment; every array is [P, C], or broadcasts to it."""

    kept: Floats
    """Activations of all layers."""
    logits: Floats
    at_head: Floats
    """Logits and the head's temporaries."""
    at_layer: Floats
    """One layer's temporaries."""
    late: Floats
    """Bytes of one layer at the end of its network's backward pass, beside gradients of
    parameters."""
    gradients: Floats
    of_vocab: Floats
    """Part of `gradients`: one vocabulary matrix."""
    layers: Floats


class PeakBytes(NamedTuple):
    """The largest moment, by part."""

    gradients: Floats
    activations: Floats
    buffers: Floats


def freed_peak(step: StepBytes, *, accumulates: npt.NDArray[np.bool_]) -> PeakBytes:
    """Return the largest moment of a step."""
    layers = np.maximum(step.layers, 1.0)
    kept_of_layer, total, nothing = step.kept / layers, step.gradients, np.zeros(1)
    of_layer = (total - 2.0 * step.of_vocab) / layers
    at_loss = PeakBytes(nothing, step.kept + step.logits, step.at_head - step.logits)
    last = PeakBytes(step.of_vocab, step.kept, step.at_layer)
    first = PeakBytes(
        np.maximum(total - step.of_vocab - of_layer, 0.0), kept_of_layer, step.at_layer
    )
    mixer = PeakBytes(total - step.of_vocab, nothing, step.late)
    end = PeakBytes(total, nothing, nothing)
    early = [PeakBytes(np.where(accumulates, total, m.gradients), *m[1:]) for m in (at_loss, last)]
    moments = [np.stack(np.broadcast_arrays(*moment)) for moment in (*early, first, mixer, end)]
    stacked = np.stack(np.broadcast_arrays(*moments))
    largest = np.argmax(stacked.sum(axis=1), axis=0)
    chosen = np.take_along_axis(stacked, largest[None, None], axis=0)[0]
    return PeakBytes(*chosen)
