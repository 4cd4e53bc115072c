import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers import parquet
from profilers.arrays import Arrays, read_profile_arrays
from profilers.errors import ProfileUnreadableError, ProfileUnwritableError
from profilers.imports import aiconfigurator_columns
from profilers.imports.aiconfigurator_columns import read_columns
from profilers.parquet import joined_texts, read_table, to_numbers
from profilers.records import (
    AXES,
    BETWEEN_PEERS,
    LEAST_S,
    Case,
    Direction,
    Machine,
    Measurement,
    MeasurementStatus,
    Profile,
    ProfileHeader,
    Source,
    TableInfo,
)
from profilers.store import (
    clear_unlisted,
    read_header,
    read_profile,
    write_header,
    write_profile,
    write_table,
)
from profilers.tables import read_columns as read_table_columns
from profilers.tables import read_parquet
from tests.profilers.testing import fake_machine, fake_profile, gemm_case, gemm_row
from tests.rows import each_row

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "")
RANKS = ("sender", "receiver")


def store(path: Path, profile: Profile) -> None:
    for operation in profile.header.tables:
        rows = [row for row in profile.measurements if row.case.operation == operation]
        write_table(path, rows, operation=operation)
    write_header(path, profile.header)


FAILED = Measurement(case=gemm_case(8), status=MeasurementStatus.FAILED, error="no such kernel")
GEMMS = fake_profile([gemm_row(4, 1e-5, 1.5e-5), FAILED])


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    store(tmp_path / "profile", GEMMS)
    return tmp_path / "profile"


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = path / "profile.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def rewrite_table(
    path: Path, change: Callable[[pa.Table], pa.Table], *, operation: str = "gemm"
) -> None:
    file = path / f"{operation}.parquet"
    pq.write_table(change(pq.read_table(file)), file)


def replaced(table: pa.Table, name: str, values: list[Any], kind: Any = None) -> pa.Table:
    place = table.column_names.index(name)
    column = pa.array(values, type=kind or table.schema.field(name).type)
    return table.set_column(place, name, column)


