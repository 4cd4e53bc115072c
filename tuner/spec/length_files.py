"""Reader of the lengths of documents, a piece of a file at a time, whatever its size.

    .csv                a table with a column of tokens and, if each line stands for several
                        documents, one named `count`; without a header the first two columns
    .jsonl, .json       a line a document: an object with a number of tokens, token ids, or text
    .parquet            a column of numbers of tokens, or of token ids
    .arrow, .feather    the same, as a stream or a file of Arrow
    .idx                Megatron's index of a data set: "MMIDIDX", version 1 (Megatron-Core,
                        core_v0.19.0, core/datasets/indexed_dataset.py), without its .bin

Read are lengths alone. Not covered: indices of multimodal data, compressed text.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from profilers.files import open_regular
from tuner.arrays import Floats, Ints
from tuner.errors import SpecError
from tuner.spec.documents import Documents, LengthFile, histogram
from tuner.spec.files import one_line, shown_path, shown_value
from tuner.spec.serving.lengths import LARGEST_TOKENS

if TYPE_CHECKING:
    import pyarrow as pa

MOST_RECORDS: Final = 10**8
"""Documents or lines of one file; a table of `tokens,count` states more in few lines."""
PIECE: Final = 65_536
"""Documents whose lengths are merged at a time."""
ROWS_DECODED: Final = 1024
"""Rows of token ids in memory at a time."""

COLUMNS: Final = ("tokens", "length", "input_ids", "text")
"""Names of the column that is read unless one is stated."""

_WHOLE: Final = re.compile(r"[0-9]+")
_INDEX_MAGIC: Final = b"MMIDIDX\x00\x00"

Piece = tuple[Ints, Floats]
"""Lengths, and how many documents have each."""


def read_documents(stated: LengthFile) -> Documents:
    """Read the lengths of a file's documents.

    Raises:
        SpecError: unreadable, of no known format, empty, or with a length that is none.
    """
    shown, suffix = shown_path(stated.path), stated.path.suffix.lower()
    reader = READERS.get(suffix)
    if reader is None:
        raise SpecError(
            f"goal.sequence_lengths: {shown}: the name ends in none of {', '.join(READERS)};"
            " write a table with the header tokens,count"
        )
    merged: Documents | None = None
    records = 0
    with _refused(shown):
        for tokens, count in reader(stated):
            records += len(tokens)
            if records > MOST_RECORDS:
                raise ValueError(
                    f"more than {MOST_RECORDS:,} documents; state a table of tokens,count, or a"
                    " sample"
                )
            _check(tokens, first=records - len(tokens) + 1)
            if merged is not None:
                tokens = np.append(tokens, merged.tokens_K)
                count = np.append(count, merged.count_K)
            merged = histogram(tokens, count)
        if merged is None:
            raise ValueError("no documents; state at least one length")
    return merged


@contextmanager
def _refused(shown: str) -> Iterator[None]:
    """Turn what can be wrong with a file into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(str(error))
        raise SpecError(f"goal.sequence_lengths: {shown}: cannot be read: {reason}") from error
    except (ValueError, KeyError, csv.Error) as error:
        raise SpecError(f"goal.sequence_lengths: {shown}: {one_line(str(error))}") from error


def _check(tokens: Ints, *, first: int) -> None:
    """Refuse lengths out of range; the position is that of the document in the file."""
    wrong = np.flatnonzero((tokens < 1) | (tokens > LARGEST_TOKENS))
    if len(wrong):
        raise ValueError(
            f"document {first + wrong[0]:,} has {tokens[wrong[0]]:,} tokens; a length is 1 to"
            f" {LARGEST_TOKENS:,}"
        )


def _text(path: Path) -> TextIOWrapper:
    """Open a regular file to read its text, line ends as they are."""
    return TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="")


def _csv(stated: LengthFile) -> Iterator[Piece]:
    with _text(stated.path) as file:
        lines = csv.reader(file)
        head, at = next((line for line in lines if line), []), (0, 1)
        if head and not any(_WHOLE.fullmatch(cell.strip()) for cell in head):
            names = [cell.strip() for cell in head]
            counts = names.index("count") if "count" in names else len(names)
            head, at = [], (names.index(_column(names, stated)), counts)
        rows = chain([head], lines)
        yield from _pieces(_pair(line, at, lines.line_num) for line in rows if line)


def _pair(line: list[str], at: tuple[int, int], number: int) -> tuple[int, int]:
    tokens, count = (line[place].strip() if place < len(line) else None for place in at)
    return _whole(tokens, number), 1 if count is None else _whole(count, number, what="count")


def _whole(value: Any, number: int, *, what: str = "number of tokens") -> int:
    """Read a positive whole number from text or JSON."""
    is_text = isinstance(value, str) and _WHOLE.fullmatch(value) and len(value) < 19
    is_number = isinstance(value, int) and not isinstance(value, bool)
    whole = int(value) if is_text or is_number else 0
    if not 0 < whole < 2**62:
        raise ValueError(
            f"line {number}: {shown_value(value)} is no {what}; write a whole number of at least 1"
        )
    return whole


