"""Read the text that nccl-tests prints: one collective per file, one line per message size.

The programs (github.com/NVIDIA/nccl-tests) print comments that begin with `#`, among them one line
per rank with its host and device, and rows whose last eight columns are time, algorithm and bus
bandwidth and errors, out of place and then in place. A time is microseconds, the mean of the timed
iterations of the slowest rank; the size is that of the larger buffer of a rank. With the default
settings one group holds all ranks; a split run says each rank's group, of which the first counts.

Not covered: rooted collectives (broadcast, reduce, gather, scatter), which no profile holds.
"""

import importlib.metadata
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from profilers.errors import ProfileUnreadableError, UnknownNameError, first_problem
from profilers.files import NotRegularError, TooLargeError, read_bounded
from profilers.imports.result import Imported
from profilers.records import (
    Case,
    Machine,
    Measurement,
    Profile,
    ProfileHeader,
    Source,
    TableInfo,
)

COLLECTIVES: Final[Mapping[str, str]] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
}
"""Our names of collectives, by nccl-tests'."""

MAX_TEXT_BYTES: Final = 16 * 2**20
MAX_FILES: Final = 1000
SUFFIXES: Final = (".txt", ".log", ".out")
TRAILING: Final = 8
"""Columns of one row from the first time on."""

_RANK: Final = re.compile(
    r"#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s+(.+)"
)
_SIZE: Final = re.compile(r"[0-9]+")
_LIBRARY: Final = re.compile(r"nccl-library=(\d+)")
_STARTING: Final = re.compile(r"Collective test starting: (\w+?)_perf")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclTestsRank:
    """One line of the list of devices."""

    rank: int
    group: int
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """One file."""

    path: Path
    ranks: tuple[NcclTestsRank, ...]
    nccl: str
    """`NCCL` and its version; empty where the file does not say it."""
    rows: tuple[Measurement, ...]


def read(path: Path | None, *, options: Mapping[str, str], created: str) -> Imported:
    """Read one file, or every text file of a folder.

    Raises:
        UnknownNameError: the collective is named neither by the file nor by the options.
        ProfileUnreadableError: a file is missing, too large, or not such output.
    """
    if path is None:
        raise ProfileUnreadableError("nccl-tests needs a path: a file of its output, or a folder")
    logs = read_logs(path, collective=options.get("collective"))
    rows: dict[str, Measurement] = {}
    for row in itertools.chain.from_iterable(log.rows for log in logs):
        rows.setdefault(row.case.id, row)
    origin = Counter(log.nccl or "NCCL" for log in logs for _ in log.rows)
    note = "; ".join(f"{count} rows of {name}" for name, count in origin.most_common())
    header = ProfileHeader(
        moetune_version=importlib.metadata.version("moetune"),
        created=created,
        machine=_machine(logs),
        tables={
            "collective": TableInfo(
                rows=len(rows), complete=True, seconds=0.0, note=f"nccl-tests: {note}"
            )
        },
    )
    return Imported(profile=Profile(header=header, measurements=tuple(rows.values())), left_out=())


def read_logs(path: Path, *, collective: str | None = None) -> list[Log]:
    """Read one file, or every text file of a folder, each by itself.

    Raises:
        UnknownNameError: a collective is named neither by its file nor here.
        ProfileUnreadableError: a file is missing, too large, or not such output.
    """
    return [_log(file, collective) for file in _files(path)]


def _files(path: Path) -> list[Path]:
    try:
        if not path.is_dir():
            return [path]
        files = [file for file in sorted(path.iterdir()) if file.suffix in SUFFIXES]
    except OSError as error:
        raise ProfileUnreadableError(f"{path}: {error.strerror}") from error
    if not 0 < len(files) <= MAX_FILES:
        raise ProfileUnreadableError(
            f"{path}: {len(files)} files end in {', '.join(SUFFIXES)}; 1 to {MAX_FILES} are read"
        )
    return files


def _log(path: Path, named: str | None) -> Log:
    try:
        text = read_bounded(path, most_bytes=MAX_TEXT_BYTES).decode("utf-8", errors="replace")
    except (IsADirectoryError, NotRegularError, TooLargeError) as error:
        raise ProfileUnreadableError(
            f"{path}: must be a regular file of at most {MAX_TEXT_BYTES} bytes"
        ) from error
    except OSError as error:
        raise ProfileUnreadableError(f"{path}: {error.strerror}") from error
    ranks = tuple(_ranks(text))
    if not ranks:
        raise ProfileUnreadableError(f"{path}: lists no ranks; is it what nccl-tests printed?")
    kind = _collective(text, path, named)
    shape = _shape(path, ranks)
    rows = tuple(_rows(path, text, kind=kind, shape=shape))
    if not rows:
        raise ProfileUnreadableError(f"{path}: holds no row of sizes and times")
    library = _LIBRARY.search(text)
    nccl = _version(int(library.group(1)[:9])) if library else ""
    return Log(path=path, ranks=ranks, nccl=nccl, rows=rows)


