"""What lies in a plan's folder, what replaces it, and what is said of a damaged one."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profilers.errors import ProfileUnreadableError
from profilers.sole_writer import sole_writer
from tests.expect import present
from tests.rows import each_row
from tests.tuner.verify.testing import FakeLauncher
from tuner import api
from tuner.engines.files import launch_files
from tuner.engines.writers import emit_all
from tuner.errors import OutputError, PlanUnreadableError
from tuner.goals.train_folder import read_plan, read_used_profile, write_plan
from tuner.plans import folder as plan_folder
from tuner.plans.folder import PLAN_NAME, TRIALS_NAME, VERIFIED_NAME, write_folder
from tuner.plans.train import Plan, VerifiedPlan
from tuner.verify.verification import Effort, Watcher

Spec = Callable[..., Path]


@pytest.fixture(scope="session")
def made(bound_spec: Path) -> api.Planned:
    """The plan that `bound_plan` holds, in memory."""
    return api.plan(bound_spec)


def _write(folder: Path, made: api.Planned, plan: Plan | None = None) -> Plan:
    return write_plan(folder, plan or made.plan, spec=made.spec, profiles=made.profiles)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_the_plan_names_every_file_beside_it(tmp_path: Path, made: api.Planned) -> None:
    written = _write(tmp_path / "plan", made)
    assert set(written.files) == _contents(tmp_path / "plan").keys()
    assert read_plan(tmp_path / "plan") == written
    assert {Path(name).parts[0] for name in written.files} == {"plan.json", "used", "launch"}
    assert {Path(name).parts[1] for name in written.files if name.startswith("launch/")} == {
        "reference",
        "megatron-lm",
        "slurm",
    }


def test_what_it_used_is_copied_to_the_byte(tmp_path: Path, made: api.Planned) -> None:
    folder = tmp_path / "plan"
    _write(folder, made)
    assert (folder / "used/spec.yaml").read_bytes() == made.spec.path.read_bytes()
    assert (folder / "used/config.json").read_bytes() == made.spec.model_path.read_bytes()
    (profile,) = made.profiles.values()
    assert _contents(folder / "used/profile") == _contents(profile)
    # Scripts can be executed, and the rest cannot.
    assert (folder / "launch/reference/run.sh").stat().st_mode & 0o111
    assert not (folder / "launch/reference/step.json").stat().st_mode & 0o111
    assert read_used_profile(folder).header.machine.device == "Fake 9000"


def test_the_profiles_of_several_pools_are_all_copied(tmp_path: Path, made: api.Planned) -> None:
    (profile,) = made.profiles.values()
    (pool,) = made.spec.cluster.pools
    pools = tuple(pool.model_copy(update={"name": name}) for name in ("a", "../b", "c"))
    spec = made.spec.model_copy(
        update={"cluster": made.spec.cluster.model_copy(update={"pools": pools})}
    )
    folder = tmp_path / "plan"
    plan = write_plan(folder, made.plan, spec=spec, profiles={"c": profile, "../b": profile})
    assert _contents(folder / "used/profiles/1") == _contents(profile)
    assert _contents(folder / "used/profiles/2") == _contents(profile)
    assert "used/profiles/1/profile.json" in plan.files
    assert not (folder / "used/profiles/0").exists()


def test_a_plan_without_a_decision_has_no_launch_files(tmp_path: Path, made: api.Planned) -> None:
    certificate = made.plan.certificate.model_copy(update={"status": "infeasible"})
    nothing = made.plan.model_copy(
        update={"decision": None, "predicted": None, "certificate": certificate}
    )
    _write(tmp_path / "plan", made)
    _write(tmp_path / "plan", made, nothing)
    assert not (tmp_path / "plan" / "launch").exists()
    assert read_plan(tmp_path / "plan").decision is None


def test_a_new_plan_keeps_nothing_of_the_former_one(
    planned: Path, made: api.Planned, hidden_launcher: Callable[..., FakeLauncher]
) -> None:
    api.verify(
        planned,
        effort=Effort(trials=2, steps=3),
        resume=False,
        watcher=Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None),
        launch=hidden_launcher(planned),
    )
    assert (planned / VERIFIED_NAME).exists()
    (planned / "launch" / "slurm" / "notes of the user.txt").write_text("keep")
    written = _write(planned, made, made.plan.model_copy(update={"emit": ("reference",)}))
    assert _contents(planned).keys() == {*written.files, "launch/slurm/notes of the user.txt"}
    assert not (planned / "launch" / "megatron-lm").exists()
    assert not (planned / VERIFIED_NAME).exists()
    assert not (planned / TRIALS_NAME).exists()
    assert not list(planned.glob(".*"))


def test_only_files_inside_its_own_folders_are_ever_removed(
    planned: Path, made: api.Planned
) -> None:
    outside = planned.parent / "outside.txt"
    outside.write_text("keep")
    (planned / "mine.txt").write_text("keep")
    text = json.loads((planned / PLAN_NAME).read_text())
    text["files"] += ["mine.txt", "used/../../outside.txt", str(outside), "launch/../mine.txt"]
    (planned / PLAN_NAME).write_text(json.dumps(text))
    _write(planned, made)
    assert outside.exists()
    assert (planned / "mine.txt").exists()


def test_a_damaged_former_plan_is_replaced(planned: Path, made: api.Planned) -> None:
    (planned / PLAN_NAME).write_text("{")
    assert _write(planned, made) == read_plan(planned)


def test_a_plan_can_be_made_again_from_the_profile_that_it_holds(
    planned: Path, made: api.Planned
) -> None:
    before = _contents(planned / "used" / "profile")
    write_plan(planned, made.plan, spec=made.spec, profiles={"here": planned / "used" / "profile"})
    assert _contents(planned / "used" / "profile") == before


FULL_DISK = """
import resource, signal, sys
from tuner.cli.app import run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
for out in {outs}:
    print(run(["plan", {spec!r}, "-o", out]))