def _json_lines(stated: LengthFile) -> Iterator[Piece]:
    encode = None if stated.tokenizer is None else _encoder(stated.tokenizer)
    with _text(stated.path) as file:
        numbered = ((n, line) for n, line in enumerate(file, 1) if line.strip())
        yield from _pieces((_json_length(line, n, stated, encode), 1) for n, line in numbered)


def _json_length(
    line: str, number: int, stated: LengthFile, encode: Callable[[str], int] | None
) -> int:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"line {number}: {shown_value(record)} where an object belongs")  # noqa: TRY004 - one kind is caught
    value = record[_column(record, stated)]
    if isinstance(value, list):
        return _whole(len(value), number)
    if not isinstance(value, str):
        return _whole(value, number)
    if encode is None:
        raise ValueError(f"line {number}: text needs `tokenizer`, the path of a tokenizer.json")
    return _whole(encode(value), number)


def _encoder(path: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ValueError(
            "text needs the package tokenizers (pip install tokenizers), or record token ids"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises no narrower type.
        raise ValueError(f"{shown_path(path)} is no tokenizer.json: {error}") from error
    return lambda text: len(tokenizer.encode(text).ids)


def _pieces(pairs: Iterable[tuple[int, int]]) -> Iterator[Piece]:
    """Gather lengths and their counts to arrays."""
    while piece := tuple(islice(pairs, PIECE)):
        gathered = np.array(piece, dtype=np.int64)
        yield gathered[:, 0], gathered[:, 1].astype(np.float64)


def _column(names: Iterable[str], stated: LengthFile) -> str:
    known = list(names)
    wanted = COLUMNS if stated.column is None else (stated.column,)
    chosen = next((name for name in wanted if name in known), None)
    if chosen is None:
        raise ValueError(
            f"no column or key {' or '.join(map(repr, wanted))} among"
            f" {', '.join(map(repr, known[:8]))}; state `column`"
        )
    return chosen


def _parquet(stated: LengthFile) -> Iterator[Piece]:
    import pyarrow.parquet as pq

    with open_regular(stated.path) as opened, pq.ParquetFile(opened) as file:
        name = _column(file.schema_arrow.names, stated)
        yield from _arrow_pieces(
            batch.column(0) for batch in file.iter_batches(batch_size=ROWS_DECODED, columns=[name])
        )


def _arrow(stated: LengthFile) -> Iterator[Piece]:
    from pyarrow import ipc

    with open_regular(stated.path) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
        name = _column(reader.schema.names, stated)
        batches = (
            map(reader.get_batch, range(reader.num_record_batches)) if is_file else iter(reader)
        )
        yield from _arrow_pieces(batch.column(name) for batch in batches)


def _arrow_pieces(columns: "Iterator[pa.Array]") -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.compute as pc

    for column in columns:
        if not len(column):
            continue
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            column = pc.list_value_length(column)
        if not pa.types.is_integer(column.type) or column.null_count:
            raise ValueError(
                f"a column of {column.type} with {column.null_count} nulls; lengths are whole"
                " numbers, documents lists of token ids"
            )
        tokens = column.to_numpy(zero_copy_only=False).astype(np.int64)
        yield tokens, np.ones(len(tokens))


def _index(stated: LengthFile) -> Iterator[Piece]:
    """Read an index: lengths of sequences, and the first sequence of each document."""
    with open_regular(stated.path) as file:
        if file.read(9) != _INDEX_MAGIC:
            raise ValueError("no index of Megatron: it does not begin with MMIDIDX")
        version, _, sequences, marks = (
            int(_numbers(file, dtype, 1)[0]) for dtype in ("<u8", "u1", "<u8", "<u8")
        )
        if version != 1 or not 0 < marks - 1 <= sequences <= MOST_RECORDS:
            raise ValueError(
                f"an index of version {version} with {sequences:,} sequences of {marks - 1:,}"
                f" documents; version 1 and up to {MOST_RECORDS:,} are read"
            )
        tokens = _numbers(file, "<i4", sequences).astype(np.int64)
        file.seek(8 * sequences, 1)
        first = _numbers(file, "<i8", marks)[:-1]
        if first[0] or np.any(np.diff(first) < 1) or first[-1] >= sequences:
            raise ValueError("the documents of the index are empty or not in order")
        tokens = np.add.reduceat(tokens, first)
        yield tokens, np.ones(len(tokens))


def _numbers(file: BinaryIO, dtype: str, count: int) -> Any:
    numbers = np.frombuffer(file.read(np.dtype(dtype).itemsize * count), dtype=dtype)
    if len(numbers) < count:
        raise ValueError(f"the index ends after {len(numbers):,} of {count:,} numbers")
    return numbers


READERS: Final[Mapping[str, Callable[[LengthFile], Iterator[Piece]]]] = {
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".idx": _index,
}
"""Reader of a format by the end of a file's name."""


def lengths_csv(documents: Documents) -> str:
    """Write documents as a table that is read back alike."""
    lines = zip(documents.tokens_K.tolist(), documents.count_K.tolist(), strict=True)
    return "tokens,count\n" + "".join(f"{tokens},{count:.0f}\n" for tokens, count in lines)
