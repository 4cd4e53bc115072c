"""Measured kernels of one system, every engine's, by operation, shape and software.

Of several versions of one software the newest that measured a shape counts; experts of a stated
version stay under `software@version`. An engine's GEMMs come from its own table, but for those
whose timing holds more than the kernel (`spoilt_gemms` of its traits): there the fastest of all
tables counts.

Tables of an operation are read on first use: those of a system hold a million rows,
of which one model needs a few operations.

A shape that no table holds gives None; the caller falls back to the datasheet and says so.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.arrays import Arrays
from profilers.imports.releases import release_order
from tuner.prices.serve.curves import Floats, Grid, Plane, SizeCurve, build_curve, build_plane

FREE_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": ("batch", "sequence"),
    "decode_attention": ("batch", "past"),
    "latent_attention": ("batch", "sequence"),
    "latent_decode": ("batch", "past"),
    "latent_product": ("tokens",),
    "sparse_latent_attention": ("past", "batch", "sequence"),
    "sparse_latent_decode": ("batch", "past"),
    "gated_delta": ("batch", "sequence"),
    "moe": ("tokens",),
    "collective": ("bytes",),
    "expert_all_to_all": ("tokens",),
}
"""Axes that are interpolated over; all others must match exactly."""

FASTEST: Final = ""
"""Stands for all engines together."""

Key = tuple[str | int, ...]
A2aCurves = Mapping[int, Mapping[tuple[str, str], tuple[SizeCurve, ...]]]
"""Curves over tokens by ranks, then by mode and half."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Rows of one shape."""

    free: tuple[npt.NDArray[np.int64], ...]
    time_s_N: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KernelTables:
    """Everything that was measured on one system."""

    system: str
    read: Callable[[str], Sequence[Arrays]]
    """Every table of an operation."""
    grids: dict[tuple[str, str], Grid] = field(default_factory=dict)
    """GEMMs by software and dtype; the empty software is the fastest at each size. Filled when
    first used, as is all that follows."""
    groups: dict[str, Mapping[Key, _Group]] = field(default_factory=dict)
    """Groups of rows, by operation and then by (software, kind, dtype, the axes that must
    match)."""
    curves: dict[Key, SizeCurve | None] = field(default_factory=dict)
    planes: dict[Key, Plane | None] = field(default_factory=dict)
    named: dict[str, tuple[str, ...]] = field(default_factory=dict)
    known_last_values: dict[str, Mapping[Key, tuple[int, ...]]] = field(default_factory=dict)
    known_a2a_curves: dict[tuple[int, int], A2aCurves] = field(default_factory=dict)

    def softwares(self, operation: str) -> tuple[str, ...]:
        """Engines whose kernels of an operation were measured."""
        if operation not in self.named:
            names = {str(key[0]) for key in self._rows(operation)}
            self.named[operation] = tuple(sorted(names))
        return self.named[operation]

    def last_values(self, operation: str, beginning: Key) -> tuple[int, ...]:
        """Values of the last axis of the measured shapes that begin so, ascending."""
        if operation not in self.known_last_values:
            by_key: dict[Key, list[int]] = {}
            for *first, last in self._rows(operation):
                by_key.setdefault(tuple(first), []).append(int(last))
            self.known_last_values[operation] = {
                key: tuple(sorted(last_values)) for key, last_values in by_key.items()
            }
        return self.known_last_values[operation].get(beginning, ())

    def gemm(self, *, dtype: str, n: float, k: float, software: str) -> SizeCurve | None:
        """Seconds over rows of a GEMM [rows, k] x [k, n]."""
        key: Key = ("gemm", software, dtype, int(n), int(k))
        if key not in self.curves:
            grids = self._gemm_grids()
            grid = grids.get((software, dtype)) or grids.get((FASTEST, dtype))
            self.curves[key] = None if grid is None else grid.curve(a=n, b=k)
        return self.curves[key]

    def curve(self, operation: str, key: Key) -> SizeCurve | None:
        """Seconds over the last free axis, at one sequence where there is a batch."""
        full: Key = (operation, *key)
        if full not in self.curves:
            group = self._rows(operation).get(key)
            self.curves[full] = None if group is None else _one_sequence(group, operation)
        return self.curves[full]

    def plane(self, operation: str, key: Key) -> Plane | None:
        """Seconds over batch and past."""
        full: Key = (operation, *key)
        if full not in self.planes:
            group = self._rows(operation).get(key)
            self.planes[full] = None
            if group is not None:
                x_N, y_N = group.free
                self.planes[full] = build_plane(x_N, y_N, group.time_s_N)
        return self.planes[full]

    def a2a_curves(self, *, hidden: int, top_k: int) -> A2aCurves:
        """Every measured exchange of copies so wide, whatever experts and share of the device."""
        wanted = (hidden, top_k)
        if wanted not in self.known_a2a_curves:
            by_key: dict[int, dict[tuple[str, str], tuple[SizeCurve, ...]]] = {}
            for key, group in self._rows("expert_all_to_all").items():
                if (key[3], key[4]) == wanted:
                    mode, _, half = str(key[1]).rpartition("_")
                    of_ranks = by_key.setdefault(int(key[6]), {})
                    curve = build_curve(group.free[0], group.time_s_N)
                    of_ranks[mode, half] = (*of_ranks.get((mode, half), ()), curve)
            self.known_a2a_curves[wanted] = by_key
        return self.known_a2a_curves[wanted]

    def shapes(self, operation: str) -> Iterable[Key]:
        """Every measured shape."""
        return self._rows(operation).keys()

    def _rows(self, operation: str) -> Mapping[Key, _Group]:
        if operation not in self.groups:
            self.groups[operation] = _groups(_by_version(self.read(operation)))
        return self.groups[operation]

    def _gemm_grids(self) -> Mapping[tuple[str, str], Grid]:
        if not self.grids:
            self.grids.update(_grids(_by_version(self.read("gemm"))))
        return self.grids


