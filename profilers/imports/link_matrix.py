"""Bandwidth between every two nodes: a CSV matrix, a profile, nccl-tests runs on pairs.

The CSV names its unit in the first cell and the nodes in the first row and column; a cell is the
bandwidth from the row's node to the column's, all NICs of both together, and the diagonal is
ignored:

    bytes_per_s,node-a,node-b
    node-a,,3.9e11
    node-b,3.7e11,

A folder holds one file per pair instead, of `sendrecv_perf` with one rank on each node or of
`alltoall_perf` with equally many on both. In the first each rank sends the whole size to the other;
in the second half of what the g ranks of a node send, g size / 2, crosses to the other node. The
bandwidth of a pair is the best of its sizes, in each direction and over all NICs that took part.

A profile of several nodes has a table of links (profilers/links/pairs.py); of a pair of nodes what
all its lanes carried together counts.

Letters: N nodes. Not covered: what a link carries while others are busy too.
"""

import csv
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.errors import ProfileUnreadableError
from profilers.files import NotRegularError, TooLargeError, read_bounded
from profilers.imports.nccl_tests import Log, read_logs
from profilers.links.matrix import links_of
from profilers.store import holds_profile, read_profile

CORNER: Final = "bytes_per_s"
"""First cell of a CSV matrix."""
MAX_MATRIX_BYTES: Final = 64 * 2**20
MAX_NODES: Final = 2048
LEAST_BYTES_PER_S: Final = 1.0
MOST_BYTES_PER_S: Final = 1e15
"""Largest bandwidth of a cell, in bytes per second: a thousand times the fastest link of today."""
_HOST: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""Host names that a launcher accepts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkMatrix:
    """Measured bandwidths between nodes."""

    nodes: tuple[str, ...]
    """Host names, in the order of the CSV; sorted where a folder was read."""
    bytes_per_s_NN: npt.NDArray[np.float64]
    """Bandwidth from the row's node to the column's; `inf` on the diagonal."""


def read_link_matrix(path: Path) -> LinkMatrix:
    """Read a CSV matrix, a stored profile, or a folder of pairwise tests.

    Raises:
        UnknownNameError: a file of a folder does not say its collective.
        ProfileUnreadableError: the CSV is no square of positive numbers, a file of a folder is no
            test of a pair, a pair was not tested, or a name is none that a launcher can use.
    """
    if holds_profile(path):
        link_matrix = _of_profile(path)
    else:
        link_matrix = _of_pairs(path) if _is_folder(path) else _of_table(path)
    for node in link_matrix.nodes:
        if not _HOST.fullmatch(node):
            raise ProfileUnreadableError(
                f"{path}: {node[:60]!r} is no host name; use letters, digits, dots, dashes and "
                "underscores"
            )
    link_matrix.bytes_per_s_NN.setflags(write=False)
    return link_matrix


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise ProfileUnreadableError(f"{path}: {error.strerror}") from error


def _of_profile(path: Path) -> LinkMatrix:
    profile = read_profile(path, operations=("link",))
    machine = profile.header.machine
    hosts = machine.hosts[:: max(machine.ranks_per_node, 1)]
    if len(hosts) < 2:
        raise ProfileUnreadableError(
            f"{path}: knows no two nodes by name; profile them again, all together"
        )
    if twice := [host for host, count in Counter(hosts).items() if count > 1]:
        raise ProfileUnreadableError(f"{path}: two nodes are called {twice[0]!r}")
    carried: dict[tuple[int, int, int], float] = {}
    for link in links_of(profile):
        if not link.is_inside:
            key = link.lanes, link.sender_node, link.receiver_node
            carried[key] = carried.get(key, 0.0) + link.bytes_per_s
    rates_NN = np.full((len(hosts), len(hosts)), np.nan)
    # More lanes come later and count.
    for (_, sender, receiver), rate in sorted(carried.items()):
        rates_NN[sender, receiver] = rate
    np.fill_diagonal(rates_NN, np.inf)
    if np.isnan(rates_NN).any():
        raise ProfileUnreadableError(
            f"{path}: not every pair of nodes was measured; profile all of them with --suite links"
        )
    return LinkMatrix(nodes=hosts, bytes_per_s_NN=rates_NN)


def link_matrix_csv(matrix: LinkMatrix) -> str:
    """Write a matrix as the CSV that `read_link_matrix` reads."""
    lines = [",".join((CORNER, *matrix.nodes))]
    for row, node in enumerate(matrix.nodes):
        rates = matrix.bytes_per_s_NN[row]
        cells = ("" if row == column else repr(float(rate)) for column, rate in enumerate(rates))
        lines.append(",".join((node, *cells)))
    return "\n".join(lines) + "\n"


