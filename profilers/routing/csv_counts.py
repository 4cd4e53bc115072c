"""Comma-separated counts: `layer_id,expert_id,count`, as SGLang's first recorder wrote them.

A file is one rank at one moment, `expert_distribution_rank<r>_timestamp<t>.csv`, or any file with
these columns. A folder of them is one recording: moments are passes in order of time, ranks are
summed.

Layers and experts that have no line count zero; such layers are dense.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from profilers.files import open_regular
from profilers.routing.overrides import Naming
from profilers.routing.recording import Recording
from profilers.routing.validation import recording_of, require_room

FILES: Final = "expert_distribution_rank*_timestamp*.csv"
COLUMNS: Final = ("layer_id", "expert_id", "count")
MOST_FILES: Final = 65_536
MOST_LINES: Final = 2**22
MOST_LINE: Final = 4096
MOST_EXPERTS: Final = 100_000
MOST_DIGITS: Final = 15
"""Below 2**53, what a count may be."""


def read(path: Path, *, naming: Naming) -> Recording:
    """Read a file, or a folder of them.

    Raises:
        ValueError: a column is missing, or a line is no count.
    """
    files = sorted(path.glob(FILES)) if path.is_dir() else [path]
    if not files or len(files) > MOST_FILES:
        raise ValueError(f"{len(files)} files of {FILES}; there must be 1 to {MOST_FILES}")
    count_of: dict[tuple[str, int, int, int], int] = {}
    lines = 0
    for file in files:
        rank, moment = _rank_and_moment(file)
        with open_regular(file) as opened, io.TextIOWrapper(opened, "utf-8", newline="") as stream:
            for number, (layer, expert, count) in enumerate(_rows(stream, file.name), start=2):
                lines += 1
                key = (moment, rank, layer, expert)
                if key in count_of:
                    raise ValueError(
                        f"{file.name} line {number}: layer {layer}, expert {expert} came before"
                    )
                if lines > MOST_LINES:
                    raise ValueError(f"more than {MOST_LINES} counts; store them as .npy")
                count_of[key] = count
    if not count_of:
        raise ValueError("holds no count; record while serving some")
    return _recording(count_of, naming=naming)


def _recording(count_of: dict[tuple[str, int, int, int], int], *, naming: Naming) -> Recording:
    moments, ranks, layers, experts = (
        sorted(set(column)) for column in zip(*count_of, strict=True)
    )
    shape = (len(layers), max(int(experts[-1]) + 1, naming.num_experts or 1))
    require_room(max(len(moments), len(ranks)), *shape)
    count_PRE = np.zeros((len(moments), *shape), dtype=np.int64)
    source_SRE = np.zeros((len(ranks), *shape), dtype=np.int64)
    moment_at = {each: at for at, each in enumerate(sorted(map(str, moments), key=float))}
    rank_at, layer_at = ({each: at for at, each in enumerate(ids)} for ids in (ranks, layers))
    for (moment, rank, layer, expert), count in count_of.items():
        count_PRE[moment_at[moment], layer_at[layer], expert] += count
        source_SRE[rank_at[rank], layer_at[layer], expert] += count
    row_ids = tuple(int(layer) for layer in layers)
    return recording_of(
        count_PRE,
        naming=naming,
        row_ids=row_ids,
        source_SRE=source_SRE if len(ranks) > 1 else None,
    )


def _rows(stream: TextIO, name: str) -> Iterator[tuple[int, int, int]]:
    reader = csv.reader(_bounded(stream, name))
    header = [cell.strip() for cell in next(reader, [])]
    if missing := [column for column in COLUMNS if column not in header]:
        raise ValueError(f"{name} has no column {missing[0]!r}; it needs {','.join(COLUMNS)}")
    places = [header.index(column) for column in COLUMNS]
    for row in reader:
        if not row:
            continue
        if len(row) != len(header):
            line = f"{name} line {reader.line_num}"
            raise ValueError(f"{line} has {len(row)} cells of {len(header)}; it was cut short")
        layer, expert, count = (
            _whole(row[place], f"{name} line {reader.line_num}: {column}")
            for place, column in zip(places, COLUMNS, strict=True)
        )
        if expert >= MOST_EXPERTS:
            raise ValueError(f"{name} line {reader.line_num}: expert {expert} is too large")
        yield layer, expert, count


def _bounded(stream: TextIO, name: str) -> Iterator[str]:
    while line := stream.readline(MOST_LINE + 1):
        if len(line) > MOST_LINE or "\0" in line:
            raise ValueError(f"{name} has a line that is no text of {','.join(COLUMNS)}")
        yield line


def _whole(cell: str, where: str) -> int:
    if not re.fullmatch(rf"\d{{1,{MOST_DIGITS}}}", cell.strip(), re.ASCII):
        raise ValueError(f"{where} is {cell[:40]!r}; it must be a whole number of 0 or more")
    return int(cell)


def _rank_and_moment(file: Path) -> tuple[int, str]:
    match = re.search(r"rank(\d{1,9})_timestamp(\d{1,20}(?:\.\d{1,20})?)", file.name)
    return (int(match.group(1)), match.group(2)) if match else (0, "0")
