"""How many micro-batches each model chunk of a pipeline rank holds at the fullest moment.

Of P ranks with v chunks each and m micro-batches, rank r holds before its first backward

    v = 1    min(m, P - r) micro-batches                1F1B
    v > 1    min(m v, (v - 1) P + 2 (P - 1 - r) + 1)    interleaved; P of each chunk in turn

Zero-bubble schedules put off weight gradients, which need the same activations: every rank holds
what rank 0 of 1F1B does, min(m, P) micro-batches of all its chunks.

Sources: Narayanan et al., SC 2021, section 2.2, in the order of PyTorch's schedules; Qi et al.,
ICLR 2024 (ZB-H1: the memory of 1F1B's first stage). tuner/formulate/schedule.py counts every moment
one by one and is what the tests compare with.
Not covered: that with chunks of very different bytes a later moment can weigh more.
"""

import numpy as np
import numpy.typing as npt

from tuner.costs.analytic.shapes import Grid


def held(
    ranks: int, chunks: int, *, microbatches: Grid, zero_bubble: Grid
) -> npt.NDArray[np.float64]:
    """Micro-batches held of each chunk: [chunk, rank, column] of a pipeline, columns as given."""
    rank = np.arange(ranks, dtype=np.float64)[:, None]
    if chunks == 1:
        plain = np.minimum(microbatches, ranks - rank)[None]
        return np.where(zero_bubble > 0.0, np.minimum(microbatches, float(ranks)), plain)
    ahead = (chunks - 1.0) * ranks + 2.0 * (ranks - 1.0 - rank) + 1.0
    ahead = np.minimum(microbatches * chunks, ahead)
    rounds, rest = np.divmod(ahead, ranks * chunks)
    chunk = np.arange(chunks, dtype=np.float64)[:, None, None]
    counted = rounds * ranks + np.clip(rest - chunk * ranks, 0.0, ranks)
    filled = np.maximum(counted, np.minimum(microbatches, float(ranks)))
    return np.where(zero_bubble > 0.0, filled, counted)
