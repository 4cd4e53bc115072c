"""Plans written over folders that others have changed."""

import json
from pathlib import Path

import pytest

from tuner.errors import OutputError, PlanUnreadableError
from tuner.plans.folder import plan_kind, write_folder
from tuner.report.launch_section import read_launch_files

LAUNCH = "launch/megatron-lm/run.sh"


def write(folder: Path, *names: str, kind: str = "train") -> None:
    files: dict[str, str | bytes] = {name: f"{name} of {kind}\n" for name in names}
    plan = json.dumps({"goal": {"kind": kind}, "files": [*names, "plan.json"]})
    write_folder(folder, {**files, "plan.json": plan})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_a_new_plan_takes_the_place_of_all_files_of_the_former(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    write(folder, LAUNCH, "launch/slurm/job.sh", "used/spec.yaml")
    trials = folder / "trials"
    (trials / "study.journal.workers").mkdir(parents=True)
    former = ("study.journal", "study.journal.workers/1")
    for name in ("0001.json", "0001.log", "study.db", *former, "mine"):
        (trials / name).write_text("{}")
    for name in ("verified.json", "notes.txt"):
        (folder / name).write_text("{}")
    write(folder, LAUNCH, "used/spec.yaml", kind="serve")
    assert sorted(contents(folder)) == [
        *("launch/megatron-lm/run.sh", "notes.txt", "plan.json", "trials/mine", "used/spec.yaml")
    ]
    assert plan_kind(folder) == "serve"
    assert not (folder / "launch" / "slurm").exists()


def test_names_of_a_damaged_plan_neither_stop_nor_mislead_the_next(tmp_path: Path) -> None:
    folder, other = tmp_path / "plan", tmp_path / "other.txt"
    other.write_text("kept")
    for names in (
        ["launch/\0x", "launch/" + "x" * 300, "launch/../../other.txt", "../other.txt", 7, None],
        [str(other), "launch/\ud800", "used", "launch/", "launch"],
        {"launch": 1},
    ):
        write(folder, LAUNCH)
        (folder / "plan.json").write_text(json.dumps({"files": names}))
        write(folder, LAUNCH, kind="serve")
        assert plan_kind(folder) == "serve"
        assert other.read_text() == "kept"


def test_a_place_that_cannot_be_written_leaves_the_former_plan_whole(tmp_path: Path) -> None:
    folder, foreign = tmp_path / "plan", tmp_path / "foreign"
    foreign.mkdir()
    for place in ("launch", "trials", "launch/megatron-lm", "fewer-nodes"):
        (foreign / "0001.json").write_text("mine")
        (foreign / "run.sh").write_text("mine")
        (foreign / "megatron-lm").mkdir(exist_ok=True)
        (foreign / "megatron-lm" / "run.sh").write_text("mine")
        write(folder, "used/spec.yaml")
        plan = json.dumps({"files": [LAUNCH, "used/spec.yaml", "fewer-nodes/run.sh"]})
        (folder / "plan.json").write_text(plan)
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).symlink_to(foreign)
        former = contents(folder), contents(foreign)
        with pytest.raises(OutputError, match="is a link; choose another place with -o"):
            write(folder, LAUNCH, "fewer-nodes/run.sh", kind="serve")
        assert (contents(folder), contents(foreign)) == former
        assert read_launch_files(folder, (LAUNCH,)) == ()
        if "/" not in place:
            with pytest.raises(PlanUnreadableError, match="is a link"):
                plan_kind(folder)
        (folder / place).unlink()
    (folder / LAUNCH).mkdir(parents=True)
    (folder / LAUNCH / "mine").write_text("mine")
    former = contents(folder), {}
    with pytest.raises(OutputError, match="is a folder; choose another place with -o"):
        write(folder, LAUNCH, kind="serve")
    assert contents(folder) == former[0]


def test_a_failure_half_way_puts_the_former_plan_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plan"
    write(folder, LAUNCH, "used/spec.yaml")
    (folder / "verified.json").write_text("{}")
    former = contents(folder)
    replace, moves = Path.replace, 0
    for failing in range(1, 8):
        moves = 0

        def fail(path: Path, target: Path, failing: int = failing) -> Path:
            nonlocal moves
            moves += "moetune" in str(path) + str(target)
            if moves == failing:
                raise OSError(28, "No space left on device")
            return replace(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", fail)
            with pytest.raises(OutputError, match="No space left"):
                write(folder, LAUNCH, "launch/new.sh", kind="serve")
        assert contents(folder) == former
