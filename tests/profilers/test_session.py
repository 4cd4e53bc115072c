"""Profiles really measured, in seconds: alone, and by two ranks that the session starts."""

import contextlib
import errno
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from profilers.errors import (
    MachineMismatchError,
    MissingLibraryError,
    ProfilerError,
    ProfileUnreadableError,
    ProfileUnwritableError,
    RankError,
    UnknownNameError,
)
from profilers.interpolation import fit_curves
from profilers.job import Job
from profilers.launch import run_workers
from profilers.links.collectives import BUILDERS
from profilers.links.matrix import links_of
from profilers.progress import ProgressEvent
from profilers.records import Case, MeasurementStatus, ProfileHeader
from profilers.session import measure_profile
from profilers.store import read_header, read_profile, write_header
from tests.expect import present, refused
from tests.patience import patient_s
from tests.profilers.testing import gemm_case
from tests.rows import each_row

ALONE: dict[str, str] = {}
BUDGET_S = 16.0
RENDEZVOUS = "meet"


class Crash(BaseException):
    """Stands for whatever ends a process in the middle."""


def link_case(kind: str, *, size: int = 4096, world: int = 2) -> Case:
    axes = {"bytes": size, "ranks": 2, "stride": 1, "world": world}
    return Case(operation="collective", kind=kind, axes=axes)


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def signal_rank_1(number: signal.Signals) -> None:
    """Signal a rank that may be gone by now: progress is told of what came in before."""
    for child in children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "profilers.worker" in child.cmdline() and child.environ().get("RANK") == "1":
                child.send_signal(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoRanks:
    """What two ranks measured, and what was seen of them meanwhile."""

    out: Path
    scratch: Path
    """Their temporary folder."""
    header: ProfileHeader
    events: tuple[ProgressEvent, ...]
    wall_s: float
    addresses: Mapping[int, Set[str]]
    """At which each process could be reached."""
    modes: Set[int]
    """Of the folders in which they met."""


@pytest.fixture(scope="module")
def two_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    sockets_of_children: Callable[[], dict[int, set[str]]],
    outside_card: str,
) -> TwoRanks:
    """A profile of everything; cases of it may be asked for."""
    folder = tmp_path_factory.mktemp("two-ranks")
    scratch = folder / "tmp"
    scratch.mkdir()
    events: list[ProgressEvent] = []
    seen: dict[int, set[str]] = {}
    modes: set[int] = set()

    def look(event: ProgressEvent) -> None:
        events.append(event)
        for process, addresses in sockets_of_children().items():
            seen.setdefault(process, set()).update(addresses)
        modes.update(stat.S_IMODE(file.parent.stat().st_mode) for file in scratch.rglob(RENDEZVOUS))

    started_s = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        # What a cluster's login script exports for jobs of several nodes.
        patch.setenv("GLOO_SOCKET_IFNAME", outside_card)
        patch.setattr("tempfile.tempdir", str(scratch))
        header = measure_profile(
            folder / "profile",
            budget_s=BUDGET_S,
            ranks=2,
            device="cpu",
            extra_cases=(
                *(gemm_case(77), gemm_case(77, dtype="bf16")),
                link_case("all_to_all", size=777),
            ),
            progress=look,
            environment=ALONE,
        )
    assert header is not None
    return TwoRanks(
        out=folder / "profile",
        scratch=scratch,
        header=header,
        events=tuple(events),
        wall_s=time.monotonic() - started_s,
        addresses=seen,
        modes=modes,
    )


@pytest.mark.slow
def test_two_ranks_measure_everything_within_the_budget(two_ranks: TwoRanks) -> None:
    header, events = two_ranks.header, two_ranks.events
    # Starting two ranks takes seconds, on a busy machine many; without a budget it is minutes.
    assert two_ranks.wall_s < BUDGET_S + 60.0
    assert all(info.complete for info in header.tables.values())
    assert header.machine.world == 2
    profile = read_profile(two_ranks.out)
    assert profile.header == header
    assert {row.case.kind for row in profile.rows("collective")} == set(BUILDERS)
    assert {row.rank for row in profile.rows("gemm")} == {0, 1}
    assert {row.rank for row in profile.rows("collective")} == {0}
    assert {row.rank for row in profile.rows("every_rank")} == {0, 1}
    assert {(link.sender, link.receiver) for link in links_of(profile)} == {(0, 1), (1, 0)}
    assert all(link.bytes_per_s > 1e6 for link in links_of(profile))
    skews = profile.rows("rendezvous")
    assert skews
    for row in skews:
        assert (row.status, row.rank) == (MeasurementStatus.OK, 0), row.error
        assert all(0.0 < time_s < math.inf for time_s in row.times_s)
    measured = {row.case.id for row in profile.measurements if row.status is MeasurementStatus.OK}
    assert {gemm_case(77).id, gemm_case(77, dtype="bf16").id} <= measured
    assert link_case("all_to_all", size=777).id in measured
    # A processor's default grid has none of these.
    asked = {"linear_scan", "linear_update", "index_scores"}
    assert {event.table for event in events} == header.tables.keys() - asked
    assert events[0].left_s >= events[-1].left_s >= 0.0
    assert fit_curves(profile)
    assert children() == []


