"""Counts, transitions and sampled tokens of a source that is read forward by forward.

    T tokens of one forward pass on one rank   K chosen experts   E experts   L layers   M pairs

For a token that chose the set A in one recorded layer and B in the next, every pair of A x B counts
one transition. They are counted over flat indices e * E + f, so a pass costs T * K * K additions a
layer whatever E is.

Memory is bounded however long the source: where passes are more than `most_cells` holds, two
neighbours become one from then on (each pass then spans 2, 4, ... of the source's), pairs of
experts are left out where there are too many to keep, and of more than `MOST_TOKENS` sampled tokens
every second forward's go, and are not taken from then on.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.routing.overrides import Naming
from profilers.routing.recording import Counts, Floats, Recording
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
    """Counts and choices so far, in order of time on each rank."""

    def __init__(
        self,
        *,
        num_experts: int | None = None,
        tokens_per_forward: int = 32,
        most_cells: int = MOST_CELLS,
    ) -> None:
        if num_experts is not None and num_experts > MOST_EXPERTS:
            raise ValueError(f"{num_experts} experts of a layer; at most {MOST_EXPERTS} are read")
        self._most_experts = num_experts or MOST_EXPERTS
        self._experts = num_experts or 1
        self._tokens_per_forward = tokens_per_forward
        self._most_cells = most_cells
        self._span = 1
        self._top_k = 0
        self._counts: dict[tuple[int, int], Counts] = {}
        self._pairs: dict[tuple[int, int], Counts] | None = {}
        self._samples: list[dict[int, Ids]] = []
        self._forwards = 0
        self._stride = 1

    @property
    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not self._counts

    def add(self, ids_of_layer: Mapping[int, Ids], *, number: int) -> None:
        """Add one forward of one rank whose choices are all that is known of it.

        Args:
            ids_of_layer: [T, K] ids of each layer, by absolute layer.
            number: of the pass.

        Raises:
            ValueError: an id is not one of the experts.
        """
        self.choose(ids_of_layer)
        for layer, ids_TK in ids_of_layer.items():
            count_E = np.bincount(ids_TK[ids_TK >= 0], minlength=self._experts)
            self.count(count_E, layer=layer, number=number)

    def count(self, count_E: Counts, *, layer: int, number: int) -> None:
        """Add counts of one layer to a pass."""
        key = (number // self._span, layer)
        self._counts[key] = self._counts[key] + count_E if key in self._counts else count_E
        while len(self._counts) * self._experts > self._most_cells:
            self._merge()

    def choose(self, ids_of_layer: Mapping[int, Ids]) -> None:
        """Add the choices of one forward that are counted elsewhere: pairs and sampled tokens."""
        for layer, ids_TK in ids_of_layer.items():
            self._check(ids_TK, layer=layer)
        before: tuple[int, Ids] | None = None
        for layer, ids_TK in sorted(ids_of_layer.items()):
            if before is not None and len(before[1]) == len(ids_TK):
                self._cross((before[0], layer), before[1], ids_TK)
            before = (layer, ids_TK)
        self._sample(ids_of_layer)

    def recording(
        self,
        *,
        naming: Naming,
        model: str = "",
        workload: str = "",
        top_k: int | None = None,
        num_decoder_layers: int | None = None,
    ) -> Recording:
        """Everything that was added, as a recording.

        Raises:
            ValueError: nothing was added.
        """
        if not self._counts:
            raise ValueError("holds no token, so no forward pass; record while serving some")
        layers = sorted({layer for _, layer in self._counts})
        used = sorted({layer for (_, layer), count_E in self._counts.items() if count_E.any()})
        return recording_of(
            self._stacked(layers),
            naming=naming,
            row_ids=layers,
            model=model,
            workload=workload,
            top_k=top_k or self._top_k or None,
            num_decoder_layers=num_decoder_layers,
            transition_MEE=self._transitions(list(itertools.pairwise(used))),
            token_LTK=self._tokens(used),
        )

    def _check(self, ids_TK: Ids, *, layer: int) -> None:
        if ids_TK.ndim != 2 or 0 in ids_TK.shape:
            raise ValueError(
                f"layer {layer}: chosen experts have shape {list(ids_TK.shape)},"
                " must be [tokens][choices]"
            )
        least, most = int(ids_TK.min()), int(ids_TK.max())
        if least < ABSENT:
            raise ValueError(f"layer {layer}: expert {least} is negative")
        if most >= self._most_experts:
            raise ValueError(
                f"layer {layer}: expert {most} is not one of {self._most_experts}; say --experts"
            )
        self._top_k = max(self._top_k, int((ids_TK >= 0).sum(axis=1).max()))
        if most >= self._experts:
            self._grow(most + 1)

    def _grow(self, experts: int) -> None:
        more = experts - self._experts
        for key, row in self._counts.items():
            self._counts[key] = np.pad(row, (0, more))
        if self._pairs is not None and len(self._pairs) * experts**2 > self._most_cells:
            self._pairs = None
        kept = self._pairs or {}
        for pair, flat in kept.items():
            square = flat.reshape(self._experts, self._experts)
            kept[pair] = np.pad(square, ((0, more), (0, more))).reshape(-1)
        self._experts = experts

    def _merge(self) -> None:
        """Make one pass of every two, as often as the passes are too many."""
        if len({number for number, _ in self._counts}) == 1:
            raise ValueError(f"one pass has more than {self._most_cells} counts")
        self._span *= 2
        former, self._counts = self._counts, {}
        for (number, layer), row in former.items():
            key = (number // 2, layer)
            self._counts[key] = self._counts[key] + row if key in self._counts else row

    def _cross(self, pair: tuple[int, int], one_TK: Ids, other_TK: Ids) -> None:
        places = self._experts**2
        if self._pairs is None or len({*self._pairs, pair}) * places > self._most_cells:
            self._pairs = None
            return
        tokens = max(1, MOST_AT_ONCE // (one_TK.shape[1] * other_TK.shape[1]))
        for start in range(0, one_TK.shape[0], tokens):
            one, other = one_TK[start : start + tokens], other_TK[start : start + tokens]
            flat_TKK = one[:, :, None].astype(np.int64) * self._experts + other[:, None, :]
            made = (one >= 0)[:, :, None] & (other >= 0)[:, None, :]
            counted = np.bincount(flat_TKK[made], minlength=places)
            self._pairs[pair] = self._pairs.get(pair, 0) + counted

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

    def _tokens(self, layers: Sequence[int]) -> Ids | None:
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

    def _transitions(self, pairs: Sequence[tuple[int, int]]) -> Floats | None:
        """The counted pairs as matrices; None where some were not kept, or there are none."""
        kept = self._pairs or {}
        if not pairs or not kept.keys() >= set(pairs):
            return None
        flat = np.stack([kept[pair] for pair in pairs]).astype(np.float64)
        return flat.reshape(-1, self._experts, self._experts)

    def _stacked(self, layers: Sequence[int]) -> Counts:
        """Stack counts of passes and layers as [P, L, E]; 0 where there are none."""
        numbers = sorted({number for number, _ in self._counts})
        none = np.zeros(self._experts, dtype=np.int64)
        return np.stack(
            [[self._counts.get((number, layer), none) for layer in layers] for number in numbers]
        )