def _one_sequence(group: _Group, operation: str) -> SizeCurve:
    """Keep what was measured of one sequence after nothing."""
    *fixed, last_N = group.free
    keep_N = np.ones(len(last_N), dtype=np.bool_)
    for axis, values_N in zip(FREE_AXES[operation], fixed, strict=False):
        keep_N &= values_N == (0 if axis == "past" else 1)
    if not keep_N.any():
        keep_N[:] = True
    return build_curve(last_N[keep_N], group.time_s_N[keep_N])


def _groups(tables: Sequence[Arrays]) -> dict[Key, _Group]:
    """Rows of one operation by shape; later tables count."""
    kept: dict[Key, _Group] = {}
    for table in tables:
        by_key = _grouped(table)
        kept.update(by_key)
        if table.operation == "moe":
            kept.update({(f"{key[0]}@{table.version}", *key[1:]): by_key[key] for key in by_key})
    return kept


def _grids(gemm_tables: Sequence[Arrays]) -> dict[tuple[str, str], Grid]:
    dtypes = sorted({str(name) for table in gemm_tables for name in set(table.dtype_N.tolist())})
    softwares = sorted({table.software for table in gemm_tables})
    grids: dict[tuple[str, str], Grid] = {}
    for dtype in dtypes:
        for software in (FASTEST, *softwares):
            tables = [table for table in gemm_tables if software in (FASTEST, table.software)]
            grid = _grid(tables, dtype)
            if grid is not None:
                grids[software, dtype] = grid
    return grids


def _by_version(tables: Sequence[Arrays]) -> list[Arrays]:
    return sorted(tables, key=lambda table: release_order(table.version))


