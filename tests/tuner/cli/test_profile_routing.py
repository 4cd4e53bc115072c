"""The commands around recordings of routing, on a tiny model and tiny dumps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.routing.store import read_header, read_recording
from profilers.store import write_profile
from tests.profilers.testing import fake_profile, gemm_row
from tests.rows import each_row
from tests.tuner.cli.refusals import refusal
from tuner.cli import app as frame
from tuner.cli.profile_routing import layer_ids
from tuner.errors import TunerError

Captured = pytest.CaptureFixture[str]

COUNTS = np.array([[0, 0, 0], [9, 3, 0], [4, 4, 4]])


def complaint(capsys: Captured, *arguments: object) -> str:
    return refusal(capsys, [str(each) for each in arguments])


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
    assert frame.run(["profile", "import", kind, str(dump), "-o", str(out), *said]) == 0
    text = capsys.readouterr().out
    assert "tiny chat: 2 MoE layers x 3 experts, top 2, 1 passes, 24 token copies" in text
    # Layer 3: 9 of a mean of 4; layer 4 is balanced.
    assert "1.62 in the median layer, 2.25 in the worst" in text
    stored = read_recording(out)
    assert stored.layer_ids == (3, 4)
    assert stored.count_PLE.tolist() == [COUNTS[1:].tolist()]
    assert read_header(out).origin == "imported as eplb"


def test_a_recording_is_put_beside_the_tables_of_a_profile(
    tmp_path: Path, dump: Path, capsys: Captured
) -> None:
    out = tmp_path / "profile"
    write_profile(out, fake_profile([gemm_row(4, 1e-5)]))
    wanted = ["profile", "import", "routing", str(dump), "-o", str(out)]
    assert "give --workload" in complaint(capsys, *wanted)
    assert frame.run([*wanted, "--workload", "chat"]) == 0
    capsys.readouterr()
    assert frame.run(["profile", "show", str(out)]) == 0
    text = capsys.readouterr().out
    assert "routing/chat" in text
    assert "gemm" in text
    assert frame.run(["profile", "show", str(out), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["recordings"][0]["skew"]["worst"] == 2.25
    assert shown["measurements"][0]["times_s"] == [1e-5]
    assert frame.run(["profile", "show", str(out / "routing/chat"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == "chat"


def test_a_stored_recording_can_be_named_anew(tmp_path: Path, dump: Path, capsys: Captured) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert frame.run(["profile", "import", "routing", str(dump), "-o", str(first)]) == 0
    said = ["--workload", "code", "--layer-ids", "7,9"]
    assert frame.run(["profile", "import", "routing", str(first), "-o", str(second), *said]) == 0
    capsys.readouterr()
    result = read_recording(second)
    assert (result.workload, result.layer_ids) == ("code", (7, 9))
    found_line = complaint(
        capsys, "profile", "import", "routing", first, "-o", second, "--experts", 4
    )
    assert "has 3 experts, not 4" in found_line


def test_what_cannot_be_imported_is_one_line(tmp_path: Path, dump: Path, capsys: Captured) -> None:
    start = ("profile", "import")
    out = ("-o", tmp_path / "out")
    assert "needs the path" in complaint(capsys, *start, "sglang", *out)
    assert "megatron-trace, vllm-ascend" in complaint(capsys, *start, "nope", dump, *out)
    assert "No such file" in complaint(capsys, *start, "routing", tmp_path / "none", *out)
    line = complaint(capsys, *start, "routing", dump, *out, "--layer-ids", "4,3")
    assert "do not ascend" in line
    line = complaint(capsys, *start, "routing", dump, *out, "--system", "h200")
    assert "routing has no option 'system'" in line
    line = complaint(capsys, *start, "nccl-tests", dump, *out, "--workload", "chat")
    assert "nccl-tests has no option 'workload'" in line
    line = complaint(capsys, *start, "eplb", dump, *out, "--top-k", 9)
    assert "top_k 9 is more than the 3 experts" in line
    line = complaint(capsys, *start, "megatron-trace", dump, *out)
    assert "line 1" in line
    assert not (tmp_path / "out").exists()


@each_row(
    ("text", "ids"), [("", ()), ("3", (3,)), ("3-5, 9", (3, 4, 5, 9)), ("0,7,15", (0, 7, 15))]
)
def test_layers_are_numbers_and_ranges(text: str, ids: tuple[int, ...]) -> None:
    assert layer_ids(text) == ids


@each_row("text", ["a", "3-", "-1", "3--5", "1,,2", "0-99999", "٣"])
def test_what_is_no_layer_is_refused(text: str) -> None:
    with pytest.raises(TunerError, match="no layer"):
        layer_ids(text)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
    }
    folder = tmp_path / "tiny-mixtral"
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**config)).save_pretrained(folder)
    return folder


def test_the_suite_records_a_model_on_text(tmp_path: Path, model: Path, capsys: Captured) -> None:
    text = tmp_path / "prose.txt"
    text.write_text("All happy families are alike. " * 20)
    out = tmp_path / "profile"
    arguments = [
        *("profile", "--suite", "routing", "--model", str(model), "--text", str(text)),
        *("--sequence", "16", "--batch", "2", "-o", str(out)),
    ]
    assert frame.run(arguments) == 0
    printed = capsys.readouterr()
    # 600 bytes are 18 passes of 32 tokens, of which each makes two copies in each of two layers.
    assert "tiny-mixtral prose: 2 MoE layers x 4 experts, top 2, 18 passes, 2304" in printed.out
    # In a pipe no progress is shown, only where the recording lies.
    assert printed.err == f"recording: {out / 'routing' / 'prose'}\n"
    assert read_recording(out).workload == "prose"
    assert frame.run(["profile", "show", str(out)]) == 0
    assert "routing/prose" in capsys.readouterr().out
    assert frame.run([*arguments, "--workload", "again", "--passes", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passes"] == 2


def test_what_cannot_be_recorded_is_one_line(tmp_path: Path, model: Path, capsys: Captured) -> None:
    start = ("profile", "-o", tmp_path / "out", "--suite")
    assert "--model and --text" in complaint(capsys, *start, "routing")
    requested = ("--model", model, "--text", tmp_path / "none.txt", "--sequence", 8)
    assert "No such file" in complaint(capsys, *start, "routing", *requested)
    assert "recorded by itself" in complaint(capsys, *start, "routing,storage", *requested)
    assert "not selected" in complaint(capsys, *start, "storage", *requested)
    line = complaint(capsys, *start, "routing", *requested, "--sequence", 33)
    assert "takes 32 at most" in line
    line = complaint(capsys, *start, "routing", *requested, "--workload", "a/b")
    assert "names a folder" in line
    line = complaint(capsys, *start, "routing", "--model", tmp_path, *requested[2:4])
    assert "config.json" in line


def test_several_processes_record_nothing(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    start = ("profile", "-o", tmp_path / "out", "--suite", "routing")
    line = complaint(capsys, *start, "--model", tmp_path, "--text", tmp_path / "a.txt")
    assert "records in one process, 2 were started" in line
