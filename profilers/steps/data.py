"""Text to train on that every machine has: the Python standard library's own sources, as bytes.

A sequence depends on (seed, step, index in the global batch) only, never on the parallel layout.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CORPUS_BYTES = 4_000_000
"""Bytes of text that are read, at most: enough for any short run, and quick to read."""


def read_corpus() -> NDArray[np.uint8]:
    """Concatenate the top-level modules of the standard library in the order of their names."""
    parts: list[bytes] = []
    missing = CORPUS_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_bytes()[:missing])
        missing -= len(parts[-1])
        if not missing:
            break
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def sample_sequences(
    corpus: NDArray[np.uint8],
    sequences: Sequence[int],
    *,
    step: int,
    seed: int,
    length: int,
    vocab_size: int,
) -> NDArray[np.int64]:
    """Cut one window of `length + 1` tokens per sequence index: [sequences, length + 1]."""
    windows = []
    for sequence in sequences:
        start = np.random.default_rng([seed, step, sequence]).integers(len(corpus) - length)
        windows.append(np.take(corpus, np.arange(start, start + length + 1), mode="wrap"))
    return np.stack(windows).astype(np.int64) % vocab_size
