"""`moetune init` as it is typed, and plans from flags alone."""

import json
from pathlib import Path

from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli import app as frame
from tuner.goals.place_spec import read_place_spec
from tuner.goals.train_folder import read_plan
from tuner.goals.train_spec import read_spec

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples" / "models" / "tiny-moe")
ROUTING = ROOT / "examples" / "routing"
FLAGS = ("--model", MODEL, "--device", "h100-sxm", "--devices", "2", "--batch", "16")


def test_flags_alone_write_a_commented_spec(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "spec.yaml"
    assert f"moetune plan {out} -o PLAN" in output(capsys, ["init", "-o", out, *FLAGS])
    assert out.read_text().count("#") > 5
    assert read_spec(out).goal.global_batch_size == 16


def test_a_missing_or_unacceptable_value_is_one_line(tmp_path: Path, capsys: Captured) -> None:
    wrong = []
    for flags, said in (
        (FLAGS[:4], "--devices missing: a 'train' spec has no default"),
        (("--goal", "cook"), "'cook' is not one of train, serve, place"),
        (("--model", "/nowhere", *FLAGS[2:]), "--model: /nowhere"),
        ((*FLAGS[:2], "--device", "h9", "--devices", "2"), "no device description is named 'h9'"),
        ((*FLAGS[:5], "12"), "the nearest that do: 8 and 16"),
        (("--goal", "serve", *FLAGS[:6]), "--concurrency or --rate is missing"),
        (("--goal", "serve", *FLAGS[:6], "--rate", "5"), "'5' has no unit"),
    ):
        line = refusal(capsys, ["init", "-o", tmp_path / "spec.yaml", *flags])
        if said not in line:
            wrong.append((flags, line))
    assert not wrong
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_kept(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "spec.yaml"
    out.write_text("mine")
    assert "--force" in refusal(capsys, ["init", "--yes", "-o", out, *FLAGS])
    assert out.read_text() == "mine"
    assert frame.run(["init", "--yes", "--force", "-o", str(out), *FLAGS]) == 0


def test_a_placement_is_asked_for_by_its_recordings(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "spec.yaml"
    names = ",".join(f"{name}={ROUTING / name}" for name in ("python", "headers"))
    arguments = ["init", "--goal", "place", "--workload", names, "--ranks", "8", "--yes"]
    assert json.loads(output(capsys, [*arguments, "-o", out, "--json"]))["goal"]["ranks"] == 8
    assert list(read_place_spec(out).recordings) == ["python", "headers"]


def test_a_plan_from_flags_holds_the_spec_that_it_used(tmp_path: Path, capsys: Captured) -> None:
    first, repeated = tmp_path / "first", tmp_path / "again"
    assert frame.run(["plan", *FLAGS, "--sequence-length", "256", "-o", str(first)]) == 0
    assert "defaults used: --precision bf16" in capsys.readouterr().err
    assert frame.run(["plan", str(first / "used" / "spec.yaml"), "-o", str(repeated)]) == 0
    one, other = read_plan(first), read_plan(repeated)
    assert one.decision == other.decision
    assert one.provenance.spec_sha256 == other.provenance.spec_sha256


def test_a_deployment_is_planned_from_flags(tmp_path: Path) -> None:
    model = str(ROOT / "examples" / "models" / "mixtral-8x7b")
    flags = ("--goal", "serve", "--model", model, "--device", "h100-sxm", "--devices", "8")
    out = tmp_path / "plan"
    requested = ["plan", *flags, "--rate", "2/s", "--engine", "vllm", "--objective", "devices"]
    assert frame.run([*requested, "-o", str(out)]) == 0
    assert json.loads((out / "plan.json").read_text())["goal"]["engine"]["name"] == "vllm"


@each_row(
    ("arguments", "said"),
    [
        ([], "nothing to plan: name a SPEC"),
        (["--batch", "4"], "--model, --device, --devices missing"),
        (["spec.yaml", "--batch", "4"], "--batch: the spec spec.yaml sets it already"),
        (["spec.yaml", "--goal", "serve"], "--goal: the spec spec.yaml sets it already"),
        (["--goal", "cook"], "--goal: 'cook' is not one of"),
    ],
)
def test_flags_that_make_no_spec_are_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: Captured
) -> None:
    assert said in refusal(capsys, ["plan", *arguments, "-o", tmp_path / "plan"])
    assert not (tmp_path / "plan").exists()
