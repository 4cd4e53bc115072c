"""Stand-ins for tests: a clock that is told how long things take, machines, rows and profiles."""

from collections.abc import Sequence
from dataclasses import dataclass

from profilers.clock import MAX_LOOPS, HostClock
from profilers.records import (
    Case,
    Machine,
    Measurement,
    Profile,
    ProfileHeader,
    TableInfo,
)


class UnmappedClock(HostClock):
    """The processor's, on which every repeat counts, also those that wait for pages."""

    def page_faults(self) -> int:
        return 0


class FakeClock:
    """Time passes only when told to."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self.pages = 0
        """Mapped by now."""
        self.held_s: list[float] = []

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds

    def now_s(self) -> float:
        return self._now_s

    def mark(self) -> object:
        return self._now_s

    def between_s(self, pairs: Sequence[tuple[object, object]]) -> tuple[float, ...]:
        return tuple(
            last - first
            for first, last in pairs
            if isinstance(first, float) and isinstance(last, float)
        )

    def page_faults(self) -> int:
        return self.pages

    def hold(self, seconds: float) -> None:
        self.held_s.append(seconds)

    @property
    def most_queued(self) -> int:
        return MAX_LOOPS


def fake_machine(*, world: int = 1, device: str = "Fake 9000") -> Machine:
    """A machine that does not exist."""
    return Machine(
        hostname="nowhere",
        device=device,
        device_kind="cpu",
        num_devices=8,
        memory_bytes_per_device=2**34,
        cores=8,
        host_memory_bytes=2**34,
        world=world,
        threads_per_rank=1,
        oversubscribed=False,
        libraries={"torch": "2.0"},
    )


def gemm_case(m: int, *, n: int = 256, k: int = 256, dtype: str = "fp32") -> Case:
    """One dense product, forward."""
    return Case(operation="gemm", dtype=dtype, direction="forward", axes={"m": m, "n": n, "k": k})


def gemm_row(m: int, *times_s: float, rank: int = 0) -> Measurement:
    """A dense product that took these times."""
    return Measurement(case=gemm_case(m), rank=rank, times_s=times_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeBenchmark:
    """Products that take a microsecond for each row."""

    listed: tuple[Case, ...]
    operation: str = "gemm"
    weight: float = 1.0
    refined_axes: tuple[str, ...] = ("m",)

    def note(self) -> str:
        return ""

    def cases(self) -> Sequence[Case]:
        return self.listed

    def measure(self, case: Case, *, budget_s: float) -> tuple[Measurement, ...]:
        return (Measurement(case=case, times_s=(1e-6 * case.axes["m"],) * (1 + (budget_s > 0.0))),)


def fake_profile(rows: Sequence[Measurement], *, machine: Machine | None = None) -> Profile:
    """A profile in memory with complete tables."""
    operations = sorted({row.case.operation for row in rows})
    tables = {
        name: TableInfo(
            rows=sum(row.case.operation == name for row in rows), complete=True, seconds=1.0
        )
        for name in operations
    }
    header = ProfileHeader(
        moetune_version="0.1.0",
        created="2026-01-01T00:00:00+00:00",
        machine=machine or fake_machine(),
        tables=tables,
    )
    return Profile(header=header, measurements=tuple(rows))
