"""A device as its own profile describes it: rates that were reached, in place of a datasheet's.

    operations a second    the fastest GEMM of each type
    memory                 the fastest copy within the device, read and write counted
    links                  the fastest ring of the ranks: bytes of an all-gather that one rank
                           receives, over its seconds; one rank alone: the copy
    compute units          threads of the rank

What a rank reaches while its peers compute too is all that it has: ranks of one processor share
memory bandwidth, so the rates are those of a rank's share.

Not covered: accelerators, which have datasheets; links between nodes, which count as the ring.
"""

from collections.abc import Iterable
from typing import Final

from profilers.records import Measurement, MeasurementStatus, Profile
from tuner.devices.datasheet import Datasheet, Generation
from tuner.errors import SpecError

GATHERS: Final = frozenset({"all_gather", "reduce_scatter"})


def measured_sheet(profile: Profile) -> Datasheet:
    """Describe the device of a profile of processors by what was measured on it.

    Raises:
        SpecError: the profile is of accelerators, or lacks GEMMs in bf16 or copies.
    """
    machine = profile.header.machine
    if machine.device_kind != "cpu":
        raise SpecError(
            f"{machine.device!r} has no datasheet, and only processors are described by a profile"
        )
    rows = [row for row in profile.measurements if row.status is MeasurementStatus.OK]
    flop_per_s = {dtype: max(_gemm_rates(rows, dtype), default=0.0) for dtype in ("bf16", "fp32")}
    copied = max(
        (2.0 * row.case.axes["bytes"] / row.median_s for row in rows if _is_device_copy(row)),
        default=0.0,
    )
    if not (flop_per_s["bf16"] and copied):
        lacking = "copies within the device" if flop_per_s["bf16"] else "GEMMs in bf16"
        raise SpecError(
            f"the profile of {machine.device!r} has no {lacking}, which describe the device:"
            " measure the suite kernels"
        )
    ranks = max(machine.world, 1)
    linked = max(_ring_rates(rows), default=0.5 * copied)
    return Datasheet(
        name=machine.device,
        generation=Generation.PROCESSOR,
        compute_units=max(machine.threads_per_rank, 1),
        flop_per_s={name: rate for name, rate in flop_per_s.items() if rate},
        memory_bytes=machine.memory_bytes_per_device,
        memory_bytes_per_s=copied,
        scale_up_bytes_per_s=linked,
        scale_up_domain=ranks,
        devices_per_node=max(ranks // max(machine.nodes, 1), 1),
        scale_out_bytes_per_s=linked,
        host_bytes_per_s=copied,
        sources=dict.fromkeys(
            ("flop_per_s", "memory_bytes", "memory_bytes_per_s", "scale_up_bytes_per_s"),
            f"measured {profile.header.created}",
        ),
    )


def _gemm_rates(rows: Iterable[Measurement], dtype: str) -> Iterable[float]:
    for row in rows:
        case = row.case
        if case.operation == "gemm" and case.dtype == dtype and case.direction == "forward":
            yield 2.0 * case.axes["m"] * case.axes["n"] * case.axes["k"] / row.median_s


def _is_device_copy(row: Measurement) -> bool:
    return row.case.operation == "copy" and row.case.kind == "device"


def _ring_rates(rows: Iterable[Measurement]) -> Iterable[float]:
    for row in rows:
        axes = row.case.axes
        if row.case.operation == "collective" and row.case.kind in GATHERS and axes["ranks"] > 1:
            yield axes["bytes"] * (1.0 - 1.0 / axes["ranks"]) / row.median_s
