"""Counts, transitions and sampled tokens of a source that is read forward by forward.

    T tokens of one forward pass on one rank   K chosen experts   E experts   L layers   M pairs

For a token that chose the set A in one recorded layer and B in the next, every pair of A x B counts
one transition.

Memory is bounded however long the source: where passes are more than `most_cells` holds, two
neighbours become one from then on (each pass then spans 2, 4, ... of the source's), pairs of
experts are left out where there are too many to keep, and of more than `MOST_TOKENS` sampled tokens
every second forward's go, and are not taken from then on.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from profilers.routing.recording import (
    MOST_CELLS,
    Counts,
    Ids,
    Recording,
    recording_of,
    require_room,
)

ABSENT: Final = -1
"""An id in the place of a choice that a token did not make: padding."""
MOST_TOKENS: Final = 4096
"""Sampled tokens of one recording."""
TOKENS_PER_FORWARD: Final = 32
MOST_AT_ONCE: Final = 2**22
"""Pairs of choices that are counted in one go."""

Key = tuple[int, int]


class Tally:
    """Counts and choices so far, in order of time on each rank."""

    def __init__(self, *, most_cells: int = MOST_CELLS) -> None:
        self._most_cells = most_cells
        self._experts = 1
        self._top_k = 0
        self._span = 1
        self._counts: dict[Key, Counts] = {}
        self._pairs: dict[Key, Counts] | None = {}
        self._samples: list[dict[int, Ids]] = []
        self._forwards = 0
        self._stride = 1

    def count(self, count_of_layer: Mapping[int, Counts], *, number: int) -> None:
        """Add counts [E] of layers to a pass.

        Raises:
            ValueError: one pass has more counts than are kept.
        """
        for layer, count_E in count_of_layer.items():
            self._experts = max(self._experts, len(count_E))
            _add(self._counts, (number // self._span, layer), count_E)
        while len(self._counts) * self._experts > self._most_cells:
            if len({number for number, _ in self._counts}) == 1:
                raise ValueError(f"one pass has more than {self._most_cells} counts")
            self._span *= 2
            former, self._counts = self._counts, {}
            for (former_number, layer), count_E in former.items():
                _add(self._counts, (former_number // 2, layer), count_E)

    def add(self, ids_of_layer: Mapping[int, Counts], *, number: int) -> None:
        """Add one forward of one rank to a pass: choices [T, K] that are all that is known of it.

        Raises:
            ValueError: one pass has more counts than are kept.
        """
        self.choose(ids_of_layer)
        counts = {layer: np.bincount(ids[ids >= 0]) for layer, ids in ids_of_layer.items()}
        self.count(counts, number=number)

    def choose(self, ids_of_layer: Mapping[int, Counts]) -> None:
        """Add the choices of one forward that are counted elsewhere: pairs and sampled tokens."""
        forward = sorted(ids_of_layer.items())
        for _, ids_TK in forward:
            self._experts = max(self._experts, int(ids_TK.max()) + 1)
            self._top_k = max(self._top_k, int((ids_TK >= 0).sum(axis=1).max()))
        for (here, here_TK), (there, there_TK) in itertools.pairwise(forward):
            if len(here_TK) == len(there_TK):
                self._cross((here, there), here_TK, there_TK)
        if self._forwards % self._stride == 0 and len({len(ids) for _, ids in forward}) == 1:
            tokens = len(forward[0][1])
            wanted = np.linspace(0, tokens - 1, min(TOKENS_PER_FORWARD, tokens))
            chosen = np.unique(wanted.astype(np.int64))
            self._samples.append({layer: ids[chosen].astype(np.int32) for layer, ids in forward})
        self._forwards += 1
        if len(self._samples) * TOKENS_PER_FORWARD > MOST_TOKENS:
            self._samples = self._samples[::2]
            self._stride *= 2

    def recording(self, *, top_k: int | None = None, **facts: Any) -> Recording:
        """Return everything that was added, as a recording.

        Raises:
            ValueError: nothing was added.
        """
        if not self._counts:
            raise ValueError("holds no token, so no forward pass; record while serving some")
        layers = sorted({layer for _, layer in self._counts})
        numbers = sorted({number for number, _ in self._counts})
        used = sorted({layer for (_, layer), count_E in self._counts.items() if count_E.any()})
        none = np.zeros(0, dtype=np.int64)
        require_room(len(numbers), len(layers), self._experts)
        rows = [
            [_padded(self._counts.get((number, layer), none), self._experts) for layer in layers]
            for number in numbers
        ]
        pairs = list(itertools.pairwise(used))
        kept = self._pairs or {}
        between = None
        has_room = len(pairs) * self._experts**2 <= self._most_cells
        if pairs and has_room and kept.keys() >= set(pairs):
            between = np.stack([_padded(kept[pair], self._experts) for pair in pairs])
        return recording_of(
            np.array(rows),
            row_ids=layers,
            top_k=top_k or self._top_k or None,
            transition_MEE=None if between is None else between.astype(np.float64),
            token_LTK=self._tokens(used),
            **facts,
        )

    def _cross(self, pair: Key, here_TK: Counts, there_TK: Counts) -> None:
        size = self._experts**2
        if self._pairs is None or len({*self._pairs, pair}) * size > self._most_cells:
            self._pairs = None
            return
        flat = np.zeros(size, dtype=np.int64)
        tokens = max(1, MOST_AT_ONCE // (here_TK.shape[1] * there_TK.shape[1]))
        for start in range(0, len(here_TK), tokens):
            here, there = here_TK[start : start + tokens, :, None], there_TK[start : start + tokens]
            made_TKK = (here >= 0) & (there[:, None] >= 0)
            place_TKK = here * self._experts + there[:, None]
            flat += np.bincount(place_TKK[made_TKK], minlength=size)
        _add(self._pairs, pair, flat.reshape(self._experts, -1))

    def _tokens(self, layers: list[int]) -> Ids | None:
        """Return the sampled tokens that chose as many experts as any in every layer."""
        whole = [
            np.stack([sample[layer][:, : self._top_k] for layer in layers])
            for sample in self._samples
            if sample.keys() == set(layers)
            and min(ids.shape[1] for ids in sample.values()) >= self._top_k
        ]
        if not whole:
            return None
        tokens = np.concatenate(whole, axis=1)
        return tokens[:, (tokens >= 0).all(axis=(0, 2))]


def _add(tables: dict[Key, Counts], key: Key, more: Counts) -> None:
    """Add a table [E] or [E, E]; a smaller one of the two has zeros beyond its edge."""
    former = tables.get(key, more[:0, :0] if more.ndim == 2 else more[:0])
    size = max(len(former), len(more))
    tables[key] = _padded(former, size) + _padded(more, size)


def _padded(table: Counts, size: int) -> Counts:
    more = size - len(table)
    return np.pad(table, [(0, more)] * table.ndim) if more else table
