"""Every command of the README is executed as it stands, in a copy of the checkout.

A command is a line of an indented block, or of a fenced one of sh, bash or console, less its
comment and the parts in brackets, which a reader may leave out; a line that ends in a backslash
goes on. The lines of a block run in one folder, one after the other. What does not run here is
named with its reason and with the test that does it instead; a line that is neither fails.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Final

import pytest
import typer.main

from tests.rows import each_row
from tuner.cli.app import app

CHECKOUT = Path(__file__).parents[1]
README = CHECKOUT / "README.md"
COPIED = ("examples", "tests", "tuner", "solvers", "profilers", "pyproject.toml", "README.md")
NEW_ENVIRONMENT: Final = "tests/test_packaging.py"

ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    "profile  →  plan": ("a picture of the chain", ""),
    "Profile --costs--> CostTable": ("a picture of the chain", ""),
    "pip install": ("makes an environment, over the network", NEW_ENVIRONMENT),
    "bash examples/quickstart.sh": ("its commands are the block below it", "tests/test_readme.py"),
    "bash tests/run.sh": ("runs this test", "tests/run.sh"),
    "moetune check examples/checks": ("is a step of its own", "tests/run.sh"),
    "python tests/benchmarks/training_accuracy.py RUNS.csv": (
        "takes the published runs, which do not ship",
        "tests/benchmarks/test_training_accuracy.py",
    ),
    "moetune backtest RUNS.csv": (
        "takes the published runs, which do not ship",
        "tests/tuner/cli/test_backtest.py",
    ),
    "python tests/benchmarks/serving_accuracy.py RUNS.csv": (
        "takes the published runs, which do not ship",
        "tests/benchmarks/test_serving_accuracy.py",
    ),
    "python tests/benchmarks/serving_agreement.py RUNS.csv": (
        "takes the published runs, which do not ship",
        "tests/benchmarks/test_serving_agreement.py",
    ),
    "srun moetune profile": (
        "needs a Slurm cluster; the same ranks are started on emulated nodes",
        "tests/profilers/links/test_emulated_nodes.py",
    ),
    "pytest -m slow tests/": ("is a test of its own, of minutes", "tests/run.sh"),
    "python tests/benchmarks/fit_or_not.py NEW.jsonl": (
        "runs 120 trials, a quarter of an hour",
        "tests/benchmarks/test_fit_or_not.py",
    ),
    "python tests/benchmarks/profile_interpolation.py": (
        "ends with 1 on a machine whose neighbours are busy",
        "tests/benchmarks/test_profile_interpolation.py",
    ),
    "python tests/benchmarks/placement_balance.py --routing ROUTING": (
        "takes recordings of large models, which do not ship",
        "tests/benchmarks/test_placement_balance.py",
    ),
}
"""First words of a line: why it does not run here, and what covers it."""

EXITS: Final[Mapping[str, tuple[int, str]]] = {
    "moetune estimate examples/serving/deepseek-v3-32-h200.yaml --instances 4 --launch"
    " 'python -m sglang.launch_server --model-path M --tp 8 --ep 8 --max-running-requests 64'": (
        1,
        "the launch of today falls behind the traffic, which is what the example is about",
    ),
}
"""Commands that end otherwise than with 0, and why."""

LONG: Final = (
    "moetune profile -o profile",
    "python tests/benchmarks/",
    "bash examples/worked/run.sh",
    "bash examples/pictures/make.sh",
    "moetune plan examples/worked/",
    "moetune plan examples/placement/",
    "moetune plan examples/serving/",
)
"""A block with such a line is `slow`; what such plans say is tested under tests/tuner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lines that run after each other in one folder."""

    line: int
    commands: tuple[str, ...]

    @property
    def is_long(self) -> bool:
        return any(command.startswith(LONG) for command in self.commands)


def blocks(text: str) -> Iterator[Block]:
    """Give the blocks that hold commands, in order."""
    fence, started, lines = "", 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.startswith("```"):
            if lines:
                yield Block(line=started, commands=tuple(commands(lines)))
            fence, started, lines = "" if fence else line[3:].strip() or "text", number + 1, []
        elif fence in ("sh", "bash", "console"):
            lines.append(line.removeprefix("$ "))
        elif not fence and line.startswith("    ") and not line.lstrip().startswith(("-", "*")):
            started = started if lines else number
            lines.append(line)
        elif not fence and lines:
            yield Block(line=started, commands=tuple(commands(lines)))
            lines = []


def commands(lines: list[str]) -> Iterator[str]:
    """Give the commands of a block, without comments and optional parts."""
    begun = ""
    for line in lines:
        bare = re.sub(r"(^|\s{2,})#\s.*$", "", line.strip()).strip()
        if bare.endswith("\\"):
            begun += bare.removesuffix("\\").rstrip() + " "
            continue
        whole = re.sub(r"\s*\[[^\]']*\]…?(?!')", "", begun + bare)
        begun = ""
        yield from (part.strip() for part in whole.split("; ") if part.strip())


def elsewhere(command: str) -> str | None:
    """Return the entry of the table that a command falls under."""
    return next((words for words in ELSEWHERE if command.startswith(words)), None)


BLOCKS = tuple(blocks(README.read_text(encoding="utf-8")))
PYTHON = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.M)
RUN_HERE = [
    pytest.param(block, id=f"line-{block.line}", marks=[pytest.mark.slow] * block.is_long)
    for block in BLOCKS
    if not all(elsewhere(command) for command in block.commands)
]


def test_what_does_not_run_here_is_still_in_the_readme_and_covered() -> None:
    listed = [command for block in BLOCKS for command in block.commands]
    assert EXITS.keys() <= set(listed)
    for words, (reason, cover) in ELSEWHERE.items():
        assert reason
        assert any(command.startswith(words) for command in listed), f"{words} is gone"
        assert not cover or (CHECKOUT / cover).is_file(), cover


def test_every_line_is_a_command_or_is_named() -> None:
    known = ("moetune ", "bash ", "python ")
    for block in BLOCKS:
        for command in block.commands:
            assert elsewhere(command) or command.startswith(known), f"line {block.line}: {command}"


@each_row("command", [one for block in BLOCKS for one in block.commands if "moetune " in one])
def test_the_program_takes_every_command_also_where_its_block_is_slow(command: str) -> None:
    words = shlex.split(command.removeprefix("srun ").removeprefix("moetune "), comments=True)
    group = typer.main.get_command(app)
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]  # type: ignore[attr-defined]  # of a group
    with group.make_context("moetune", words):
        pass


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", RUN_HERE)
def test_the_commands_of_a_block_do_what_they_say(block: Block, tmp_path: Path) -> None:
    for name in COPIED:
        place = CHECKOUT / name
        ignored = shutil.ignore_patterns("__pycache__", ".*")
        if place.is_dir():
            shutil.copytree(place, tmp_path / name, ignore=ignored)
        else:
            shutil.copy(place, tmp_path / name)
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    for command in block.commands:
        if elsewhere(command):
            continue
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        assert done.returncode == EXITS.get(command, (0, ""))[0], said


@each_row("code", PYTHON)
def test_the_python_of_the_readme_imports_what_exists(code: str) -> None:
    imports = [one for one in ast.parse(code).body if isinstance(one, ast.ImportFrom)]
    assert imports
    for one in imports:
        module = import_module(one.module or "")
        assert [name.name for name in one.names if not hasattr(module, name.name)] == []


# The last test calls the same functions.
@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON)
def test_the_python_of_the_readme_runs(code: str, tmp_path: Path) -> None:
    shutil.copytree(CHECKOUT / "examples", tmp_path / "examples")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_block_is_read_as_it_is_typed() -> None:
    indented = "Words.\n\n    moetune a [--b C] \\\n      'd e'    # why\n\n"
    first, second = blocks(f"{indented}```sh\n$ moetune f; bash g\n```\n")
    assert first.commands == ("moetune a 'd e'",)
    assert second.commands == ("moetune f", "bash g")


def test_deployments_placements_launches_and_checks_of_the_api_do_what_their_examples_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_from_file_location("examples_of_the_api", CHECKOUT / "examples" / "api.py")
    assert spec is not None
    assert spec.loader is not None
    examples = module_from_spec(spec)
    spec.loader.exec_module(examples)
    examples.deployment(tmp_path)
    examples.placement(tmp_path)
    examples.launches_of_today()
    examples.checked()
    assert "train-llama-dense pass" in capsys.readouterr().out


@pytest.mark.slow
def test_all_functions_of_the_api_do_what_their_examples_say() -> None:
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / "examples" / "api.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "as planned" in done.stdout