@pytest.mark.slow
def test_ranks_listen_only_on_loopback_and_connect_in_a_private_folder(two_ranks: TwoRanks) -> None:
    # Both ranks lived and listened for each other while they were looked at.
    assert len(two_ranks.addresses) == 2
    assert set().union(*two_ranks.addresses.values()) == {"127.0.0.1"}
    assert two_ranks.modes == {0o700}
    assert list(two_ranks.scratch.iterdir()) == []


def test_a_rank_that_dies_is_named_and_complete_tables_stay(tmp_path: Path) -> None:
    def kill_rank_1(event: ProgressEvent) -> None:
        if event.table == "storage":
            signal_rank_1(signal.SIGKILL)

    with refused(RankError, match="rank 1 failed: died with SIGKILL"):
        measure_profile(
            tmp_path,
            suites=("links", "storage"),
            budget_s=20.0,
            ranks=2,
            device="cpu",
            extra_cases=(
                link_case("all_reduce"),
                *(
                    Case(operation="storage", kind="write", axes={"bytes": 2**power})
                    for power in range(12, 24)
                ),
            ),
            progress=kill_rank_1,
            environment=ALONE,
        )
    assert children() == []
    profile = read_profile(tmp_path)
    assert profile.header.tables["collective"].complete
    assert not profile.header.tables["storage"].complete
    assert profile.rows("collective")
    assert read_profile(tmp_path, with_incomplete=True).rows("storage")


def test_what_a_rank_that_died_has_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, rank = tmp_path / "child", tmp_path / "rank"
    rank.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {said}\nkill -KILL $$\n")
    rank.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(rank))
    job = Job(out=str(tmp_path / "out"), suites=("links",), budget_s=60.0, device="cpu")
    with pytest.raises(RankError, match="rank 0 failed: died with SIGKILL"):
        run_workers(job, ranks=1, progress=lambda _event: None)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(said.read_text())).wait(timeout=patient_s(5.0))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(tmp_path: Path) -> None:
    def stop_rank_1(_event: ProgressEvent) -> None:
        signal_rank_1(signal.SIGSTOP)

    job = Job(
        out=str(tmp_path),
        suites=("links",),
        budget_s=60.0,
        device="cpu",
    )
    with pytest.raises(RankError, match=r"rank \d made no progress for 4 s"):
        run_workers(job, ranks=2, progress=stop_rank_1, silence_s=4.0)
    assert children() == []


