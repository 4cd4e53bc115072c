"""Recorded requests, read as a stream of chunks, whatever the file's length.

    Azure       CSV         TIMESTAMP: a date, UTC    ContextTokens, GeneratedTokens
    BurstGPT    CSV         Timestamp: seconds        Request tokens, Response tokens
    Mooncake    JSON lines  timestamp: milliseconds   input_length, output_length

Columns are found by name, so editions with more of them read alike. Times count from the first
request. A row whose prompt or answer has 0 tokens failed where it was recorded: it is left out and
counted. Everything else that cannot be is refused with its line: times that go back, are negative
or no number, tokens beyond what any model takes.

Letter: N requests of a chunk.

Source: the repositories Azure/AzurePublicDataset (editions of 2023 to 2025), HPMLL/BurstGPT and
kvcache-ai/Mooncake on GitHub. Mooncake's `hash_ids`, 512-token blocks of the prompt, are not read.

Not covered: compressed files; which requests share a prefix or a session.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
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
"""Rows of one file; more would be read for minutes."""
LONGEST_LINE: Final = 1_000_000
"""Characters; a Mooncake line of a million tokens has two thousand block ids."""
LONGEST_SPAN_S: Final = 10 * 366 * 86_400.0
"""Ten years; a longer trace has its times in another unit."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class TraceFormat(StrEnum):
    """Who recorded it."""

    AZURE = "azure"
    """CSV with dates."""
    BURST_GPT = "burstgpt"
    """CSV with seconds."""
    MOONCAKE = "mooncake"
    """JSON lines with milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceChunk:
    """Requests that follow each other in the file."""

    arrival_s_N: Floats
    """Seconds since the first request of the file."""
    input_tokens_N: Ints
    output_tokens_N: Ints
    failed: int
    """Rows of the chunk without prompt or answer, left out."""


_COLUMNS: Final[Mapping[TraceFormat, tuple[str, str, str]]] = {
    TraceFormat.AZURE: ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    TraceFormat.BURST_GPT: ("Timestamp", "Request tokens", "Response tokens"),
    TraceFormat.MOONCAKE: ("timestamp", "input_length", "output_length"),
}

_FIRST_YEAR: Final = "1970"
_LAST_YEAR: Final = "2200"
"""Nanoseconds in 64 bits reach to 2262."""

_Row = tuple[int, Any, Any, Any]
"""Line, time, prompt, answer."""


def trace_chunks(path: Path) -> Iterator[TraceChunk]:
    """Read a trace; memory holds one chunk at a time.

    Raises:
        SpecError: unreadable, of no known format, or a row that cannot be, with its line.
    """
    where = shown_path(path)
    try:
        with (
            open_regular(path) as opened,
            io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as file,
        ):
            yield from _checked(_numbered(file, where=where), where=where)
    except (IsADirectoryError, NotRegularError) as error:
        raise SpecError(f"{where}: not a file; name the file that holds the trace") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{where}: not UTF-8 text, so it is no trace") from error
    except (OSError, ValueError, csv.Error) as error:
        raise SpecError(one_line(f"{where}: cannot read the trace: {error}")) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Cells of a chunk's rows, as they were found."""

    form: TraceFormat
    cells: Sequence[_Row]


def _checked(chunks: Iterator[_Rows], *, where: str) -> Iterator[TraceChunk]:
    start: float | np.datetime64 | None = None
    last_s = 0.0
    count = 0
    for rows in chunks:
        lines, times, inputs, outputs = zip(*rows.cells, strict=True)
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
        yield TraceChunk(
            arrival_s_N=arrival_s_N[served_N],
            input_tokens_N=input_N[served_N],
            output_tokens_N=output_N[served_N],
            failed=int(np.count_nonzero(~served_N)),
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
    """Read a whole column at once, and only where that fails look for the cell to blame."""
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
        raise ValueError("a truth value")
    return np.array(cells, dtype=np.float64)


def _dates(cells: Sequence[Any]) -> NDArray[Any]:
    """Dates in UTC; `datetime64` itself would read `NaT`, and deprecates offsets."""
    plain = [cell.removesuffix("+00:00").removesuffix("Z") for cell in cells]
    if not all(_FIRST_YEAR <= cell[:4] <= _LAST_YEAR and _is_local(cell) for cell in plain):
        raise ValueError("no date")
    return np.array(plain, dtype="datetime64[ns]")


def _is_local(cell: str) -> bool:
    """No offset from UTC: neither sign comes after the date."""
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


def _numbered(file: TextIO, *, where: str) -> Iterator[_Rows]:
    lines = _lines(file, where=where)
    first = next(lines, "")
    form = _form_of(first, where=where)
    if form is TraceFormat.MOONCAKE:
        yield from _in_chunks(_json_rows(chain((first,), lines), where=where), form=form)
        return
    header = next(csv.reader([first]))
    places = [header.index(name) for name in _COLUMNS[form]]
    yield from _in_chunks(_csv_rows(lines, places=places, where=where), form=form)


def _in_chunks(cells: Iterator[_Row], *, form: TraceFormat) -> Iterator[_Rows]:
    while chunk := list(islice(cells, CHUNK_ROWS)):
        yield _Rows(form=form, cells=chunk)


def _lines(file: TextIO, *, where: str) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE:
            raise SpecError(f"{where}: line {number} is longer than {LONGEST_LINE} characters")
        yield line


def _form_of(first: str, *, where: str) -> TraceFormat:
    if first.lstrip().startswith("{"):
        return TraceFormat.MOONCAKE
    header = next(csv.reader([first]), [])
    for form, names in _COLUMNS.items():
        if set(names) <= set(header):
            return form
    forms = "; ".join(f"{form}: {', '.join(names)}" for form, names in _COLUMNS.items())
    raise SpecError(f"{where}: the first line is of no known trace ({forms})")


def _csv_rows(lines: Iterator[str], *, places: Sequence[int], where: str) -> Iterator[_Row]:
    time, prompt, answer = places
    needed = max(places) + 1
    reader = csv.reader(lines)
    for row in reader:
        line = reader.line_num + 1
        if len(row) >= needed:
            yield line, row[time], row[prompt], row[answer]
        elif row:
            raise SpecError(f"{where}: line {line}: {len(row)} cells, {needed} are needed")


def _json_rows(lines: Iterator[str], *, where: str) -> Iterator[_Row]:
    time, prompt, answer = _COLUMNS[TraceFormat.MOONCAKE]
    for number, line in enumerate(lines, start=1):
        if line.isspace():
            continue
        try:
            found = json.loads(line)
            yield number, found[time], found[prompt], found[answer]
        except RecursionError as error:
            raise SpecError(f"{where}: line {number}: nested too deeply") from error
        except (ValueError, TypeError, KeyError) as error:
            names = f"{time}, {prompt} and {answer}"
            raise SpecError(f"{where}: line {number}: no object with {names}") from error
