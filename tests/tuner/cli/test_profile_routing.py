"""The commands around recordings of routing, on tiny dumps."""

import json
from pathlib import Path

import numpy as np
import pytest

from profilers.routing.store import read_header, read_recording
from profilers.store import write_profile
from tests.profilers.testing import fake_profile, gemm_row
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli import app as frame
from tuner.cli.profile_import import read_layer_ids
from tuner.errors import TunerError

COUNTS = np.array([[0, 0, 0], [9, 3, 0], [4, 4, 4]])


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    np.save(tmp_path / "load.npy", COUNTS)
    return tmp_path / "load.npy"


@each_row("kind", ["routing", "eplb"])
def test_a_dump_becomes_a_stored_recording(
    tmp_path: Path, dump: Path, capsys: Captured, kind: str
) -> None:
    out = tmp_path / kind
    said = ("--workload", "chat", "--model", "tiny", "--layer-ids", "3-4", "--top-k", "2")
    text = output(capsys, ["profile", "import", kind, dump, "-o", out, *said])
    assert "tiny chat: 2 MoE layers x 3 experts, top 2, 1 passes, 24 token copies" in text
    # Layer 3: 9 of a mean of 4; layer 4 is balanced.
    assert "1.62 in the median layer, 2.25 in the worst" in text
    stored = read_recording(out)
    assert stored.layer_ids == (3, 4)
    assert stored.count_PLE.tolist() == [COUNTS[1:].tolist()]
    assert read_header(out).origin == "imported as eplb"


def test_a_stored_recording_is_shown_and_takes_no_other_folder(
    tmp_path: Path, dump: Path, capsys: Captured
) -> None:
    profile, out = tmp_path / "profile", tmp_path / "chat"
    write_profile(profile, fake_profile([gemm_row(4, 1e-5)]))
    wanted = ["profile", "import", "routing", str(dump), "--workload", "chat", "-o"]
    assert "is no recording" in refusal(capsys, [*wanted, profile], code=3)
    assert frame.run([*wanted, str(out)]) == 0
    shown = json.loads(output(capsys, ["profile", "show", out, "--json"]))
    assert (shown["workload"], shown["skew"]["worst"]) == ("chat", 2.25)


def test_a_stored_recording_can_be_named_anew(tmp_path: Path, dump: Path, capsys: Captured) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert frame.run(["profile", "import", "routing", str(dump), "-o", str(first)]) == 0
    said = ["--workload", "code", "--layer-ids", "7,9"]
    assert frame.run(["profile", "import", "routing", str(first), "-o", str(second), *said]) == 0
    result = read_recording(second)
    assert (result.workload, result.layer_ids) == ("code", (7, 9))
    found_line = refusal(
        capsys, ["profile", "import", "routing", first, "-o", second, "--experts", 2]
    )
    assert "has 3 experts, not 2" in found_line
    # A trace alone lists chosen experts only; all else says how many there are.
    for kind, path in (("routing", first), ("eplb", dump)):
        more = ("profile", "import", kind, path, "-o", second, "--experts", 5)
        assert "has 3 experts, not 5" in refusal(capsys, more)


def test_a_profile_names_the_recordings_in_it(tmp_path: Path, dump: Path, capsys: Captured) -> None:
    profile = tmp_path / "profile"
    write_profile(profile, fake_profile([gemm_row(4, 1e-5)]))
    inside = profile / "routing" / "chat"
    assert frame.run(["profile", "import", "eplb", str(dump), "-o", str(inside)]) == 0
    line = refusal(capsys, ["profile", "import", "routing", profile, "-o", tmp_path / "out"])
    assert f"name one of those in it: {inside}" in line


def test_what_cannot_be_imported_is_one_line(tmp_path: Path, dump: Path, capsys: Captured) -> None:
    start = ("profile", "import")
    out = ("-o", tmp_path / "out")
    assert "needs the path" in refusal(capsys, [*start, "sglang", *out])
    assert "megatron-trace, vllm-ascend" in refusal(capsys, [*start, "nope", dump, *out])
    assert "No such file" in refusal(capsys, [*start, "routing", tmp_path / "none", *out])
    line = refusal(capsys, [*start, "routing", dump, *out, "--layer-ids", "4,3"])
    assert "need as many ascending ids" in line
    line = refusal(capsys, [*start, "routing", dump, *out, "--system", "h200"])
    assert "routing has no option 'system'" in line
    line = refusal(capsys, [*start, "nccl-tests", dump, *out, "--workload", "chat"])
    assert "nccl-tests has no option 'workload'" in line
    line = refusal(capsys, [*start, "eplb", dump, *out, "--top-k", 9])
    assert "top_k 9 is more than the 3 experts" in line
    line = refusal(capsys, [*start, "megatron-trace", dump, *out])
    assert "line 1" in line
    assert not (tmp_path / "out").exists()


@each_row(
    ("text", "ids"), [("", ()), ("3", (3,)), ("3-5, 9", (3, 4, 5, 9)), ("0,7,15", (0, 7, 15))]
)
def test_layers_are_numbers_and_ranges(text: str, ids: tuple[int, ...]) -> None:
    assert read_layer_ids(text) == ids


@each_row("text", ["a", "3-", "-1", "3--5", "1,,2", "0-99999", "٣"])
def test_what_is_no_layer_is_refused(text: str) -> None:
    with pytest.raises(TunerError, match="no layer"):
        read_layer_ids(text)


def test_the_former_suite_names_the_way_out(tmp_path: Path, capsys: Captured) -> None:
    former = ("profile", "-o", tmp_path / "out", "--suite", "routing")
    for options in ((), ("--model", "m", "--text", "a.txt", "--text", "b.txt", "--passes", 2)):
        assert "moetune profile import routing" in refusal(capsys, [*former, *options])
