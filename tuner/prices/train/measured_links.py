"""Ratios of a profile's collectives over the formulas of tuner/prices/train/collectives.py.

Message sizes are those of nccl-tests: the larger buffer of a rank. Times are first made monotonic
in the size, which a search relies on. Of groups with as many ranks and the same placement, that of
the largest job is used, in which the most groups run concurrently.

DeepEP's dispatch and combine are measured in tokens; their bytes are counted as in
tuner/costs/train/experts.py (a token once per rank of its own domain and once per other domain).
The mean of dispatch and combine is compared with the formula of a merged all-to-all; of several
numbers of SMs the fastest is used. Low-latency kernels are for inference and left out.

Not covered: several libraries for one collective; NCCL's counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from profilers.interpolation import CollectiveCurve, Curve
from profilers.records import Measurement, MeasurementStatus
from profilers.series import Series
from tuner.config.columns import Numbers
from tuner.config.shapes import Hardware
from tuner.prices.train.collective_ratios import (
    CollectiveRatios,
    GroupRatios,
    MeasuredHardware,
)
from tuner.prices.train.collectives import (
    MERGED,
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    distinct_places,
    send_s,
)
from tuner.prices.train.constants import Constants

KINDS = ("all_gather", "all_reduce", "all_to_all", "send_recv")
TWO_BYTES = ("", "bf16", "fp16")
"""Types under which collectives of two-byte elements are stored."""
MERGED_HALVES = ("normal_dispatch", "normal_combine", "ht_dispatch", "ht_combine")
"""Endings of the names of DeepEP's kernels for many tokens."""
BF16_BYTES = 2.0


def with_measured_links(
    hardware: Hardware,
    constants: Constants,
    curves: Mapping[Series, Curve],
    rows: Sequence[Measurement] = (),
) -> Hardware:
    """Return the machine with its measured collectives, or as it was where there are none.

    Args:
        hardware: of the pool, numbers alone.
        constants: numbers alone.
        curves: of the profile.
        rows: its measurements, of which the expert all-to-all is read.
    """
    groups = {
        kind: ratios
        for kind in KINDS
        if (ratios := _groups(kind, _curve(curves, kind), hardware, constants))
    }
    if merged := _merged(rows, hardware, constants):
        groups[MERGED] = merged
    if not groups:
        return hardware
    plain = {field.name: getattr(hardware, field.name) for field in fields(Hardware)}
    return MeasuredHardware(**plain, collectives=CollectiveRatios(groups=groups))


def _curve(curves: Mapping[Series, Curve], kind: str) -> CollectiveCurve | None:
    """The measured curve; a reduce-scatter moves as many bytes as an all-gather."""
    for name in (kind, "reduce_scatter") if kind == "all_gather" else (kind,):
        for dtype in TWO_BYTES:
            curve = curves.get(Series("collective", name, dtype, ""))
            if isinstance(curve, CollectiveCurve):
                return curve
    return None


def _groups(
    kind: str, curve: CollectiveCurve | None, hardware: Hardware, constants: Constants
) -> tuple[GroupRatios, ...]:
    if curve is None:
        return ()
    by_group: dict[tuple[int, int], GroupRatios] = {}
    for (ranks, stride, _), (log_bytes, log_s) in sorted(
        curve.log_times.items(), key=lambda item: item[0][2]
    ):
        inside = int(np.clip(float(hardware.domain) // stride, 1, ranks))
        if ranks < 2:
            continue
        group = Group(ranks=float(ranks), inside=float(inside))
        formula = _formula_s(kind, np.exp(log_bytes), group, hardware, constants)
        by_group[ranks, inside] = GroupRatios(
            ranks=ranks,
            inside=inside,
            log_bytes_M=log_bytes,
            log_ratio_M=np.maximum.accumulate(log_s) - np.log(formula),
        )
    return tuple(by_group.values())


def _formula_s(
    kind: str, size: Numbers, group: Group, hardware: Hardware, constants: Constants
) -> Numbers:
    if kind == "all_gather":
        return all_gather_s(size, group, hardware, constants)
    if kind == "all_reduce":
        return all_reduce_s(size, group, hardware, constants)
    if kind == "send_recv":
        return send_s(size, group, hardware, constants)
    near = size * (group.inside - 1.0) / group.ranks
    far = size * (group.ranks - group.inside) / group.ranks
    return all_to_all_s(near, far, group, hardware, constants)


def _merged(
    rows: Sequence[Measurement], hardware: Hardware, constants: Constants
) -> tuple[GroupRatios, ...]:
    fastest: dict[tuple[int, ...], dict[str, float]] = {}
    for row in rows:
        case = row.case
        is_wanted = case.operation == "expert_all_to_all" and case.kind.endswith(MERGED_HALVES)
        if not is_wanted or row.status is not MeasurementStatus.OK:
            continue
        place = tuple(size for name, size in case.axes.items() if name != "units")
        halves = fastest.setdefault(place, {})
        half = case.kind.rpartition("_")[2]
        halves[half] = min(halves.get(half, np.inf), row.expected_s)
    points: dict[tuple[int, int], dict[float, list[float]]] = {}
    names = ("tokens", "hidden", "top_k", "experts", "ranks", "nodes")
    for place, halves in fastest.items():
        if len(halves) < 2:
            continue
        tokens, hidden, top_k, experts, ranks, nodes = map(float, place[: len(names)])
        if ranks < 2.0:
            continue
        inside = ranks / nodes
        group = Group(ranks=ranks, inside=inside)
        sent = BF16_BYTES * hidden * tokens
        far = sent * distinct_places(nodes, experts, top_k) * (nodes - 1.0) / nodes
        near = sent * distinct_places(ranks, experts, top_k) * (inside - 1.0) / inside
        formula = all_to_all_s(near, far, group, hardware, constants, is_merged=1.0)
        ratio = 0.5 * sum(halves.values()) / float(np.ravel(formula)[0])
        sizes = points.setdefault((int(ranks), int(inside)), {})
        sizes.setdefault(float(near + far), []).append(float(np.log(ratio)))
    return tuple(
        GroupRatios(
            ranks=ranks,
            inside=inside,
            log_bytes_M=np.log(np.array(sorted(sizes))),
            log_ratio_M=np.array([float(np.mean(sizes[size])) for size in sorted(sizes)]),
        )
        for (ranks, inside), sizes in sorted(points.items())
    )
