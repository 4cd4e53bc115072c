"""Micro-batches in flight of each model chunk of a pipeline rank, and their peak bytes.

Of P ranks with v chunks each and m micro-batches, rank r runs ahead of its first backward by

    v = 1    min(m, P - r) forwards                             1F1B
    v > 1    min(m v, (v - 1) P + 2 (P - 1 - r) + 1) of them    interleaved; P of each chunk in turn

and then alternates; backwards take the chunks in reverse. Where chunks keep different bytes, the
peak can come after the first backward. Between two changes of chunk, of the forwards or of the
backwards, the bytes change linearly, so the peak is at one of the 2 v moments before such changes
within one round of P v backwards.

Zero-bubble schedules delay weight gradients, which need the same activations: every rank keeps as
many micro-batches in flight as rank 0 of 1F1B, min(m, P) of each of its chunks.

Sources: Narayanan et al., SC 2021, section 2.2, in the order of PyTorch's schedules; Qi et al.,
ICLR 2024 (ZB-H1: the memory of 1F1B's first stage). tuner/search/reference/schedule.py counts every
moment one by one and is what the tests compare with.

Letters: V chunks of a rank, P ranks, C columns, K kinds of parts, M moments, U
different numbers of micro-batches.
"""

import numpy as np

from tuner.arrays import Floats


def warmup_in_flight(
    ranks: int, chunks: int, *, microbatches: Floats, zero_bubble: Floats
) -> Floats:
    """Micro-batches in flight of each chunk before the first backward, [V, P, C]."""
    return _in_flight_after(ranks, chunks, microbatches, zero_bubble, done=np.zeros((1, 1)))


def peak_bytes(
    parts_KVPC: Floats, saved_KC: Floats, *, microbatches: Floats, zero_bubble: Floats
) -> Floats:
    """Peak bytes of saved activations on every rank, [P, C].

    `parts_KVPC` counts what each chunk has of each kind, `saved_KC` is what one of the kind keeps
    of a micro-batch.
    """
    _, chunks, ranks, _ = parts_KVPC.shape
    if (parts_KVPC == parts_KVPC[:, :1]).all():
        first = warmup_in_flight(ranks, chunks, microbatches=microbatches, zero_bubble=zero_bubble)
        uniform: Floats = first.sum(axis=0) * summed(parts_KVPC[:, 0], saved_KC)
        return uniform
    if parts_KVPC.shape[-1] == 1:
        return _peak_of_shared_stages(parts_KVPC, saved_KC, microbatches, zero_bubble)
    chunk_VPC = summed(parts_KVPC, saved_KC)
    counts = _moments(ranks, chunks, microbatches, zero_bubble)
    peak_PC: Floats = np.stack([(count * chunk_VPC).sum(axis=0) for count in counts]).max(axis=0)
    return peak_PC


def _peak_of_shared_stages(
    parts_KVPC: Floats, saved_KC: Floats, microbatches: Floats, zero_bubble: Floats
) -> Floats:
    """Count once for each number of micro-batches where columns share their stages.

    Beyond one round after the warm-up, more micro-batches change nothing, so few numbers are left.
    """
    _, chunks, ranks, _ = parts_KVPC.shape
    enough = ranks * np.ceil(((chunks + 1) * ranks - 1) / (ranks * chunks) + 1.0)
    pairs = np.broadcast_arrays(np.minimum(microbatches, enough), zero_bubble, saved_KC[0])[:2]
    kinds, kind = np.unique(np.stack(pairs), axis=1, return_inverse=True)
    count_MVPU = np.stack(np.broadcast_arrays(*_moments(ranks, chunks, kinds[:1], kinds[1:])))
    weight_UMPK = np.einsum("mvpu,kvp->umpk", count_MVPU, parts_KVPC[..., 0])
    peak_PC = np.empty((ranks, kind.size))
    for index, weight_MPK in enumerate(weight_UMPK):
        columns = np.flatnonzero(kind.ravel() == index)
        selected_KC = saved_KC if saved_KC.shape[-1] == 1 else saved_KC[:, columns]
        peak_PC[:, columns] = np.matmul(weight_MPK, selected_KC).max(axis=0)
    return peak_PC


def summed(counts: Floats, bytes_KC: Floats) -> Floats:
    """Sum counts [K, ..., C] times bytes, by one tensordot where columns share the counts."""
    if counts.shape[-1] == 1:
        shared: Floats = np.tensordot(counts[..., 0], bytes_KC, axes=(0, 0))
        return shared
    total: Floats = counts[0] * bytes_KC[0]
    for count, of_one in zip(counts[1:], bytes_KC[1:], strict=True):
        total += count * of_one
    return total


def _moments(ranks: int, chunks: int, microbatches: Floats, zero_bubble: Floats) -> list[Floats]:
    """Count micro-batches in flight before changes of chunk, [V, P, C] each."""
    ahead = _ahead(ranks, chunks, microbatches)
    done = [np.zeros((1, 1))]
    for rounds in range(1, chunks + 1):
        done += [rounds * ranks - np.mod(ahead, ranks), np.full((1, 1), float(rounds * ranks))]
    return [
        _in_flight_after(ranks, chunks, microbatches, zero_bubble, done=count) for count in done
    ]


def _ahead(ranks: int, chunks: int, microbatches: Floats) -> Floats:
    rank = np.arange(ranks, dtype=np.float64)[:, None]
    ahead = ranks - rank
    if chunks > 1:
        ahead = (chunks - 1.0) * ranks + 2.0 * (ranks - 1.0 - rank) + 1.0
    least: Floats = np.minimum(microbatches * chunks, ahead)
    return least


def _in_flight_after(
    ranks: int, chunks: int, microbatches: Floats, zero_bubble: Floats, *, done: Floats
) -> Floats:
    """Micro-batches in flight after `done` backwards, or after all where there are fewer."""
    ahead = _ahead(ranks, chunks, microbatches)
    if chunks == 1:
        counted = ahead[None]
    else:
        done = np.minimum(done, microbatches * chunks)
        forwards = np.minimum(microbatches * chunks, ahead + done)
        chunk = np.arange(chunks, dtype=np.float64)[:, None, None]
        counted = _of_chunk(forwards, chunk, ranks, chunks)
        if done.any():
            counted = counted - _of_chunk(done, chunks - 1.0 - chunk, ranks, chunks)
    if not zero_bubble.any():
        return counted
    filled = np.maximum(counted, np.minimum(microbatches, float(ranks)))
    return np.where(zero_bubble > 0.0, filled, counted)


def _of_chunk(operations: Floats, turn: Floats, ranks: int, chunks: int) -> Floats:
    """Count how many of the first operations are of the chunk whose turn is `turn`."""
    rounds, rest = np.divmod(operations, ranks * chunks)
    return rounds * ranks + np.clip(rest - turn * ranks, 0.0, ranks)
