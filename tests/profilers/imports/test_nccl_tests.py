from pathlib import Path

import pytest

from profilers.errors import ProfileUnreadableError, UnknownNameError
from profilers.imports.registry import import_measurements
from profilers.imports.result import Imported
from tests.expect import refused
from tests.rows import each_row

HEAD = """\
# nccl-tests version 2.17.6 nccl-headers=22705 nccl-library=22705
# Collective test starting: {name}_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 4096 step: 2(factor) warmup iters: 5 iters: 20
#
# Using devices
"""
ROWS = """\
#
#                                                       out-of-place              in-place
#       size   count    type  redop  root    time  algbw  busbw #wrong   time  algbw  busbw #wrong
#        (B) (elements)                      (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
        1024     256   float    sum    -1   20.00   0.05   0.09      0  21.00   0.05   0.09      0
        2048     512   float    sum    -1   30.00   0.07   0.12      0  31.00   0.07   0.12    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.1
"""


def log(*, ranks: int = 8, per_host: int = 4, groups: int = 1, name: str = "all_reduce") -> str:
    lines = [
        f"#  Rank {rank:2d} Group {rank % groups:2d} Pid {900 + rank} on   host-{rank // per_host} "
        f"device {rank % per_host:2d} [0000:0{rank % per_host}:00] NVIDIA H100 80GB HBM3"
        for rank in range(ranks)
    ]
    return HEAD.format(name=name) + "\n".join(lines) + "\n" + ROWS


def imported(path: Path, **options: str) -> Imported:
    return import_measurements("nccl-tests", path, options=options, created="now")


def test_rows_become_collectives_of_all_ranks(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text(log())
    profile = imported(file).profile
    assert {row.case.id: row.median_s for row in profile.measurements} == {
        "collective/all_reduce/bytes1024-ranks8-stride1-world8": pytest.approx(20e-6),
        "collective/all_reduce/bytes2048-ranks8-stride1-world8": pytest.approx(30e-6),
    }
    machine = profile.header.machine
    assert (machine.nodes, machine.world, machine.num_devices) == (2, 8, 4)
    assert machine.device == "NVIDIA H100 80GB HBM3"
    assert machine.libraries == {"nccl": "2.27.5"}


def test_ranks_and_columns_are_read_as_they_were_run(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text(log(groups=4))
    axes = imported(file).profile.measurements[0].case.axes
    # Ranks 0 and 4 of 8 are in the first of four groups.
    assert (axes["ranks"], axes["stride"], axes["world"]) == (2, 4, 8)
    file.write_text(log().replace("   20.00   0.05", "     N/A   0.05"))
    assert imported(file).profile.measurements[0].median_s == pytest.approx(21e-6)


def test_a_folder_is_read_whole_and_names_tell_the_collective(tmp_path: Path) -> None:
    for name in ("alltoall", "sendrecv"):
        text = log(name=name).replace(f"# Collective test starting: {name}_perf\n", "")
        (tmp_path / f"{name}_2nodes.log").write_text(text)
    kinds = {row.case.kind for row in imported(tmp_path).profile.measurements}
    assert kinds == {"all_to_all", "send_recv"}


def test_an_unnamed_collective_needs_the_option(tmp_path: Path) -> None:
    file = tmp_path / "run.txt"
    file.write_text(log(name="broadcast"))
    with pytest.raises(UnknownNameError, match=r"'broadcast' is not one of .*say --collective"):
        imported(file)
    assert imported(file, collective="all_gather").profile.measurements[0].case.kind == "all_gather"


@each_row(
    ("text", "complaint"),
    [
        ("", "lists no ranks"),
        (log().split("#\n#     ")[0], "holds no row"),
        (log().replace("20.00", "  nan").replace("21.00", "  nan"), "line 18: no time in"),
        (log().replace("20.00", "1e300"), "line 18: times_s.0"),
        (log(ranks=2).replace("Rank  1", f"Rank {'9' * 300}"), "line 12: .* axis stride is more"),
        (log().replace("1024", "\u00b9\u2070").replace("2048", "\u0661\u0662"), "holds no row"),
    ],
)
def test_text_that_is_no_such_output_is_one_clear_line(
    tmp_path: Path, text: str, complaint: str
) -> None:
    file = tmp_path / "all_reduce.txt"
    file.write_text(text)
    with refused(ProfileUnreadableError, match=complaint):
        imported(file)


def test_a_missing_file_and_a_missing_path_are_said(tmp_path: Path) -> None:
    with pytest.raises(ProfileUnreadableError, match="No such file"):
        imported(tmp_path / "absent.txt")
    with pytest.raises(ProfileUnreadableError, match=r"0 files end in \.txt"):
        imported(tmp_path)
    with pytest.raises(ProfileUnreadableError, match="needs a path"):
        import_measurements("nccl-tests", None, options={}, created="now")
    with pytest.raises(ProfileUnreadableError, match="File name too long"):
        imported(tmp_path / ("x" * 5000))


def test_files_of_unlike_devices_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(log())
    (tmp_path / "b.txt").write_text(log().replace("H100", "H200"))
    with pytest.raises(ProfileUnreadableError, match="of unlike devices: NVIDIA H100"):
        imported(tmp_path)