def _grouped(table: Arrays) -> dict[Key, _Group]:
    free = FREE_AXES[table.operation]
    fixed = [axis for axis in table.axes_N if axis not in free]
    coded = [_coded(column) for column in (table.kind_N, table.dtype_N)]
    columns = [code_N for _, code_N in coded] + [table.axes_N[axis] for axis in fixed]
    order_N = np.lexsort(columns)
    stacked = np.stack([np.asarray(column)[order_N] for column in columns])
    is_new_N = np.concatenate(([True], (np.diff(stacked, axis=1) != 0).any(axis=0)))
    start_G = np.flatnonzero(is_new_N)
    end_G = np.append(start_G[1:], len(order_N))
    by_key: dict[Key, _Group] = {}
    for start, end in zip(start_G, end_G, strict=True):
        first, rows = stacked[:, start], order_N[start:end]
        labels = [str(names[code]) for (names, _), code in zip(coded, first[:2], strict=True)]
        key: Key = (table.software, *labels, *(int(value) for value in first[2:]))
        by_key[key] = _Group(
            free=tuple(table.axes_N[axis][rows] for axis in free), time_s_N=table.time_s_N[rows]
        )
    return by_key


def _coded(texts_N: npt.NDArray[np.object_]) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Distinct words in order, and the code of each row."""
    texts = texts_N.tolist()
    words = sorted(set(texts))
    place = {word: at for at, word in enumerate(words)}
    return words, np.array([place[text] for text in texts], dtype=np.int64)


def _grid(gemm_tables: Sequence[Arrays], dtype: str) -> Grid | None:
    """Fill every engine's grid between its points, then take the fastest at each."""
    parts = [(table, np.flatnonzero(table.dtype_N == dtype)) for table in gemm_tables]
    newest = {table.software: (table, rows) for table, rows in parts if len(rows)}
    if not newest:
        return None
    axes = [
        np.unique(np.concatenate([table.axes_N[name][rows] for table, rows in newest.values()]))
        for name in ("n", "k", "m")
    ]
    best_ABM = np.full([len(axis) for axis in axes], np.inf)
    for table, rows in newest.values():
        one_ABM = np.full_like(best_ABM, np.nan)
        places = tuple(
            np.searchsorted(axis, table.axes_N[name][rows])
            for axis, name in zip(axes, ("n", "k", "m"), strict=True)
        )
        one_ABM[places] = np.log(table.time_s_N[rows])
        best_ABM = np.fmin(best_ABM, _filled(one_ABM, np.log(axes[2].astype(np.float64))))
    a_A, b_B, m_M = (np.log(axis.astype(np.float64)) for axis in axes)
    return Grid(log_a_A=a_A, log_b_B=b_B, log_m_M=m_M, log_s_ABM=_grown(best_ABM, a_A=a_A, b_B=b_B))


def _filled(log_s_ABM: Floats, log_m_M: Floats) -> Floats:
    """Interpolate over rows inside what was measured; in proportion beyond the last."""
    filled = log_s_ABM.copy()
    for a in range(log_s_ABM.shape[0]):
        for b in range(log_s_ABM.shape[1]):
            known = np.flatnonzero(~np.isnan(log_s_ABM[a, b]))
            if len(known):
                beyond_M = np.maximum(log_m_M - log_m_M[known[-1]], 0.0)
                line_M = np.interp(log_m_M, log_m_M[known], log_s_ABM[a, b, known])
                filled[a, b] = line_M + beyond_M
    return filled


def _grown(log_s_ABM: Floats, *, a_A: Floats, b_B: Floats) -> Floats:
    """Fill widths that no engine measured in proportion to the next smaller ones."""
    grown = np.where(np.isfinite(log_s_ABM), log_s_ABM, np.nan)
    for a in range(len(a_A)):
        for b in range(len(b_B)):
            if not np.isnan(grown[a, b]).all():
                continue
            if b and not np.isnan(grown[a, b - 1]).all():
                grown[a, b] = grown[a, b - 1] + (b_B[b] - b_B[b - 1])
            elif a and not np.isnan(grown[a - 1, b]).all():
                grown[a, b] = grown[a - 1, b] + (a_A[a] - a_A[a - 1])
    return np.where(np.isnan(grown), np.inf, grown)