def _ranks(text: str) -> Iterator[NcclTestsRank]:
    for line in text.splitlines():
        matched = _RANK.match(line[:500])
        if matched:
            rank, group, host, device = matched.groups()
            yield NcclTestsRank(
                rank=int(rank), group=int(group or 0), host=host, device=device.strip()
            )


def _collective(text: str, path: Path, named: str | None) -> str:
    starting = _STARTING.search(text)
    inside = [name for name in COLLECTIVES if name in path.name]
    name = named or (starting.group(1) if starting else inside[0] if len(inside) == 1 else "")
    if name not in COLLECTIVES:
        raise UnknownNameError(
            f"{path}: collective {name!r} is not one of {', '.join(COLLECTIVES)}; say --collective"
        )
    return COLLECTIVES[name]


def _shape(path: Path, ranks: Sequence[NcclTestsRank]) -> tuple[int, int, int]:
    """Ranks of a group, how far they are apart, and ranks in all."""
    first = sorted(rank.rank for rank in ranks if rank.group == ranks[0].group)
    strides = {right - left for left, right in itertools.pairwise(first)} or {1}
    if len(strides) != 1 or 0 in strides:
        raise ProfileUnreadableError(f"{path}: the ranks of a group are not evenly apart: {first}")
    return len(first), strides.pop(), len(ranks)


def _rows(
    path: Path, text: str, *, kind: str, shape: tuple[int, int, int]
) -> Iterator[Measurement]:
    ranks, stride, world = shape
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if len(words) < TRAILING + 3 or not _SIZE.fullmatch(words[0]):
            continue
        size, time_us = int(words[0][:18]), _time_us(words)
        if time_us is None or time_us <= 0.0:
            raise ProfileUnreadableError(f"{path}: line {number}: no time in {line.strip()[:80]!r}")
        if size == 0:
            continue
        axes = {"bytes": size, "ranks": ranks, "stride": stride, "world": world}
        try:
            yield Measurement(
                case=Case(operation="collective", kind=kind, axes=axes),
                source=Source.IMPORTED,
                times_s=(time_us * 1e-6,),
            )
        except ValidationError as error:
            raise ProfileUnreadableError(
                f"{path}: line {number}: {first_problem(error)}"
            ) from error


def _time_us(words: Sequence[str]) -> float | None:
    """Out of place where that was run, else in place."""
    for word in (words[-TRAILING], words[-TRAILING // 2]):
        try:
            time_us = float(word)
        except ValueError:
            continue
        if math.isfinite(time_us):
            return time_us
    return None


def _version(code: int) -> str:
    """NCCL_VERSION(x, y, z) is 10000 x + 100 y + z since 2.9, 1000 x + 100 y + z before."""
    if code < 10_000:
        return f"NCCL {code // 1000}.{code % 1000 // 100}.{code % 100}"
    return f"NCCL {code // 10_000}.{code % 10_000 // 100}.{code % 100}"


def _machine(logs: Sequence[Log]) -> Machine:
    """Return the machine that the files describe; memory, cores and driver are not in them."""
    devices = sorted({rank.device for log in logs for rank in log.ranks})
    if len(devices) > 1:
        raise ProfileUnreadableError(
            f"the files are of unlike devices: {', '.join(devices[:4])}; import them one by one"
        )
    largest = max(logs, key=lambda log: len(log.ranks))
    hosts = Counter(rank.host for rank in largest.ranks)
    versions = sorted({log.nccl.removeprefix("NCCL ") for log in logs if log.nccl})
    return Machine(
        hostname=largest.ranks[0].host,
        device=devices[0],
        device_kind="cuda",
        num_devices=max(hosts.values()),
        memory_bytes_per_device=0,
        cores=0,
        host_memory_bytes=0,
        nodes=len(hosts),
        world=len(largest.ranks),
        threads_per_rank=0,
        oversubscribed=False,
        libraries={"nccl": versions[-1]} if versions else {},
    )
