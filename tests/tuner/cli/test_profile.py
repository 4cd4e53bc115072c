import json
from pathlib import Path

import pytest

from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.expect import contains
from tests.profilers.testing import fake_machine, fake_profile
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli import app as frame

GEMM = Case(operation="gemm", dtype="fp32", direction="forward", axes={"m": 64, "n": 64, "k": 64})


def _profile(
    folder: Path, *times_s: float, device: str = "a processor", host: str = "here", kind: str = ""
) -> Path:
    machine = fake_machine(device=device).model_copy(
        update={"hostname": host, "num_devices": 2, "memory_bytes_per_device": 2**33}
    )
    row = Measurement(case=GEMM.model_copy(update={"kind": kind}), times_s=times_s)
    write_profile(folder, fake_profile([row], machine=machine))
    return folder


def test_show_prints_the_machine_and_every_case(tmp_path: Path, capsys: Captured) -> None:
    text = output(capsys, ["profile", "show", _profile(tmp_path / "p", 0.001, 0.003, 0.002)])
    assert "2 x a processor on here, 8.00 GiB each" in text
    # The median of 1, 2 and 3 ms.
    assert GEMM.id in text
    assert "2.00 ms" in text


def test_show_writes_every_case_as_csv(tmp_path: Path, capsys: Captured) -> None:
    profile, out = _profile(tmp_path / "p", 0.001, 0.003, 0.002), tmp_path / "cases.csv"
    assert frame.run(["profile", "show", str(profile), "--csv", str(out)]) == 0
    assert out.read_text() == (
        "case,rank,median_s,repeats,status,error,source\n" + GEMM.id + ",0,0.002,3,ok,,measured\n"
    )
    assert "--csv is for the cases of a profile" in refusal(
        capsys, ["profile", "show", profile, "--links", "--csv", out]
    )


def test_show_prints_the_stored_type_as_json(tmp_path: Path, capsys: Captured) -> None:
    shown = output(capsys, ["profile", "show", _profile(tmp_path / "p", 0.001), "--json"])
    assert json.loads(shown)["measurements"][0]["times_s"] == [0.001]


def test_diff_exits_1_on_a_significant_slowdown_only(tmp_path: Path, capsys: Captured) -> None:
    fast = _profile(tmp_path / "fast", 0.0010, 0.0011, 0.0010, 0.0011)
    slow = _profile(tmp_path / "slow", 0.0020, 0.0021, 0.0020, 0.0021)
    text = output(capsys, ["profile", "diff", fast, slow], code=1)
    assert "slower" in text
    assert "x1.95" in text
    counts = json.loads(output(capsys, ["profile", "diff", slow, fast, "--json"]))["counts"]
    assert counts["faster"] == 1
    assert frame.run(["profile", "diff", str(fast), str(fast)]) == 0


def test_profiles_of_different_machines_are_not_compared(tmp_path: Path, capsys: Captured) -> None:
    one = _profile(tmp_path / "one", 0.001)
    other = _profile(tmp_path / "other", 0.001, device="another processor")
    line = refusal(capsys, ["profile", "diff", one, other])
    contains(line, "'another processor'", "--anyway")


def test_different_machines_are_compared_on_request_and_what_differs_is_said(
    tmp_path: Path, capsys: Captured
) -> None:
    one = _profile(tmp_path / "one", 0.0010, 0.0011, 0.0010, 0.0011)
    other = _profile(tmp_path / "other", 0.0020, 0.0021, 0.0020, 0.0021, device="another processor")
    first, *_ = output(capsys, ["profile", "diff", one, other, "--anyway"], code=1).splitlines()
    assert first.startswith("not the same machine: device: ")
    shown = output(capsys, ["profile", "diff", one, other, "--anyway", "--json"], code=1)
    assert len(json.loads(shown)["differing"]) == 1


@pytest.mark.slow
def test_a_profile_is_measured_in_silence_where_nobody_watches(
    tmp_path: Path, capsys: Captured
) -> None:
    code = frame.run(
        [
            "profile",
            "-o",
            str(tmp_path / "profile"),
            "--suite",
            "storage",
            "--budget",
            "8s",
            "--ranks",
            "1",
            "--json",
        ]
    )
    printed = capsys.readouterr()
    assert code == 0
    assert json.loads(printed.out)["tables"]["storage"]["complete"] is True
    assert printed.err == ""


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("")
    code = frame.run(["profile", "-o", str(tmp_path / "file" / "profile"), "--suite", "storage"])
    assert code in (2, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "choose another directory" in line


NCCL_TESTS = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  1 on   host device  0 [0000:01:00] NVIDIA H200
#  Rank  1 Group  0 Pid  2 on   host device  1 [0000:02:00] NVIDIA H200
    1024   256   float    sum    -1   20.00   0.05   0.09      0  21.00   0.05   0.09      0
"""


def test_import_writes_a_profile_that_show_prints(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "run.txt").write_text(NCCL_TESTS)
    out = str(tmp_path / "out")
    arguments = ["profile", "import", "nccl-tests", str(tmp_path / "run.txt"), "-o", out]
    assert "2 x NVIDIA H200 on host" in output(capsys, arguments)
    assert "collective/all_reduce/bytes1024-ranks2-stride1-world2" in output(
        capsys, ["profile", "show", out]
    )
    assert json.loads(output(capsys, [*arguments, "--json"]))["tables"]["collective"]["rows"] == 1


def test_import_answers_a_wrong_kind_or_option_in_one_line(
    tmp_path: Path, capsys: Captured
) -> None:
    out = str(tmp_path / "out")
    assert "'csv' is not one of aiconfigurator, nccl-tests" in refusal(
        capsys, ["profile", "import", "csv", "-o", out]
    )
    assert "convert them to routing-json" in refusal(
        capsys, ["profile", "import", "routing-csv", "-o", out]
    )
    (tmp_path / "run.txt").write_text("nothing\n")
    assert "lists no ranks" in refusal(
        capsys, ["profile", "import", "nccl-tests", tmp_path / "run.txt", "-o", out]
    )
    assert not (tmp_path / "out").exists()


def test_what_a_profile_holds_does_not_steer_the_terminal(tmp_path: Path, capsys: Captured) -> None:
    steering = "\x1b]0;mine\x07\n\x9b2J"
    first = _profile(tmp_path / "a", 0.001, host=f"host{steering}", kind=f"kind{steering}")
    second = _profile(tmp_path / "b", 0.001, device=f"other{steering}")
    shown = output(capsys, ["profile", "show", first])
    for text in (shown, output(capsys, ["profile", "diff", first, second, "--anyway"])):
        assert all(line.isprintable() for line in text.splitlines())
        assert r"\x1b]0;mine\x07\n\x9b2J" in text
    assert r"on host\x1b]0;mine" in shown.splitlines()[0]


def test_diff_writes_json_that_every_reader_takes(tmp_path: Path, capsys: Captured) -> None:
    nothing = _profile(tmp_path / "nothing", 0.0, 0.0)
    some = _profile(tmp_path / "some", 0.001, 0.001)
    text = output(capsys, ["profile", "diff", nothing, some, "--json"])
    assert "Infinity" not in text
    assert json.loads(text)["differences"][0]["ratio"] is None


def test_an_empty_folder_is_no_place_to_write(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "-o is empty" in refusal(capsys, ["profile", "-o", "", "--suite", "storage"])
    assert list(tmp_path.iterdir()) == []
