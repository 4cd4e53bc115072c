"""Rows that engines pack documents into, by the rules of their releases.

    first_fit_shuffle      each document in random order into the first row with room
    first_fit_decreasing   the same, longest first (both: Megatron-Bridge v0.6.0,
                           data/datasets/packing_utils.py, over all documents of a data set)
    best_fit_decreasing    longest first into the fullest row with room (TRL 1.10.0, data_utils.py,
                           `bfd`; `bfd_split` is the same after documents were split)
    knapsack               row by row the longest that still fits (LLaMA-Factory 0.9.6,
                           data/processor/processor_utils.py)
    next_fit               each document into the last row, or into a new one (torchtitan 0.3.0,
                           hf_datasets/text_datasets.py, `ChatDataset`)
    wrapped                all tokens one after the other, cut into rows (torchtitan's text)

Data sets of TRL and LLaMA-Factory are packed in pieces of 1,000 documents, the default of their
`map`. All of them shuffle rows, or pack documents that were shuffled, so that the rows of a step
are drawn at random.

Letters: D documents, R rows. Not covered: rules that balance the rows of a step (Megatron's dynamic
schedulers, verl).
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.spec.documents import Documents, TooLong

Rows = list[list[int]]
"""Tokens of each document of each row."""

MAP_DOCUMENTS: Final = 1000
"""Documents that `datasets.map` hands over at a time."""
ROWS_WANTED: Final = 256
"""Rows that are packed to draw steps from, unless that takes too many documents."""
FEWEST_DOCUMENTS: Final = 1024
MOST_DOCUMENTS: Final = 16_384
"""Documents that are packed to draw steps from, in some 0.1 s."""


def first_fit(tokens: Sequence[int], capacity: int) -> Rows:
    """Put each document into the first row with room.

    A tree over rows holds the largest room below each node; rows not begun have all of it.
    """
    leaves = 1 << max(0, len(tokens) - 1).bit_length()
    room, rows = [capacity] * (2 * leaves), defaultdict[int, list[int]](list)
    for length in tokens:
        node = 1
        while node < leaves:
            node = 2 * node + (room[2 * node] < length)
        rows[node - leaves].append(length)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [rows[row] for row in sorted(rows)]


def first_fit_decreasing(tokens: Sequence[int], capacity: int) -> Rows:
    """Put each document into the first row with room, the longest documents first."""
    return first_fit(sorted(tokens, reverse=True), capacity)


def best_fit_decreasing(tokens: Sequence[int], capacity: int) -> Rows:
    """Put each document into the fullest row with room, the longest documents first."""
    rows: Rows = []
    rooms: list[int] = []
    by_room = defaultdict[int, deque[list[int]]](deque)
    for length in sorted(tokens, reverse=True):
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, list[int]()
            rows.append(row)
        else:
            room = rooms[at]
            row = by_room[room].popleft()
            if not by_room[room]:
                rooms.pop(at)
        row.append(length)
        room -= length
        if room and not by_room[room]:
            insort(rooms, room)
        by_room[room].append(row)
    return rows


def knapsack(tokens: Sequence[int], capacity: int) -> Rows:
    """Fill row by row with the longest document that still fits."""
    rest, rows = sorted(tokens), Rows()
    while rest:
        row, room = list[int](), capacity
        while at := bisect_right(rest, room):
            row.append(rest.pop(at - 1))
            room -= row[-1]
        rows.append(row)
    return rows


def next_fit(tokens: Sequence[int], capacity: int) -> Rows:
    """Put each document into the last row, or begin a new one."""
    rows: Rows = []
    room = 0
    for length in tokens:
        if length > room:
            rows.append([])
            room = capacity
        rows[-1].append(length)
        room -= length
    return rows


def wrapped(tokens: Sequence[int], capacity: int) -> Rows:
    """Cut the tokens of all documents into full rows, wherever that is in a document."""
    rows: Rows = []
    room = 0
    for length in tokens:
        while length:
            if not room:
                rows.append([])
                room = capacity
            piece = min(length, room)
            rows[-1].append(piece)
            room, length = room - piece, length - piece
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRule:
    """A packing rule of an engine."""

    pack: Callable[[Sequence[int], int], Rows]
    documents: int = MOST_DOCUMENTS
    """Documents that are packed at a time."""
    continues: bool = False
    """A document that is longer than a row goes on in the next one, and is never cut."""


RULES: Final[Mapping[str, PackingRule]] = {
    "first_fit_shuffle": PackingRule(pack=first_fit),
    "first_fit_decreasing": PackingRule(pack=first_fit_decreasing),
    "best_fit_decreasing": PackingRule(pack=best_fit_decreasing, documents=MAP_DOCUMENTS),
    "knapsack": PackingRule(pack=knapsack, documents=MAP_DOCUMENTS),
    "next_fit": PackingRule(pack=next_fit),
    "wrapped": PackingRule(pack=wrapped, continues=True),
}
"""Packing rule by its name in the manifests of engines."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Rows of one capacity that stand for those of a run."""

    rule: str
    capacity: int
    """Tokens of a row, padding included."""
    tokens_D: Ints
    """Tokens of each document, row by row."""
    row_D: Ints
    """Row of each document."""
    documents_per_row: float
    """Documents of a row, mean; one that is split counts once."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.row_D[-1]) + 1

    @property
    def fill_ratio(self) -> float:
        """Share of the rows' tokens that are no padding."""
        return float(self.tokens_D.sum()) / (self.num_rows * self.capacity)

    @property
    def classes(self) -> tuple[tuple[float, float], ...]:
        """Tokens of a document, and the share of the rows' tokens in such documents, by octave.

        Each length is that at which causal attention computes as many pairs as the octave's
        documents; the shares sum to the fill.
        """
        octave_D = np.log2(self.tokens_D).astype(np.int64)
        tokens_O = np.bincount(octave_D, weights=self.tokens_D)
        squares_O = np.bincount(octave_D, weights=self.tokens_D.astype(np.float64) ** 2)
        slots = self.num_rows * self.capacity
        return tuple(
            (float(squares / tokens), float(tokens / slots))
            for squares, tokens in zip(squares_O, tokens_O, strict=True)
            if tokens
        )

    def total_R(self, per_document: Callable[[Floats], Floats]) -> Floats:
        """Sum a quantity that depends on a document's length over the documents of each row."""
        weights = per_document(self.tokens_D.astype(np.float64))
        return np.bincount(self.row_D, weights=weights).astype(np.float64)