def complaint(path: Path) -> str:
    with pytest.raises(ProfileUnreadableError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


sizes = st.integers(min_value=0, max_value=2**63 - 1)
times = st.lists(
    st.floats(min_value=0.0, max_value=1e6, allow_nan=False), min_size=1, max_size=4
).map(tuple)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    operation = draw(st.sampled_from(sorted(AXES)))
    case = Case(
        operation=operation,
        kind=draw(st.text(max_size=5)),
        dtype=draw(st.sampled_from(["", "bf16", "fp32"])),
        direction=draw(st.sampled_from(DIRECTIONS)),
        axes={axis: 0 if axis in RANKS else draw(sizes) for axis in AXES[operation]},
    )
    is_between_peers = operation in BETWEEN_PEERS
    rank = 0 if is_between_peers else draw(st.integers(0, 2**31))
    if draw(st.booleans()):
        least_s = LEAST_S if is_between_peers else 0.0
        times_s = tuple(max(time_s, least_s) for time_s in draw(times))
        return Measurement(case=case, rank=rank, times_s=times_s)
    status = draw(st.sampled_from([MeasurementStatus.FAILED, MeasurementStatus.OUT_OF_MEMORY]))
    return Measurement(case=case, rank=rank, status=status, error=draw(st.text(max_size=20)))


@settings(deadline=None, max_examples=25)
@given(rows=st.lists(measurements(), max_size=6))
def test_what_is_written_is_read_back(
    rows: list[Measurement], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("round-trip")
    profile = fake_profile(sorted(rows, key=lambda row: row.case.operation))
    store(path, profile)
    assert read_profile(path) == profile


def test_rewriting_leaves_no_other_files(stored: Path) -> None:
    store(stored, fake_profile([gemm_row(4, 1e-5)]))
    assert sorted(file.name for file in stored.iterdir()) == ["gemm.parquet", "profile.json"]
    assert len(read_profile(stored).measurements) == 1


def test_a_failed_write_keeps_the_old_file(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProfileUnwritableError, match="No space left"):
        write_table(stored, [], operation="gemm")
    monkeypatch.undo()
    assert len(read_profile(stored).measurements) == 2
    assert sorted(file.name for file in stored.iterdir()) == ["gemm.parquet", "profile.json"]


def test_a_table_in_progress_holds_no_rows(stored: Path) -> None:
    rewrite_header(stored, lambda header: header["tables"]["gemm"].update(complete=False))
    assert read_profile(stored).measurements == ()


def test_a_place_without_a_profile_is_named(tmp_path: Path) -> None:
    assert "does not exist" in complaint(tmp_path / "absent")
    assert "holds no profile.json" in complaint(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in complaint(tmp_path / "file")


def test_a_symlink_loop_ends(stored: Path) -> None:
    header, table = stored / "profile.json", stored / "gemm.parquet"
    table.unlink()
    table.symlink_to(table)
    assert "gemm.parquet" in complaint(stored)
    header.unlink()
    header.symlink_to(header)
    assert "profile.json" in complaint(stored)


def test_a_pipe_is_not_waited_for(stored: Path) -> None:
    (stored / "gemm.parquet").unlink()
    os.mkfifo(stored / "gemm.parquet")
    assert "not a regular file" in complaint(stored)
    (stored / "profile.json").unlink()
    os.mkfifo(stored / "profile.json")
    assert "regular file" in complaint(stored)


def test_a_huge_file_is_refused_by_its_size(stored: Path) -> None:
    os.truncate(stored / "gemm.parquet", 10 * 2**30)
    assert str(parquet.MAX_FILE_BYTES) in complaint(stored)
    os.truncate(stored / "profile.json", 10 * 2**30)
    assert "at most" in complaint(stored)


@each_row(
    ("change", "expected"),
    [
        (lambda header: header.update(schema_version=2), "schema_version 2 is not 1"),
        (lambda header: header.update(surprise=1), "surprise"),
        (lambda header: header.pop("machine"), "machine"),
        (lambda header: header["machine"].update(cores="8"), "machine.cores"),
        (lambda header: header["machine"].update(clocks={"a": float("nan")}), "clocks"),
        (
            lambda header: header["machine"].update(memory_bytes_per_device=10**400),
            "machine.memory",
        ),
        (lambda header: header["machine"].update(world=2**62), "machine.world"),
        (lambda header: header["machine"].update(nodes=-1), "machine.nodes"),
        (lambda header: header["machine"].update(hosts=["a"] * 2), "names 2 hosts for 1 ranks"),
        (lambda header: header["tables"]["gemm"].update(seconds=-1.0), "tables.gemm.seconds"),
        (lambda header: header["tables"]["gemm"].update(rows=3), "2 rows, profile.json says 3"),
        (lambda header: header["tables"].update(gems=header["tables"]["gemm"]), "'gems'"),
        (lambda header: header["tables"].update(copy=header["tables"]["gemm"]), "copy.parquet"),
    ],
)
def test_an_edited_header_is_refused_in_one_line(
    stored: Path, change: Callable[[dict[str, Any]], None], expected: str
) -> None:
    store(stored, GEMMS)
    rewrite_header(stored, change)
    assert expected in complaint(stored)


@each_row("text", ["", "{", "[]", "null", "\x00", "[" * 100_000])
def test_a_header_that_is_no_json_object_is_refused(stored: Path, text: str) -> None:
    (stored / "profile.json").write_text(text)
    assert "profile.json" in complaint(stored)


@each_row(
    ("change", "expected"),
    [
        (lambda table: table.drop_columns(["m"]), "'m' is missing"),
        (lambda table: table.append_column("extra", [[1, 2]]), "'extra' does not belong"),
        (lambda table: replaced(table, "m", ["4", "8"], pa.string()), "must be int64"),
        (lambda table: replaced(table, "m", [4, -8]), "row 1: gemm: axis m is negative"),
        (lambda table: replaced(table, "m", [4, None]), "row 1"),
        (lambda table: replaced(table, "times_s", [[float("nan")], []]), "row 0"),
        (lambda table: replaced(table, "times_s", [[-1.0], []]), "row 0"),
        (lambda table: replaced(table, "times_s", [[1.7e308], []]), "row 0: times_s.0"),
        (lambda table: replaced(table, "rank", [-1, 0]), "row 0: rank"),
        (lambda table: replaced(table, "times_s", [[], []]), "row 0"),
        (lambda table: replaced(table, "status", ["great", "failed"]), "row 0: status"),
        (lambda table: replaced(table, "direction", ["up", "up"]), "row 0: direction"),
        (lambda table: table.slice(0, 1), "1 rows, profile.json says 2"),
    ],
)
def test_an_edited_table_is_refused_in_one_line(
    stored: Path, change: Callable[[pa.Table], pa.Table], expected: str
) -> None:
    store(stored, GEMMS)
    rewrite_table(stored, change)
    assert expected in complaint(stored)


@settings(deadline=None, max_examples=40)
@given(share=st.floats(min_value=0.0, max_value=0.999))
def test_a_table_cut_anywhere_is_refused(
    share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut")
    store(path, fake_profile([gemm_row(4, 1e-5)]))
    file = path / "gemm.parquet"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])
    assert "gemm.parquet" in complaint(path)


def test_a_missing_table_is_named_and_the_header_read_without_it(stored: Path) -> None:
    (stored / "gemm.parquet").unlink()
    assert "gemm.parquet: No such file" in complaint(stored)
    assert read_header(stored).tables["gemm"].rows == 2


def test_places_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProfileUnwritableError, match="choose another directory"):
        write_table(tmp_path / "file" / "profile", [], operation="gemm")
    with pytest.raises(ProfileUnwritableError, match="File name too long"):
        write_profile(tmp_path / ("x" * 5000), fake_profile([gemm_row(4, 1.0)]))
    with pytest.raises(ValueError, match="do not belong"):
        write_table(tmp_path, [gemm_row(1, 1.0)], operation="copy")


def between_peers() -> Profile:
    axes = {"bytes": 8, "sender": 0, "receiver": 1, "lanes": 1, "world": 2}
    link = Case(operation="link", kind="one_way", axes=axes)
    work = Case(operation="every_rank", kind="gemm", axes={"size": 512, "world": 2})
    rows = [Measurement(case=case, rank=1, times_s=(1e-3, 1e-3)) for case in (link, work)]
    return fake_profile(rows, machine=fake_machine(world=2))


@each_row("operation", BETWEEN_PEERS)
@each_row("time_s", [0.0, 5e-324, 1e-13, 1e10])
def test_a_time_that_no_message_and_no_rank_can_take_is_refused_with_its_row(
    tmp_path: Path, operation: str, time_s: float
) -> None:
    store(tmp_path, between_peers())
    rewrite_table(
        tmp_path,
        lambda table: replaced(table, "times_s", [[1e-3, time_s]]),
        operation=operation,
    )
    assert f"{operation}.parquet: row 0: " in complaint(tmp_path)


@each_row(
    ("operation", "column"), [("link", "sender"), ("link", "receiver"), ("every_rank", "rank")]
)
def test_a_rank_beyond_those_of_the_machine_is_refused_with_its_row(
    tmp_path: Path, operation: str, column: str
) -> None:
    store(tmp_path, between_peers())
    rewrite_table(tmp_path, lambda table: replaced(table, column, [2]), operation=operation)
    assert "row 0: rank 2 of a machine of 2 ranks" in complaint(tmp_path)


def test_a_time_below_the_clocks_resolution_is_read_elsewhere(tmp_path: Path) -> None:
    store(tmp_path, fake_profile([gemm_row(4, 0.0)]))
    assert read_profile(tmp_path).measurements[0].times_s == (0.0,)


@each_row("name", ["copy.parquet", ".profile.json.x", ".gemm.parquet.x"])
def test_a_directory_in_place_of_a_file_is_refused_before_anything_is_replaced(
    stored: Path, name: str
) -> None:
    (stored / name).mkdir()
    before = (stored / "profile.json").read_bytes()
    with pytest.raises(ProfileUnwritableError, match="is a directory where a file may lie"):
        write_profile(stored, fake_profile([gemm_row(16, 1.0)]))
    assert (stored / "profile.json").read_bytes() == before
    assert len(read_profile(stored).measurements) == 2
    (stored / name).rmdir()


def test_a_table_that_cannot_be_removed_is_one_line(stored: Path) -> None:
    (stored / "copy.parquet").mkdir()
    with pytest.raises(ProfileUnwritableError, match=r"copy\.parquet cannot be removed: Is a dir"):
        clear_unlisted(stored, read_header(stored))


def test_a_table_is_a_data_frame_of_the_stored_columns(stored: Path) -> None:
    frame = read_profile(str(stored)).table("gemm")
    table = pq.read_table(stored / "gemm.parquet")
    assert list(frame.columns) == [*table.column_names, "median_s"]
    assert frame["m"].tolist() == [4, 8]
    assert frame["m"].dtype == "int64"
    assert frame["times_s"][0].tolist() == [1e-5, 1.5e-5]
    assert frame["median_s"].isna().tolist() == [False, True]
    assert frame["error"].tolist() == ["", "no such kernel"]
    assert GEMMS.table("copy").empty
    with pytest.raises(ValueError, match="'gem' is not one of gemm, "):
        GEMMS.table("gem")


# Small files that decode to more than a machine holds.


def _lists(values: int) -> pa.Table:
    numbers = pa.ListArray.from_arrays(
        pa.array([0, values], pa.int32()), pa.array(np.zeros(values))
    )
    return pa.table({"place": pa.array([1]), "times_s": numbers})


def _texts(rows: int, *, length: int) -> pa.Table:
    word = pa.array(np.zeros(rows, dtype="int32"))
    return pa.table({"name": pa.DictionaryArray.from_arrays(word, pa.array(["x" * length]))})


def test_small_files_that_decode_to_gigabytes_are_refused_before(tmp_path: Path) -> None:
    cases: dict[str, tuple[pa.Table, dict[str, Any], str]] = {
        # 20 million zeros weigh a kilobyte.
        "lists": (
            _lists(20_000_000),
            {"most_unpacked_bytes": 2**27},
            r"1 rows of 1600000\d\d bytes",
        ),
        "texts": (_texts(200_000, length=100_000), {}, "20000000000 bytes of text"),
        "within": (pa.table({"words": pa.array([["a"]])}), {}, "texts within"),
        "rows": (pa.table({"n": pa.array([1, 2, 3])}), {"most_rows": 2}, "3 rows of"),
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, (table, limits, reason) in cases.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 20_000
        del table
        with pytest.raises(ValueError, match=reason):
            read_table(path, **limits)
    with pytest.raises(ProfileUnreadableError, match="of text are too many"):
        read_columns(tmp_path / "texts.parquet")
    # In KiB: what made the files is part of it.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [{"name": name, "n": n} for n, name in enumerate(("a", None, "", "ä", "a"))]
    path = tmp_path / "texts.parquet"
    for options in ({}, {"use_dictionary": False}, {"row_group_size": 2}):
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
        assert joined_texts(read_table(path)).to_pylist() == rows


def test_numbers_become_arrays_without_pandas(tmp_path: Path) -> None:
    # pyarrow's own conversion imports it, and a Ctrl-C in that import is lost.
    kinds = ("int32", "int64", "float32", "float64")
    table = pa.table({kind: np.arange(5, dtype=kind) for kind in kinds})
    pq.write_table(table, tmp_path / "numbers.parquet", row_group_size=2)
    pq.write_table(table.slice(0, 0), tmp_path / "none.parquet")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from profilers.parquet import read_table, to_numbers\n"
        "numbers, none = (read_table(Path(f'{name}.parquet')) for name in ('numbers', 'none'))\n"
        f"for kind in {kinds}:\n"
        "    array = to_numbers(numbers.slice(1)[kind])\n"
        "    assert (array.tolist(), array.dtype.name) == ([1, 2, 3, 4], kind)\n"
        "    assert to_numbers(none[kind]).shape == (0,)\n"
        "assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert np.isnan(to_numbers(pa.array([1, None]))[1])


# Stored tables read as columns say what their records say.


def gemm(m: int, *times_s: float, status: MeasurementStatus = MeasurementStatus.OK) -> Measurement:
    case = Case(
        operation="gemm", dtype="bf16", direction="forward", axes={"m": m, "n": 64, "k": 32}
    )
    return Measurement(case=case, status=status, source=Source.IMPORTED, times_s=times_s)


def stored_rows(folder: Path, rows: tuple[Measurement, ...]) -> Path:
    machine = Machine(
        hostname="h",
        device="NVIDIA H200",
        device_kind="cuda",
        num_devices=8,
        memory_bytes_per_device=1,
        cores=0,
        host_memory_bytes=0,
        world=8,
        threads_per_rank=0,
        oversubscribed=False,
        libraries={"vllm": "0.24.0", "nccl": "2.29.2"},
    )
    header = ProfileHeader(
        moetune_version="0",
        created="2026-01-01T00:00:00Z",
        machine=machine,
        tables={"gemm": TableInfo(rows=len(rows), complete=True, seconds=0.0)},
    )
    write_profile(folder, Profile(header=header, measurements=rows))
    return folder


def test_medians_and_labels_come_back(tmp_path: Path) -> None:
    rows = (
        gemm(4, 3e-6, 1e-6, 2e-6),
        gemm(8, 4e-6, 6e-6),
        gemm(16, status=MeasurementStatus.FAILED),
    )
    (table,) = read_profile_arrays(stored_rows(tmp_path / "p", rows), operations=("gemm", "moe"))
    assert table.software == "vllm"
    assert table.version == "0.24.0"
    assert table.source is Source.IMPORTED
    assert table.axes_N["m"].tolist() == [4, 8]
    assert table.time_s_N == pytest.approx([2e-6, 5e-6])
    assert [row.median_s for row in rows[:2]] == pytest.approx(table.time_s_N)


def test_arrays_of_damaged_tables_are_refused(tmp_path: Path) -> None:
    folder = stored_rows(tmp_path / "p", (gemm(4, 1e-6),))
    (folder / "gemm.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ProfileUnreadableError, match="measure it again"):
        read_profile_arrays(folder, operations=("gemm",))
    with pytest.raises(ValueError, match="unlike lengths"):
        Arrays(
            operation="gemm",
            software="",
            version="",
            source=Source.MEASURED,
            kind_N=np.array([""], dtype=object),
            dtype_N=np.array(["bf16"], dtype=object),
            axes_N={axis: np.array([1, 2]) for axis in ("m", "n", "k")},
            time_s_N=np.array([1e-6, 1e-6]),
        )


# A table whose columns cannot be told apart is refused by every reader of tables.


def test_a_repeated_column_is_one_line(tmp_path: Path) -> None:
    table = pa.table({"kind": ["a"], "m": [1]})
    file = tmp_path / "gemm.parquet"
    pq.write_table(table.append_column("m", table["m"]), file)
    text = tmp_path / "gemm.csv"
    text.write_text("kind,m,m\na,1,2\n")
    readers: list[Callable[[], object]] = [
        lambda: read_parquet(file, operation="gemm", expected_rows=1),
        lambda: read_table_columns(file, operation="gemm", expected_rows=1),
        lambda: aiconfigurator_columns.read_columns(file),
        lambda: aiconfigurator_columns.read_columns(text),
    ]
    for read in readers:
        with pytest.raises(ProfileUnreadableError, match="column 'm' occurs 2 times; keep one"):
            read()
