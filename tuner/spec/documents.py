"""Lengths of the documents that a run trains on: stated in the goal, and as a histogram.

    sequence_lengths: lengths.csv                                a file (tuner/spec/length_files.py)
    sequence_lengths: {path: chats.jsonl, tokenizer: tokenizer.json}
    sequence_lengths: {kind: lognormal, mean: 1024, cv: 1.5}     a law, as serving goals state them

    L_eff = sum L^2 / sum L    tokens of the document that a token is in, on average

Letters: K distinct lengths. Not covered: documents whose lengths depend on each other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Final

import numpy as np
from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from profilers.records import Record
from tuner.arrays import Floats, Ints
from tuner.errors import SpecError
from tuner.spec.fields import Count, FilePath
from tuner.spec.serving.lengths import LengthKind, LengthLaw, quantile_tokens

LAW_DOCUMENTS: Final = 4096
"""Documents that stand for a law: its quantiles at the middles of as many equal shares."""


class TooLong(StrEnum):
    """Treatment of documents that are longer than `sequence_length`."""

    CUT = "cut"
    """The first tokens are kept."""
    SPLIT = "split"
    """A document becomes several, the last one shorter."""
    DROP = "drop"
    """The document is left out."""
    REFUSE = "refuse"
    """The spec is refused."""


class LengthFile(Record):
    """A file of lengths or of documents."""

    path: FilePath
    """Table of lengths, recorded documents, or Megatron's index of a data set; formats in
    tuner/spec/length_files.py."""
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Column or key of the lengths, token ids or text; absent: the first of `tokens`, `length`,
    `input_ids` and `text` that is there."""
    tokenizer: FilePath | None = None
    """`tokenizer.json` that counts the tokens of text; absent: documents are token ids or
    lengths."""


def _file(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


class _OrPath:
    """Schema of a file: an object, or its path alone."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, handler(core)]}


def _source(value: object) -> str:
    is_law = isinstance(value, LengthLaw) or (isinstance(value, dict) and "kind" in value)
    return "<law>" if is_law else "<file>"


SequenceLengths = Annotated[
    Annotated[LengthFile, BeforeValidator(_file), _OrPath, Tag("<file>")]
    | Annotated[LengthLaw, Tag("<law>")],
    Discriminator(_source),
]
"""A file, or a law."""


class StatedBatch(Record):
    """Size of an optimizer step in one of three units."""

    documents: Count | None = None
    """Documents of one optimizer step, on average."""
    rows: Count | None = None
    """Packed rows of one optimizer step, as Megatron-Bridge counts."""
    tokens: Annotated[int, Field(ge=1, le=2**50)] | None = None
    """Tokens of one optimizer step, those of padding included."""

    @model_validator(mode="after")
    def _has_one_unit(self) -> "StatedBatch":
        stated = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(stated) != 1:
            raise ValueError(
                f"{' and '.join(stated) or 'nothing'} is stated; write one of documents, rows and"
                " tokens, e.g. {documents: 512}"
            )
        return self


BatchSize = Annotated[
    Annotated[Count, Tag("<sequences>")] | Annotated[StatedBatch, Tag("<units>")],
    Discriminator(
        lambda value: "<units>" if isinstance(value, dict | StatedBatch) else "<sequences>"
    ),
]
"""Sequences, or a number of another unit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """Documents by their lengths."""

    tokens_K: Ints
    """Distinct lengths in ascending order."""
    count_K: Floats
    """Documents of each length."""

    def __post_init__(self) -> None:
        if not len(self.tokens_K) or np.any(np.diff(self.tokens_K) < 1) or self.tokens_K[0] < 1:
            raise ValueError("lengths must be positive, distinct and ascending, and not none")
        self.tokens_K.setflags(write=False)
        self.count_K.setflags(write=False)

    @property
    def count(self) -> float:
        """Number of documents."""
        return float(self.count_K.sum())

    @property
    def tokens(self) -> float:
        """Tokens of all documents."""
        return self.total(lambda tokens_K: tokens_K)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.tokens_K[-1])

    @property
    def effective_tokens(self) -> float:
        """Tokens of the document that a token is in, mean over tokens (L_eff)."""
        return self.total(np.square) / self.tokens

    def total(self, per_document: Callable[[Floats], Floats]) -> float:
        """Sum a quantity that depends on a document's length over all documents."""
        return float(self.count_K @ per_document(self.tokens_K.astype(np.float64)))

    def limited(self, longest: int, too_long: TooLong) -> "Documents":
        """Return the documents as they are trained, none longer than `longest`.

        Raises:
            SpecError: one is longer and refused, or none is left.
        """
        tokens_K, count_K = self.tokens_K, self.count_K
        is_long = tokens_K > longest
        if too_long is TooLong.REFUSE and is_long.any():
            raise SpecError(
                f"goal.too_long: {count_K[is_long].sum():,.0f} documents are longer than"
                f" sequence_length {longest}, the longest {self.longest}; write cut, split or drop"
            )
        if too_long is TooLong.DROP:
            if is_long.all():
                raise SpecError(
                    f"goal.too_long: drop leaves no document: the shortest has {tokens_K[0]}"
                    f" tokens, sequence_length is {longest}; write cut or split"
                )
            return Documents(tokens_K=tokens_K[~is_long], count_K=count_K[~is_long])
        whole_K = tokens_K // longest if too_long is TooLong.SPLIT else is_long.astype(np.int64)
        rest_K = tokens_K - whole_K * longest if too_long is TooLong.SPLIT else tokens_K * ~is_long
        return histogram(np.append(rest_K, longest), np.append(count_K, float(whole_K @ count_K)))

    def drawn(self, count: int, rng: np.random.Generator) -> Ints:
        """Draw lengths in random order, each length as often as its share says, up to one."""
        cumulative_K = np.cumsum(self.count_K) / self.count
        at = np.searchsorted(cumulative_K, (np.arange(count) + rng.random()) / count, side="right")
        return rng.permutation(self.tokens_K[np.minimum(at, len(cumulative_K) - 1)])


def histogram(tokens: Ints, count: Floats) -> Documents:
    """Merge equal lengths; those of no tokens or no documents are left out."""
    is_there = (tokens > 0) & (count > 0.0)
    tokens_K, at = np.unique(tokens[is_there], return_inverse=True)
    count_K = np.bincount(at, weights=count[is_there]).astype(np.float64)
    return Documents(tokens_K=tokens_K, count_K=count_K)


def documents_of_law(law: LengthLaw) -> Documents:
    """Return documents that are spread as a law says."""
    if law.kind is LengthKind.EMPIRICAL:
        values = np.minimum(np.array(law.values, dtype=np.int64), law.most)
        return histogram(values, np.array(law.weights or [1.0] * len(values)))
    shares = (np.arange(LAW_DOCUMENTS) + 0.5) / LAW_DOCUMENTS
    tokens = [quantile_tokens(law, ratio=float(share)) for share in shares]
    return histogram(np.maximum(np.rint(tokens), 1.0).astype(np.int64), np.ones(LAW_DOCUMENTS))