def pack_rows(
    documents: Documents,
    *,
    rule: str,
    capacity: int,
    too_long: TooLong = TooLong.CUT,
    seed: int = 0,
) -> PackedRows:
    """Pack documents by an engine's rule into enough rows to draw steps from.

    Raises:
        SpecError: a document is longer than a row and refused, or no document is shorter.
    """
    applied = RULES[rule]
    stated = documents.count
    if not applied.continues or too_long in (TooLong.DROP, TooLong.REFUSE):
        documents = documents.limited(capacity, too_long)
    per_document = documents.tokens / (stated if too_long is TooLong.SPLIT else documents.count)
    wanted = round(ROWS_WANTED * capacity * documents.count / documents.tokens)
    wanted = min(max(wanted, FEWEST_DOCUMENTS), MOST_DOCUMENTS)
    tokens = documents.drawn(wanted, np.random.default_rng(seed)).tolist()
    rows = [
        row
        for first in range(0, wanted, applied.documents)
        for row in applied.pack(tokens[first : first + applied.documents], capacity)
    ]
    tokens_D = np.array([length for row in rows for length in row], dtype=np.int64)
    return PackedRows(
        rule=rule,
        capacity=capacity,
        documents_per_row=float(tokens_D.sum()) / len(rows) / per_document,
        tokens_D=tokens_D,
        row_D=np.repeat(np.arange(len(rows)), [len(row) for row in rows]),
    )
