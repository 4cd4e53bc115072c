"""Recorded requests, read as a stream of chunks from files of any length.

    Azure       CSV         TIMESTAMP: a date, UTC    ContextTokens, GeneratedTokens
    BurstGPT    CSV         Timestamp: seconds        Request tokens, Response tokens
    Mooncake    JSON lines  timestamp: milliseconds   input_length, output_length, hash_ids

Columns are found by name, so further columns are ignored. Times count from the first request. A row
with 0 input or output tokens is a failed request: it is counted and left out. Other invalid rows
are refused with their line: times that decrease, are negative or no number, token counts beyond the
limit.

`hash_ids` name the 512-token blocks of a prompt, the last one partly filled: an id identifies its
block and all before it, so that equal leading ids are a shared prefix. They are read on request; a
prompt of I tokens has ceil(I / 512) of them, or none if not recorded.

Letters: N requests of a chunk, B blocks of all of them.

Source: the repositories Azure/AzurePublicDataset (editions of 2023 to 2025), HPMLL/BurstGPT and
kvcache-ai/Mooncake (FAST25-release) on GitHub.

Not covered: compressed files; blocks of other sizes.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
from numpy.typing import NDArray

from profilers.files import NotRegularError, open_regular
from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_path, shown_value
from tuner.spec.serving.lengths import LARGEST_TOKENS

CHUNK_ROWS: Final = 65_536
MOST_ROWS: Final = 50_000_000
"""Most rows of one file; more would take minutes."""
LONGEST_LINE: Final = 1_000_000
"""Most characters of a line; a Mooncake line of a million tokens has two thousand block ids."""
BLOCK_TOKENS: Final = 512
"""Tokens of a block (Mooncake, FAST'25, appendix)."""
CHUNK_BLOCKS: Final = 4_000_000
"""Block ids of a chunk: 32 MB."""
LONGEST_SPAN_S: Final = 10 * 366 * 86_400.0
"""Longest span of a trace, ten years in seconds; a longer one has its times in another unit."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TraceFormat(StrEnum):
    """Format of a trace."""

    AZURE = "azure"
    """CSV with dates."""
    BURST_GPT = "burstgpt"
    """CSV with seconds."""
    MOONCAKE = "mooncake"
    """JSON lines with milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """Block ids of the prompts of some requests, one after the other."""

    id_B: Ints
    count_N: Ints
    """Number of ids of each request; 0 if none were recorded."""

    @property
    def end_N(self) -> Ints:
        """End of each request's ids in `id_B`."""
        return np.cumsum(self.count_N)

    def lists(self) -> Iterator[list[int]]:
        """Yield the ids of each request."""
        start = 0
        for end in self.end_N.tolist():
            yield self.id_B[start:end].tolist()
            start = end

    def taken(self, chosen_N: NDArray[np.bool_]) -> "Blocks":
        """Return the blocks of a slice of requests."""
        return Blocks(
            id_B=self.id_B[np.repeat(chosen_N, self.count_N)], count_N=self.count_N[chosen_N]
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceChunk:
    """Consecutive requests of the file."""

    arrival_s_N: Floats
    """Seconds since the first request of the file."""
    input_tokens_N: Ints
    output_tokens_N: Ints
    failed: int
    """Rows of the chunk without input or output tokens, left out."""
    blocks: Blocks | None = None
    """Prompt blocks; None if not requested or not in the format."""


_COLUMNS: Final[Mapping[TraceFormat, tuple[str, str, str]]] = {
    TraceFormat.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceFormat.BURST_GPT: ("Timestamp", "Request tokens", "Response tokens"),
    TraceFormat.MOONCAKE: ("timestamp", "input_length", "output_length"),
}

BLOCK_IDS: Final = "hash_ids"
"""Name of Mooncake's field of block ids."""
_FIRST_YEAR: Final = "1970"
_LAST_YEAR: Final = "2200"
"""Last year of a date: nanoseconds in 64 bits reach to 2262."""

_Row = tuple[int, Any, Any, Any, Any]
"""Line, time, input, output, block ids."""


def trace_chunks(path: Path, *, with_blocks: bool = False) -> Iterator[TraceChunk]:
    """Read a trace, one chunk in memory at a time.

    Args:
        path: of the file.
        with_blocks: read the block ids of prompts, where the format has them.

    Raises:
        SpecError: unreadable, of no known format, or an invalid row, with its line.
    """
    where = shown_path(path)
    try:
        with (
            open_regular(path) as opened,
            io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file,
        ):
            yield from _check_chunks(
                _number_rows(file, where=where), where=where, with_blocks=with_blocks
            )
    except (IsADirectoryError, NotRegularError) as error:
        raise SpecError(f"{where}: not a file; name the file that holds the trace") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}: not UTF-8 text, so it is no trace") from error
    except (OSError, ValueError, csv.Error) as error:
        raise SpecError(one_line(f"{where}: cannot read the trace: {error}")) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _RawRows:
    """Raw cells of a chunk's rows."""

    form: TraceFormat
    cells: Sequence[_Row]


def _check_chunks(
    chunks: Iterator[_RawRows], *, where: str, with_blocks: bool
) -> Iterator[TraceChunk]:
    start: float | np.datetime64 | None = None
    last_s = 0.0
    count = 0
    for rows in chunks:
        lines, times, inputs, outputs, hashes = zip(*rows.cells, strict=True)
        complain = _complainer(lines, where=where)
        clock = _dates if rows.form is TraceFormat.AZURE else _numbers
        time_N = _column(clock, times, complain=complain)
        start = time_N[0] if start is None else start
        arrival_s_N = _seconds(time_N, start=start, form=rows.form)
        previous_s_N = np.concatenate(([last_s], arrival_s_N[:-1]))
        complain(~(np.abs(arrival_s_N) <= LONGEST_SPAN_S), times, "is no time of this trace")
        complain(arrival_s_N < previous_s_N, times, "is before the row above; sort by time")
        input_N = _tokens(inputs, complain=complain)
        output_N = _tokens(outputs, complain=complain)
        last_s = float(arrival_s_N[-1])
        count += len(arrival_s_N)
        if count > MOST_ROWS:
            raise SpecError(f"{where}: more than {MOST_ROWS} rows; cut the trace")
        served_N = (input_N > 0) & (output_N > 0)
        blocks = None
        if with_blocks and rows.form is TraceFormat.MOONCAKE:
            blocks = _blocks(hashes, input_N, complain=complain).taken(served_N)
        yield TraceChunk(
            arrival_s_N=arrival_s_N[served_N],
            input_tokens_N=input_N[served_N],
            output_tokens_N=output_N[served_N],
            failed=int(np.count_nonzero(~served_N)),
            blocks=blocks,
        )
    if not count:
        raise SpecError(f"{where}: no request; name a trace with at least one row")


_Complain = Callable[[NDArray[np.bool_], Sequence[Any], str], None]


def _complainer(lines: Sequence[int], *, where: str) -> _Complain:
    def complain(wrong_N: NDArray[np.bool_], cells: Sequence[Any], rule: str) -> None:
        if wrong_N.any():
            index = int(wrong_N.argmax())
            raise SpecError(f"{where}: line {lines[index]}: {shown_value(cells[index])} {rule}")

    return complain


def _column(
    read: Callable[[Sequence[Any]], NDArray[Any]], cells: Sequence[Any], *, complain: _Complain
) -> NDArray[Any]:
    """Read a whole column at once; if that fails, find the invalid cell."""
    try:
        return read(cells)
    except (ValueError, TypeError, OverflowError):
        wrong_N = np.array([not _is_readable(read, cell) for cell in cells])
        complain(wrong_N, cells, f"is no {'date' if read is _dates else 'number'}")
        raise


def _is_readable(read: Callable[[Sequence[Any]], NDArray[Any]], cell: Any) -> bool:
    try:
        read([cell])
    except (ValueError, TypeError, OverflowError):
        return False
    return True


def _numbers(cells: Sequence[Any]) -> NDArray[Any]:
    if any(cell is True or cell is False for cell in cells):
        raise ValueError("a boolean")
    return np.array(cells, dtype=np.float64)


def _dates(cells: Sequence[Any]) -> NDArray[Any]:
    """Dates in UTC; `datetime64` would accept `NaT`, and deprecates offsets."""
    plain = [cell.removesuffix("+00:00").removesuffix("Z") for cell in cells]
    if not all(_FIRST_YEAR <= cell[:4] <= _LAST_YEAR and _is_local(cell) for cell in plain):
        raise ValueError("no date")
    return np.array(plain, dtype="datetime64[ns]")


def _is_local(cell: str) -> bool:
    """No UTC offset: neither sign after the date."""
    return "+" not in cell and "-" not in cell[10:]


def _seconds(time_N: NDArray[Any], *, start: Any, form: TraceFormat) -> Floats:
    since_N = time_N - start
    if form is TraceFormat.AZURE:
        return np.asarray(since_N / np.timedelta64(1, "s"), dtype=np.float64)
    since_N = np.where(time_N < 0.0, np.nan, since_N)
    return np.asarray(since_N * (1e-3 if form is TraceFormat.MOONCAKE else 1.0))


def _tokens(cells: Sequence[Any], *, complain: _Complain) -> Ints:
    found_N = _column(_numbers, cells, complain=complain)
    whole_N = (found_N >= 0.0) & (found_N <= LARGEST_TOKENS)
    whole_N &= found_N == np.floor(found_N)
    complain(~whole_N, cells, f"is no number of tokens from 0 to {LARGEST_TOKENS}")
    return found_N.astype(np.int64)


def _blocks(hashes: Sequence[Any], input_N: Ints, *, complain: _Complain) -> Blocks:
    listed = [[] if ids is None else ids for ids in hashes]
    readable_N = np.array([isinstance(ids, list) for ids in listed])
    complain(~readable_N, hashes, "is no list of block ids")
    count_N = np.array([len(ids) for ids in listed], dtype=np.int64)
    needed_N = -(-input_N // BLOCK_TOKENS)
    complain(
        (count_N > 0) & (count_N != needed_N),
        [f"{len(ids)} hash_ids" for ids in listed],
        f"are not one for every {BLOCK_TOKENS} tokens of the prompt, the last partly filled",
    )
    whole_N = np.array(
        [all(type(block) is int and 0 <= block < 2**62 for block in ids) for ids in listed]
    )
    complain(~whole_N, hashes, "holds an id that is no whole number from 0")
    return Blocks(id_B=np.array(list(chain.from_iterable(listed)), dtype=np.int64), count_N=count_N)


def _number_rows(file: TextIO, *, where: str) -> Iterator[_RawRows]:
    lines = _lines(file, where=where)
    first = next(lines, "")
    form = _detect_format(first, where=where)
    if form is TraceFormat.MOONCAKE:
        yield from _in_chunks(_json_rows(chain((first,), lines), where=where), form=form)
        return
    header = next(csv.reader([first]))
    places = [header.index(name) for name in _COLUMNS[form]]
    yield from _in_chunks(_csv_rows(lines, places=places, where=where), form=form)


def _in_chunks(cells: Iterator[_Row], *, form: TraceFormat) -> Iterator[_RawRows]:
    chunk: list[_Row] = []
    blocks = 0
    for cell in cells:
        chunk.append(cell)
        blocks += len(cell[-1]) if isinstance(cell[-1], list) else 0
        if len(chunk) == CHUNK_ROWS or blocks >= CHUNK_BLOCKS:
            yield _RawRows(form=form, cells=chunk)
            chunk, blocks = [], 0
    if chunk:
        yield _RawRows(form=form, cells=chunk)


def _lines(file: TextIO, *, where: str) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise SpecError(f"{where}: line {number} is longer than {LONGEST_LINE} characters")
        yield line


def _detect_format(first: str, *, where: str) -> TraceFormat:
    if first.lstrip().startswith("{"):
        return TraceFormat.MOONCAKE
    header = next(csv.reader([first]), [])
    for form, names in _COLUMNS.items():
        if set(names) <= set(header):
            return form
    forms = "; ".join(f"{form}: {', '.join(names)}" for form, names in _COLUMNS.items())
    raise SpecError(f"{where}: the first line is of no known trace ({forms})")


def _csv_rows(lines: Iterator[str], *, places: Sequence[int], where: str) -> Iterator[_Row]:
    time, prompt, output = places
    needed = max(places) + 1
    reader = csv.reader(lines)
    for row in reader:
        line = reader.line_num + 1
        if len(row) >= needed:
            yield line, row[time], row[prompt], row[output], None
        elif row:
            raise SpecError(f"{where}: line {line}: {len(row)} cells, {needed} are needed")


def _json_rows(lines: Iterator[str], *, where: str) -> Iterator[_Row]:
    time, prompt, output = _COLUMNS[TraceFormat.MOONCAKE]
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            record = json.loads(line)
            blocks = record.get(BLOCK_IDS) if isinstance(record, dict) else None
            yield number, record[time], record[prompt], record[output], blocks
        except RecursionError as error:
            raise SpecError(f"{where}: line {number}: nested too deeply") from error
        except (ValueError, TypeError, KeyError) as error:
            names = f"{time}, {prompt} and {output}"
            raise SpecError(f"{where}: line {number}: no object with {names}") from error