def _of_table(path: Path) -> LinkMatrix:
    rows = _cells(path)
    corner, *names = rows[0] if rows else [""]
    if corner != CORNER:
        raise ProfileUnreadableError(
            f"{path}: begins with {corner[:60]!r}; the first cell of a link matrix is {CORNER!r}"
        )
    nodes = tuple(names)
    twice = next((node for node in nodes if nodes.count(node) > 1), None)
    if twice is not None or not 2 <= len(nodes) <= MAX_NODES:
        wrong = f"names {twice!r} twice" if twice else f"names {len(nodes)} nodes"
        raise ProfileUnreadableError(f"{path}: {wrong}; 2 to {MAX_NODES} nodes, each once")
    lines: dict[str, list[str]] = {}
    for node, *line in rows[1:]:
        if node not in nodes or node in lines:
            wrong = "has two rows" if node in lines else "has no column"
            raise ProfileUnreadableError(
                f"{path}: node {node[:60]!r} {wrong}; one of each per node"
            )
        if len(line) != len(nodes):
            raise ProfileUnreadableError(
                f"{path}: the row of node {node!r} has {len(line)} cells, there are {len(nodes)} "
                "nodes"
            )
        lines[node] = line
    missing = [node for node in nodes if node not in lines]
    if missing:
        raise ProfileUnreadableError(f"{path}: node {missing[0]!r} has a column and no row")
    bytes_per_s_NN = np.full((len(nodes), len(nodes)), np.inf)
    for row, sender in enumerate(nodes):
        for column, receiver in enumerate(nodes):
            if row != column:
                bytes_per_s_NN[row, column] = _positive(
                    lines[sender][column], path, sender, receiver
                )
    return LinkMatrix(nodes=nodes, bytes_per_s_NN=bytes_per_s_NN)


def _cells(path: Path) -> list[list[str]]:
    try:
        if not path.exists():
            raise ProfileUnreadableError(f"{path}: there is no link matrix; name a CSV or a folder")
        text = read_bounded(path, most_bytes=MAX_MATRIX_BYTES).decode("utf-8-sig")
    except (IsADirectoryError, NotRegularError, TooLargeError) as error:
        raise ProfileUnreadableError(
            f"{path}: must be a folder of tests or a regular file of at most "
            f"{MAX_MATRIX_BYTES} bytes"
        ) from error
    except OSError as error:
        raise ProfileUnreadableError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProfileUnreadableError(f"{path}: not UTF-8 text, so it is no link matrix") from error
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    except csv.Error as error:
        raise ProfileUnreadableError(f"{path}: no CSV: {error}") from error
    return [row for row in rows if any(row)]


def _positive(cell: str, path: Path, sender: str, receiver: str) -> float:
    try:
        rate = float(cell)
    except ValueError:
        rate = math.nan
    if not LEAST_BYTES_PER_S <= rate <= MOST_BYTES_PER_S:
        raise ProfileUnreadableError(
            f"{path}: {cell[:60]!r} from node {sender!r} to {receiver!r} is no bandwidth; it must"
            f" be a number of bytes per second, {LEAST_BYTES_PER_S:g} to {MOST_BYTES_PER_S:g}"
        )
    return rate


def _of_pairs(path: Path) -> LinkMatrix:
    best: dict[tuple[str, str], float] = {}
    for log in read_logs(path):
        pair, rate = _rate(log)
        best[pair] = max(best.get(pair, 0.0), rate)
    nodes = tuple(sorted({host for pair in best for host in pair}))
    bytes_per_s_NN = np.full((len(nodes), len(nodes)), np.inf)
    for row, second in enumerate(nodes):
        for column, first in enumerate(nodes[:row]):
            if (first, second) not in best:
                raise ProfileUnreadableError(
                    f"{path}: no test of the nodes {first} and {second}; run one for every pair"
                )
            bytes_per_s_NN[row, column] = bytes_per_s_NN[column, row] = best[first, second]
    return LinkMatrix(nodes=nodes, bytes_per_s_NN=bytes_per_s_NN)


def _rate(log: Log) -> tuple[tuple[str, str], float]:
    count = Counter(rank.host for rank in log.ranks)
    kind = log.rows[0].case.kind
    per_node = max(count.values())
    if len(count) != 2 or min(count.values()) != per_node:
        raise ProfileUnreadableError(
            f"{log.path}: runs on {dict(count)}; a test of a pair has two nodes with equal ranks"
        )
    if kind == "send_recv" and per_node == 1:
        crossing_ratio = 1.0
    elif kind == "all_to_all":
        crossing_ratio = per_node / 2.0
    else:
        raise ProfileUnreadableError(
            f"{log.path}: {kind} of {per_node} ranks per node says nothing about the link; run "
            "sendrecv_perf with one rank per node, or alltoall_perf"
        )
    first, second = sorted(count)
    rate = max(crossing_ratio * row.case.axes["bytes"] / row.median_s for row in log.rows)
    return (first, second), rate
