"""Counts, transitions and co-activation from the experts that each token chose.

    T tokens of one forward pass on one rank   K chosen experts   E experts   L layers   M pairs

For a token that chose the set A in one recorded layer and B in the next, every pair of A x B counts
one transition, and every ordered pair of different experts of A one co-activation. Both are counted
over flat indices e * E + f, so a pass costs T * K * K additions a layer whatever E is.

Memory is bounded however long the source: where passes are more than `most_cells` holds, two
neighbours become one from then on (each pass then spans 2, 4, ... of the source's), pairs of
experts are left out where there are too many to keep, and of more than `MOST_TOKENS` sampled tokens
every second forward's go, and are not taken from then on.
"""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.routing.overrides import Naming
from profilers.routing.recording import Counts, Floats, Recording
from profilers.routing.sums import stacked
from profilers.routing.validation import MOST_CELLS, recording_of

Ids = npt.NDArray[np.int32]

ABSENT: Final = -1
"""An id in the place of a choice that a token did not make: padding."""
MOST_TOKENS: Final = 4096
"""Sampled tokens of one recording."""
MOST_EXPERTS: Final = 16_384
MOST_AT_ONCE: Final = 2**22
"""Pairs that are counted in one go, which take some 70 MB."""


class Tally:
    """What was chosen so far; forwards are added one by one, in order of time on each rank."""

    def __init__(
        self,
        *,
        num_experts: int | None = None,
        tokens_per_forward: int = 32,
        most_cells: int = MOST_CELLS,
    ) -> None:
        if num_experts is not None and num_experts > MOST_EXPERTS:
            raise ValueError(f"{num_experts} experts of a layer; at most {MOST_EXPERTS} are read")
        self._stated = num_experts
        self._experts = num_experts or 1
        self._tokens_per_forward = tokens_per_forward
        self._most_cells = most_cells
        self._span = 1
        self._top_k = 0
        self._counts: dict[tuple[int, int], Counts] = {}
        self._sources: dict[tuple[int, int], Counts] = {}
        self._layers: set[int] = set()
        self._pairs: dict[tuple[int, int], Counts] = {}
        self._samples: list[dict[int, Ids]] = []
        self._forwards = 0
        self._stride = 1

    def add(self, ids_of_layer: Mapping[int, Ids], *, number: int, source: int = 0) -> None:
        """Add one forward of one rank: [T, K] ids for each of its layers, by absolute layer.

        Raises:
            ValueError: an id is not one of the experts, or layers disagree in their choices.
        """
        self._layers |= ids_of_layer.keys()
        for layer, ids_TK in ids_of_layer.items():
            self._check(ids_TK, layer=layer)
            flat = ids_TK[ids_TK >= 0]
            self._count(np.bincount(flat, minlength=self._experts), layer, number, source)
        if self._keeps_pairs():
            self._pair(ids_of_layer)
        self._sample(ids_of_layer)

    def recording(self, *, naming: Naming, model: str = "", workload: str = "") -> Recording:
        """Everything that was added, as a recording.

        Raises:
            ValueError: nothing was added.
        """
        if not self._counts:
            raise ValueError("holds no token; record while serving some")
        layers = list(self.layers)
        return recording_of(
            stacked(self._counts, layers),
            naming=naming,
            row_ids=layers,
            model=model,
            workload=workload,
            top_k=self._top_k,
            source_SRE=stacked(self._sources, layers),
            transition_MEE=self._squares(list(itertools.pairwise(layers))),
            coactivation_REE=self._squares([(layer, layer) for layer in layers]),
            token_RTK=self._tokens(layers),
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Every layer that something was added of, ascending."""
        return tuple(sorted(self._layers))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return not self._counts

    def _check(self, ids_TK: Ids, *, layer: int) -> None:
        if ids_TK.ndim != 2 or 0 in ids_TK.shape:
            raise ValueError(
                f"layer {layer}: chosen experts have shape {list(ids_TK.shape)},"
                " must be [tokens][choices]"
            )
        least, most = int(ids_TK.min()), int(ids_TK.max())
        if least < ABSENT:
            raise ValueError(f"layer {layer}: expert {least} is negative")
        if most >= (self._stated or MOST_EXPERTS):
            rule = self._stated or MOST_EXPERTS
            raise ValueError(f"layer {layer}: expert {most} is not one of {rule}; say --experts")
        width = int((ids_TK >= 0).sum(axis=1).max())
        self._top_k = max(self._top_k, width)
        if most >= self._experts:
            self._grow(most + 1)

    def _grow(self, experts: int) -> None:
        for table in (self._counts, self._sources):
            for key, row in table.items():
                table[key] = np.pad(row, (0, experts - row.size))
        more = experts - self._experts
        for pair, flat in self._pairs.items():
            square = flat.reshape(self._experts, self._experts)
            self._pairs[pair] = np.pad(square, ((0, more), (0, more))).reshape(-1)
        self._experts = experts

    def _count(self, row: Counts, layer: int, number: int, source: int) -> None:
        for table, key in (
            (self._counts, (number // self._span, layer)),
            (self._sources, (source, layer)),
        ):
            if key in table:
                table[key] += row
            else:
                table[key] = row.copy()
        while len(self._counts) * self._experts > self._most_cells:
            self._merge()

    def _merge(self) -> None:
        """Make one pass of every two, as often as the passes are too many."""
        passes = {number for number, _ in self._counts}
        if len(passes) == 1:
            raise ValueError(f"one pass has more than {self._most_cells} counts")
        self._span *= 2
        merged: dict[tuple[int, int], Counts] = {}
        for (number, layer), row in self._counts.items():
            key = (number // 2, layer)
            merged[key] = merged[key] + row if key in merged else row
        self._counts = merged

    def _keeps_pairs(self) -> bool:
        return 2 * len(self._layers) * self._experts**2 <= self._most_cells

    def _pair(self, ids_of_layer: Mapping[int, Ids]) -> None:
        former: tuple[int, Ids] | None = None
        for layer, ids_TK in sorted(ids_of_layer.items()):
            self._cross((layer, layer), ids_TK, ids_TK)
            if former is not None and former[1].shape[0] == ids_TK.shape[0]:
                self._cross((former[0], layer), former[1], ids_TK)
            former = (layer, ids_TK)

    def _cross(self, pair: tuple[int, int], one_TK: Ids, other_TK: Ids) -> None:
        if pair not in self._pairs:
            self._pairs[pair] = np.zeros(self._experts**2, dtype=np.int64)
        tokens = max(1, MOST_AT_ONCE // (one_TK.shape[1] * other_TK.shape[1]))
        for start in range(0, one_TK.shape[0], tokens):
            one, other = one_TK[start : start + tokens], other_TK[start : start + tokens]
            flat_TKK = one[:, :, None].astype(np.int64) * self._experts + other[:, None, :]
            if one.min() < 0 or other.min() < 0:
                made = (one >= 0)[:, :, None] & (other >= 0)[:, None, :]
                flat_TKK = flat_TKK[made]
            self._pairs[pair] += np.bincount(flat_TKK.reshape(-1), minlength=self._experts**2)

    def _sample(self, ids_of_layer: Mapping[int, Ids]) -> None:
        skipped = self._forwards % self._stride
        self._forwards += 1
        shapes = {ids_TK.shape for ids_TK in ids_of_layer.values()}
        if skipped or len(shapes) != 1:
            return
        tokens = shapes.pop()[0]
        wanted = min(self._tokens_per_forward, tokens)
        chosen = np.unique(np.linspace(0, tokens - 1, wanted).astype(np.int64))
        self._samples.append({layer: ids[chosen].copy() for layer, ids in ids_of_layer.items()})
        if len(self._samples) * self._tokens_per_forward > MOST_TOKENS:
            self._samples = self._samples[::2]
            self._stride *= 2

    def _tokens(self, layers: list[int]) -> Ids | None:
        whole = [
            np.stack([sample[layer] for layer in layers])
            for sample in self._samples
            if sample.keys() == set(layers)
        ]
        fit = [ids_LTK for ids_LTK in whole if ids_LTK.shape[2] == self._top_k]
        if not fit:
            return None
        tokens = np.concatenate(fit, axis=1)
        return tokens[:, (tokens >= 0).all(axis=(0, 2))]

    def _squares(self, pairs: list[tuple[int, int]]) -> Floats | None:
        """The counted pairs as matrices; None where some were not kept, or there are none."""
        if not pairs or not self._keeps_pairs() or not all(pair in self._pairs for pair in pairs):
            return None
        flat = np.stack([self._pairs[pair] for pair in pairs]).astype(np.float64)
        square = flat.reshape(-1, self._experts, self._experts)
        if pairs[0][0] == pairs[0][1]:
            # A choice beside itself is no pair.
            square[:, np.arange(self._experts), np.arange(self._experts)] = 0.0
        return square


def with_choices(counts: Recording, tally: Tally, *, layers: tuple[int, ...]) -> Recording:
    """Add what recorded tokens show to counts that were recorded separately.

    Args:
        counts: the recording without pairs and tokens.
        tally: the tokens; where it has other layers than the counts, it is left out.
        layers: what the tally calls the layers of the counts.
    """
    if tally.layers != layers:
        return counts
    sampled = tally.recording(naming=Naming())
    top_k = counts.top_k or sampled.top_k
    return replace(
        counts,
        top_k=top_k,
        transition_MEE=sampled.transition_MEE,
        coactivation_LEE=sampled.coactivation_LEE,
        token_LTK=sampled.token_LTK if top_k == sampled.top_k else None,
    )