def test_an_interrupt_leaves_no_process_and_no_half_table(tmp_path: Path) -> None:
    def interrupt(_event: ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_profile(
            tmp_path,
            suites=("links",),
            budget_s=60.0,
            ranks=2,
            device="cpu",
            progress=interrupt,
            environment=ALONE,
        )
    assert children() == []
    # What was measured of the table in progress is kept, where there was time to.
    assert {file.name for file in tmp_path.iterdir()} <= {"profile.json", "every_rank.parquet"}
    assert not read_header(tmp_path).tables["every_rank"].complete
    assert read_profile(tmp_path, with_incomplete=True).header == read_header(tmp_path)


def test_ranks_leave_when_their_parent_is_killed_and_take_their_folder_with_them(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    script = (
        "from pathlib import Path\n"
        "from profilers.session import measure_profile\n"
        f"measure_profile(Path({str(tmp_path / 'profile')!r}), suites=('links',), ranks=2,\n"
        "    budget_s=60.0, device='cpu', environment={},\n"
        "    progress=lambda event: print('measuring', flush=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    ) as parent:
        assert present(parent.stdout).readline() == "measuring\n"
        ranks = psutil.Process(parent.pid).children()
        assert list(scratch.glob("moetune-ranks-*/meet"))
        parent.kill()
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=patient_s(60.0))
    assert alive == []
    assert list(scratch.glob("moetune-*")) == []


def test_resuming_keeps_complete_tables_and_measures_the_rest(tmp_path: Path) -> None:
    def crash(event: ProgressEvent) -> None:
        if event.table != "gemm":
            raise Crash

    with pytest.raises(Crash):
        measure_profile(
            tmp_path,
            suites=("kernels",),
            budget_s=3.0,
            device="cpu",
            progress=crash,
            environment=ALONE,
        )
    before = read_profile(tmp_path)
    assert {name for name, info in before.header.tables.items() if info.complete} == {"gemm"}
    header = present(
        measure_profile(
            tmp_path,
            suites=("kernels",),
            budget_s=1.0,
            resume=True,
            device="cpu",
            extra_cases=(gemm_case(99),),
            environment=ALONE,
        )
    )
    assert all(info.complete for info in header.tables.values())
    after = read_profile(tmp_path)
    kept = tuple(row for row in after.rows("gemm") if row.case.axes["m"] != 99)
    assert kept == before.rows("gemm")
    assert {row.case.direction for row in after.rows("gemm") if row.case.axes["m"] == 99} == {
        "forward",
        "backward",
    }
    assert header.created == before.header.created


def test_another_machines_profile_is_not_resumed(tmp_path: Path) -> None:
    header = present(measure_profile(tmp_path, suites=("links",), budget_s=1.0, environment=ALONE))
    machine = header.machine.model_copy(update={"device": "Other 1"})
    write_header(tmp_path, header.model_copy(update={"machine": machine}))
    with pytest.raises(MachineMismatchError, match="'Other 1'"):
        measure_profile(tmp_path, suites=("links",), budget_s=1.0, resume=True, environment=ALONE)


@pytest.mark.slow
@each_row("ranks", [1, 2])
def test_a_damaged_profile_is_not_resumed_and_no_rank_is_blamed(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(ProfileUnreadableError, match=r"profile\.json") as caught:
        measure_profile(
            tmp_path,
            suites=("links",),
            budget_s=1.0,
            ranks=ranks,
            resume=True,
            device="cpu",
            environment=ALONE,
        )
    assert "rank" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_without_resume_an_older_profile_is_replaced(tmp_path: Path) -> None:
    for name in ("profile.json", "gemm.parquet", ".gemm.parquet.x1y2", "notes.txt"):
        (tmp_path / name).write_text("{")
    header = measure_profile(tmp_path, suites=("links",), budget_s=1.0, environment=ALONE)
    assert read_header(tmp_path) == header
    files = sorted(file.name for file in tmp_path.iterdir())
    tables = ("collective", "every_rank", "link", "rendezvous")
    assert files == sorted(["notes.txt", "profile.json", *(f"{name}.parquet" for name in tables)])


def test_a_budget_too_small_is_noted(tmp_path: Path) -> None:
    header = present(
        measure_profile(
            tmp_path, suites=("storage",), budget_s=1e-6, device="cpu", environment=ALONE
        )
    )
    assert "skipped" in header.tables["storage"].note


def test_unusable_arguments_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="'gpu'"):
        measure_profile(tmp_path, suites=("gpu",), environment=ALONE)
    for budget_s, ranks in ((0.0, 1), (1.0, 0), (float("nan"), 1)):
        with pytest.raises(ProfilerError, match="must be positive"):
            measure_profile(tmp_path, budget_s=budget_s, ranks=ranks, environment=ALONE)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProfileUnwritableError, match="choose another"):
        measure_profile(tmp_path / "file" / "profile", environment=ALONE)
    with pytest.raises(ProfileUnwritableError, match="is not UTF-8"):
        measure_profile(tmp_path / os.fsdecode(b"bad\xff"), environment=ALONE)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_refuses_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkstemp", read_only)
    with pytest.raises(ProfileUnwritableError, match="Read-only file system"):
        measure_profile(tmp_path, suites=("links",), environment=ALONE)


def test_without_torch_the_way_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("profilers.session.find_spec", lambda _name: None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'moetune\[torch\]'"):
        measure_profile(tmp_path / "profile", environment=ALONE)
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_imported_before_something_is_measured() -> None:
    script = (
        "import sys\n"
        "import profilers.session, profilers.store, profilers.interpolation, profilers.compare\n"
        "print([name for name in ('torch', 'pyarrow', 'pandas') if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
