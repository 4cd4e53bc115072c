"""Where a command is started, and what lies there, ends in one line at worst."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PLAN = ("plan", "spec.yaml", "-o", "plan")


def _ended(
    *arguments: str, cwd: Path, gone: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "tuner", *arguments]
    shell = 'rmdir "$PWD" && exec "$@"'
    return subprocess.run(
        ["sh", "-c", shell, "sh", *command] if gone else command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=cwd,
        env=os.environ | environment,
    )


def test_a_module_of_the_user_that_hides_a_library_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("goal: {kind: train}\n")
    failures = []
    for name, content in {
        "numpy": "x = 1",
        "yaml": "raise RuntimeError('mine')",
        "typer": "",
    }.items():
        # A file and a folder hide a library alike.
        for file in (f"{name}.py",) if name == "numpy" else (f"{name}/__init__.py",):
            place = tmp_path / file.replace("/", "-").removesuffix(".py")
            (place / file).parent.mkdir(parents=True)
            (place / file).write_text(content)
            ended = _ended(*PLAN, cwd=tmp_path, PYTHONPATH=f"{place}{os.pathsep}{ROOT}")
            line = f"moetune: {place / file} hides the library {name!r} of "
            is_said = ended.stderr.startswith(line) and len(ended.stderr.splitlines()) == 1
            is_said &= "RuntimeError: mine" in ended.stderr or name != "yaml"
            if ended.returncode != 3 or not is_said:
                failures.append(f"{file}: {ended.returncode} {ended.stderr[-300:]}")
    assert failures == []


def test_a_defect_where_nothing_is_hidden_is_shown_as_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "sys.modules['tuner.cli.app'] = module = types.ModuleType('tuner.cli.app')\n"
        "module.run = lambda arguments: 1 / 0\n"
    )
    ended = _ended(cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


def test_a_defect_is_not_blamed_on_a_library_that_merely_lies_on_the_path_twice(
    tmp_path: Path,
) -> None:
    (tmp_path / "yaml").mkdir()
    (tmp_path / "yaml" / "__init__.py").write_text("def load():\n    return 1 / 0\n")
    failures = []
    for defect in ("[].no_such", "__import__('yaml').load()"):
        (tmp_path / "sitecustomize.py").write_text(
            "import sys, types\n"
            "sys.modules['tuner.cli.app'] = module = types.ModuleType('tuner.cli.app')\n"
            f"module.run = lambda arguments: {defect}\n"
        )
        ended = _ended(cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
        last = ended.stderr.splitlines()[-1]
        if ended.returncode != 1 or "Traceback" not in ended.stderr or "Error: " not in last:
            failures.append(f"{defect}: {ended.returncode} {ended.stderr[-300:]}")
    assert failures == []


def test_a_current_folder_that_was_deleted_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = _ended(*PLAN, cwd=gone, gone=True)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr.startswith("moetune: the current folder: No such file"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_folder_whose_name_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    shutil.copytree(ROOT / "examples" / "models" / "tiny-moe", folder)
    words = ("plan", "--model", str(folder / "config.json"), "--device", "h100-sxm")
    ended = _ended(*words, "--devices", "2", "--time-limit", "2s", "-o", "plan", cwd=tmp_path)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert "has a name that is not UTF-8" in line
    assert not (tmp_path / "plan").exists()