"""


def test_a_full_disk_is_one_line_and_leaves_what_was_there(
    bound_spec: Path, bound_plan: Path, tmp_path: Path
) -> None:
    shutil.copytree(bound_plan, tmp_path / "former")
    before = _contents(tmp_path)
    largest = max(file.stat().st_size for file in bound_plan.rglob("*") if file.is_file())
    outs = [str(tmp_path / name) for name in ("new", "former")]
    text = FULL_DISK.format(limit=largest // 2, spec=str(bound_spec), outs=outs)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3", "3"], done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("moetune: cannot write")
        assert "File too large" in line
    assert _contents(tmp_path) == before


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path: Path, made: api.Planned) -> None:
    (tmp_path / "plan").write_text("mine")
    with pytest.raises(OutputError, match=r"cannot write .*choose another place"):
        _write(tmp_path / "plan", made)
    assert (tmp_path / "plan").read_text() == "mine"


def _with(field: str, value: object) -> Callable[[str], str]:
    return lambda text: json.dumps(json.loads(text) | {field: value})


def _broken_decision(text: str) -> str:
    fields = json.loads(text)
    fields["decision"]["expert_model_parallel_size"] = 7
    return json.dumps(fields)


@each_row(
    ("damage", "said"),
    [
        (lambda text: text[: len(text) // 2], "Invalid JSON"),
        (_with("bogus", 1), "bogus: Extra inputs are not permitted"),
        (_with("schema_version", 2), "is not 1, the newest that this version reads"),
        (_with("decision", None), "disagrees with the decision"),
        (_broken_decision, "ETP"),
        (lambda _text: "[" * 100_000, "Invalid JSON"),
        # Bytes that are no text.
        (lambda _text: "\udcff\udcfe\x00" * 50, "Invalid JSON"),
        (lambda _text: "", "Invalid JSON"),
        (lambda _text: "[]", "Input should be an object"),
    ],
)
def test_a_damaged_plan_is_refused_in_one_line(
    bound_plan: Path, planned: Path, damage: Callable[[str], str], said: str
) -> None:
    file = planned / PLAN_NAME
    damaged = damage((bound_plan / PLAN_NAME).read_text())
    file.write_bytes(damaged.encode(errors="surrogateescape"))
    with pytest.raises(PlanUnreadableError) as raised:
        read_plan(planned)
    message = str(raised.value)
    assert message.startswith(f"{file}: ")
    assert said in message
    assert "write it anew" in message
    assert len(message) < 600


def test_a_missing_plan_a_folder_and_a_giant_are_one_line(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PlanUnreadableError, match=r"holds no plan\.json; write one with"):
        read_plan(tmp_path / "nowhere")
    with pytest.raises(PlanUnreadableError, match="a plan is a folder; name the one"):
        read_plan(planned / PLAN_NAME)
    monkeypatch.setattr(plan_folder, "MAX_PLAN_BYTES", 10)
    with pytest.raises(PlanUnreadableError, match="larger than any plan"):
        read_plan(planned)
    (planned / PLAN_NAME).unlink()
    (planned / PLAN_NAME).mkdir()
    monkeypatch.undo()
    with pytest.raises(PlanUnreadableError, match="Is a directory"):
        read_plan(planned)


def test_a_damaged_copy_of_the_profile_is_one_line(planned: Path) -> None:
    next((planned / "used/profile").glob("*.parquet")).write_bytes(b"PAR1")
    with pytest.raises(ProfileUnreadableError):
        read_used_profile(planned)


def test_launchers_ask_for_as_many_devices_as_the_plan(planned: Path) -> None:
    plan = read_plan(planned)
    emitted = launch_files(emit_all(VerifiedPlan.waive(plan, reason="a test")))
    texts = {name: str(content) for name, content in emitted.contents.items()}
    step = json.loads(texts["launch/reference/step.json"])["parallelism"]
    assert (
        step["tensor"] * step["pipeline"] * step["data"] == present(plan.decision).num_devices == 2
    )
    arguments = texts["launch/megatron-lm/megatron_args.txt"]
    assert f"--tensor-model-parallel-size {step['tensor']}\n" in arguments
    assert f"--pipeline-model-parallel-size {step['pipeline']}\n" in arguments
    batch = texts["launch/slurm/job.sbatch"]
    nodes = int(_value(r"#SBATCH --nodes=(\d+)", batch))
    assert int(_value(r"export NNODES=(\d+)", batch)) == nodes
    assert nodes * int(_value(r"export NPROC_PER_NODE=(\d+)", batch)) == 2
    for name in ("launch/reference/run.sh", "launch/megatron-lm/run.sh"):
        own = int(_value(r"NNODES:-(\d+)", texts[name]))
        assert own * int(_value(r"NPROC_PER_NODE:-(\d+)", texts[name])) == 2


def _value(pattern: str, text: str) -> str:
    return present(re.search(pattern, text))[1]


def test_the_second_of_two_writers_of_one_plan_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    write_folder(folder, {PLAN_NAME: "{}"})
    with sole_writer(folder, what="`moetune plan`"), pytest.raises(OutputError, match="another"):
        write_folder(folder, {PLAN_NAME: "{} "})
    assert (folder / PLAN_NAME).read_text() == "{}"
    write_folder(folder, {PLAN_NAME: "{} "})
    assert [file.name for file in folder.iterdir()] == [PLAN_NAME]


def test_what_a_killed_writer_staged_goes_with_the_next_plan(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    write_folder(folder, {PLAN_NAME: "{}"})
    staged = folder / f"{plan_folder.STAGED_PREFIX}x"
    staged.mkdir()
    write_folder(folder, {PLAN_NAME: "{}"})
    assert staged.is_dir()
    os.utime(staged, (0.0, 0.0))
    write_folder(folder, {PLAN_NAME: "{} "})
    assert [file.name for file in folder.iterdir()] == [PLAN_NAME]
