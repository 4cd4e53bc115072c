"""The distribution: what it holds, what it needs, and how little its help text imports."""

import ast
import os
import re
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest

from tests.rows import each_row

CHECKOUT = Path(__file__).parents[1]
PACKAGES = ("tuner", "solvers", "profilers")
HEAVY = ("torch", "pandas", "pyarrow", "optuna", "ortools", "pulp", "scipy", "numpy", "matplotlib")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _seconds(*arguments: str) -> float:
    """Return the wall time of a Python command, in seconds."""
    start_s = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, env=_environment()
    )
    return time.perf_counter() - start_s


HELP_OF_ALL = """
import sys
import typer.main
from typer.testing import CliRunner
from tuner.cli.app import app

def helped(command, *path):
    shown = CliRunner().invoke(app, [*path, "--help"])
    assert shown.exit_code == 0, path
    tops = {name.split(".")[0] for name in sys.modules}
    print(" ".join(path), *tops.intersection(sys.argv[1:]), sep=",")
    for name, below in getattr(command, "commands", {}).items():
        helped(below, *path, name)

helped(typer.main.get_command(app))
"""


def test_help_of_every_command_imports_nothing_heavy() -> None:
    # One process for all, in which the first command that imports too much is named.
    lines = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL, *HEAVY],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(),
    ).stdout.splitlines()
    imports = {name: heavy for name, *heavy in (line.split(",") for line in lines)}
    assert {"", "plan", "profile", "profile diff"} <= imports.keys()
    assert {name: heavy for name, heavy in imports.items() if heavy} == {}


def test_the_program_itself_imports_nothing_heavy_for_its_help() -> None:
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tuner", "--help"],
        check=True,
        capture_output=True,
        text=True,
        env=_environment(),
    ).stderr
    modules = {line.split("|")[-1].strip().split(".")[0] for line in shown.splitlines()}
    assert "typer" in modules
    assert modules.isdisjoint(HEAVY), modules & set(HEAVY)


def test_help_costs_little_more_than_the_import_of_typer() -> None:
    # 0.3 s is the promise; on a noisy machine it is held as a ratio: an idle core needs 0.04-0.08 s
    # for the import and about twice that for the help text. Both take turns, so that a busy while
    # meets both, and the fastest of each counts.
    pairs = [
        (_seconds("-c", "import typer, typer.main, typer.core"), _seconds("-m", "tuner", "--help"))
        for _ in range(4)
    ]
    import_s, help_s = map(min, zip(*pairs, strict=True))
    assert help_s < 6.0 * import_s


@each_row("package", PACKAGES)
def test_packages_hold_nothing_but_a_docstring_in_their_init_files(package: str) -> None:
    files = list((CHECKOUT / package).rglob("__init__.py"))
    assert files
    for file in files:
        (statement,) = ast.parse(file.read_text(encoding="utf-8")).body
        assert isinstance(statement, ast.Expr), file
        assert isinstance(statement.value, ast.Constant), file


@each_row("package", PACKAGES)
def test_every_folder_of_modules_is_a_package(package: str) -> None:
    folders = {file.parent for file in (CHECKOUT / package).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_no_folder_of_tests_is_a_package() -> None:
    assert list((CHECKOUT / "tests").rglob("__init__.py")) == []


def test_highspy_is_neither_required_nor_installed() -> None:
    assert not any("highspy" in line.lower() for line in requires("moetune") or ())
    with pytest.raises(PackageNotFoundError):
        version("highspy")


def test_torch_is_required_by_an_extra_only() -> None:
    torch = [line for line in requires("moetune") or () if line.startswith("torch")]
    assert torch
    assert all("extra ==" in line for line in torch)


@each_row("script", ("tests/run.sh", "examples/quickstart.sh", "examples/setup.sh", ".ci/run"))
def test_scripts_name_what_exists(script: str) -> None:
    text = (CHECKOUT / script).read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", str(CHECKOUT / script)], check=True)
    for name in re.findall(r"(?:examples|tests)/[\w./-]+\.(?:sh|yaml|txt)", text):
        assert (CHECKOUT / name).exists(), f"{script} names {name}"


def test_no_python_that_is_new_enough_is_one_clear_line(tmp_path: Path) -> None:
    for name in ("dirname", "bash"):
        found = subprocess.run(["bash", "-c", f"type -P {name}"], capture_output=True, text=True)
        (tmp_path / name).symlink_to(found.stdout.strip())
    copy = tmp_path / "check out" / "examples"
    copy.mkdir(parents=True)
    text = (CHECKOUT / "examples" / "setup.sh").read_text(encoding="utf-8")
    (copy / "setup.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-c", 'set -eu; source "$0"; setup_environment run', str(copy / "setup.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "no Python 3.11 or newer" in line


def test_engines_that_cannot_be_had_are_left_out_and_fail_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "examples"
    copy.mkdir()
    for name in ("pyproject.toml", "examples/setup.sh"):
        (tmp_path / name).write_text((CHECKOUT / name).read_text(encoding="utf-8"))
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Knows of no engine, and every pip install fails.
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"-m pip"*|*-c*) exit 1;; esac\n{sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [
            "bash",
            "-c",
            'set -euo pipefail; source "$0"; install_engines; echo on',
            copy / "setup.sh",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    *_, said, last = done.stdout.splitlines()
    assert last == "on"
    for name in ("megatron-core", "torchtitan", "deepspeed"):
        assert name in said


def test_the_wheel_holds_the_three_packages_and_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--quiet", "--wheel-dir", str(tmp_path), str(CHECKOUT)],
        check=True,
        env=_environment() | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    (wheel,) = tmp_path.glob("moetune-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
