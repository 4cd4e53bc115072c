"""Every fenced block of every README does what it says, or is marked `text`.

A `sh` block holds commands, a line each; a line that ends in a backslash goes on, and what follows
two spaces and a `#` is a comment. The blocks of a README run in order in one copy of the checkout:
those of the front page by default, whose printed output must also be what its `text` blocks show,
the others under `--slow`. By default every command must at least be one that the command line
accepts. What does not run at all is named with its reason and with the test that does it instead.
A `python` block runs, a `yaml` block that is a whole spec is read.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from tests.expect import present
from tests.printed import unwrapped
from tests.rows import each_row
from tuner.cli.app import app
from tuner.goals.place_spec import read_place_spec
from tuner.goals.serve_spec import read_serve_spec
from tuner.goals.train_spec import read_spec
from tuner.spec.kind import goal_kind
from tuner.spec.place import Dispatch
from tuner.spec.place_method import Method

CHECKOUT = Path(__file__).parents[1]
FRONT = CHECKOUT / "README.md"
FOLDERS = ("examples", "profilers", "solvers", "tests", "tuner")
READMES = (FRONT, *sorted(p for name in FOLDERS for p in (CHECKOUT / name).rglob("README.md")))
LANGUAGES = frozenset({"sh", "python", "yaml", "text"})

MOST_LINES: Final[Mapping[str, int]] = {
    "README.md": 200,
    "tests/benchmarks/README.md": 450,
    "tuner/README.md": 150,
    "solvers/README.md": 150,
    "profilers/README.md": 150,
}
LONGEST_LINE = 120
"""Characters, on the front page."""

NEW_ENVIRONMENT: Final = "tests/test_packaging.py"

ELSEWHERE: Final[Mapping[str, tuple[str, str]]] = {
    "pip install": ("makes an environment, over the network", NEW_ENVIRONMENT),
    "bash examples/quickstart.sh": ("its commands are in the next block", "tests/test_readme.py"),
    "bash examples/engines/deepspeed/run.sh": (
        "makes an environment, over the network",
        "tests/tuner/verify/test_real_engines.py",
    ),
    "bash examples/engines/megatron_lm/run.sh": (
        "makes an environment, over the network",
        "tests/tuner/verify/test_real_engines.py",
    ),
    "bash examples/engines/torchtitan/run.sh": (
        "makes an environment, over the network",
        "tests/tuner/verify/test_real_engines.py",
    ),
    "python examples/api.py": ("has a test of its own", "tests/test_readme.py"),
}
"""First words of a line: why it does not run here, and what covers it."""

BENCHMARKS: Final = "tests/benchmarks"
"""Scripts there take minutes, or data that does not ship; each has a test of its own, or is at
least imported."""

EXITS: Final[Mapping[str, int]] = {
    "moetune estimate examples/serving/deepseek-v3-32-h200.yaml": 1,  # falls behind its traffic
    "moetune profile diff": 1,  # the second machine was slower
}
"""First words of commands that end otherwise than with 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block."""

    line: int
    language: str
    text: str

    @property
    def commands(self) -> tuple[str, ...]:
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        bare = (re.sub(r"(^|\s{2,})#\s.*$", "", line).strip() for line in joined.splitlines())
        return tuple(line for line in bare if line)


def blocks(text: str) -> Iterator[Block]:
    """Give the fenced blocks in order."""
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start()) + 2
        yield Block(line=line, language=found[1], text=found[2])


def blocks_of(readme: Path, language: str) -> tuple[Block, ...]:
    found = blocks(readme.read_text(encoding="utf-8"))
    return tuple(block for block in found if block.language == language)


def is_elsewhere(command: str) -> bool:
    return command.startswith((*ELSEWHERE, f"python {BENCHMARKS}/", "python -m tests."))


def name_of(readme: Path) -> str:
    return readme.relative_to(CHECKOUT).as_posix()


ALL_COMMANDS = tuple(
    (f"{name_of(readme)}:{block.line}", command)
    for readme in READMES
    for block in blocks_of(readme, "sh")
    for command in block.commands
)


@each_row("readme", READMES)
def test_every_block_is_fenced_and_says_what_it_is(readme: Any) -> None:
    text = readme.read_text(encoding="utf-8")
    wrong = [block.line for block in blocks(text) if block.language not in LANGUAGES]
    assert not wrong, f"{name_of(readme)}: lines {wrong} name none of {sorted(LANGUAGES)}"
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"\n\n    \S", prose), f"{name_of(readme)}: an indented block"


def test_readmes_are_short() -> None:
    for name, most in MOST_LINES.items():
        assert len((CHECKOUT / name).read_text(encoding="utf-8").splitlines()) <= most, name
    front = FRONT.read_text(encoding="utf-8").splitlines()
    assert not [line for line in front if len(line) > LONGEST_LINE]


def test_links_and_paths_lead_somewhere() -> None:
    gone = []
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text)
        gone += [
            f"{name_of(readme)}: {target}"
            for target in targets
            if "://" not in target and not (readme.parent / target).exists()
        ]
        gone += [f"{name_of(readme)}: {path}" for path in paths_in(readme) if not is_there(path)]
    assert not gone


def paths_in(readme: Path) -> tuple[str, ...]:
    """Return the paths of the checkout that code spans name, whole or within a command."""
    prose = re.sub(r"^```.*?^```$", "", readme.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    spans = " ".join(re.findall(r"`([^`]+)`", prose))
    # A path of a former commit, as `git show` takes it, follows a colon.
    return tuple(re.findall(rf"(?<![\w/.:])((?:{'|'.join(FOLDERS)})/[\w./*-]+)", spans))


@pytest.mark.parametrize("package", ["profilers", "solvers", "tuner"])
def test_modules_that_a_package_names_are_there(package: str) -> None:
    text = (CHECKOUT / package / "README.md").read_text(encoding="utf-8")
    modules = {
        path.relative_to(CHECKOUT).as_posix() for path in CHECKOUT.glob(f"{package}/**/*.py")
    }
    spans = " ".join(re.findall(r"`([^`\n]+)`", text))
    named = re.findall(r"(?<![\w/*.<>])([a-z][\w/]*\.py)\b", spans)
    assert named
    gone = [
        name
        for name in named
        if not any(module.endswith(f"/{name}") for module in modules) and not is_there(name)
    ]
    assert not gone


def is_there(path: str) -> bool:
    return any(CHECKOUT.glob(path)) if "*" in path else (CHECKOUT / path).exists()


def test_what_runs_elsewhere_is_still_said_and_covered() -> None:
    commands = [command for _, command in ALL_COMMANDS]
    for words, (reason, cover) in ELSEWHERE.items():
        assert reason
        assert any(command.startswith(words) for command in commands), f"{words} is gone"
        assert (CHECKOUT / cover).is_file(), cover
    for words in EXITS:
        assert any(command.startswith(words) for command in commands), f"{words} is gone"


@pytest.mark.parametrize(("place", "command"), ALL_COMMANDS, ids=[at for at, _ in ALL_COMMANDS])
def test_the_command_line_accepts_every_command(place: str, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "moetune":
        parsed = typer.main.get_command(app)
        name, rest = words[1], words[2:]
        inner = parsed.commands[name]  # type: ignore[attr-defined]  # a group
        if rest and rest[0] in getattr(inner, "commands", {}):
            name, inner, rest = rest[0], inner.commands[rest[0]], rest[1:]
        inner.make_context(name, rest)
    elif not is_elsewhere(command):
        assert words[0] in ("bash", "python", "mkdir", "cp", "sed"), place
    scripts = [word for word in words if word.startswith(("examples/", "tests/"))]
    assert all((CHECKOUT / path).exists() for path in scripts if path.endswith((".py", ".sh")))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout that commands may write into."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(CHECKOUT / "examples", tmp_path / "examples", ignore=ignored)
    for name in ("tests", "tuner", "solvers", "profilers", "pyproject.toml"):
        (tmp_path / name).symlink_to(CHECKOUT / name)
    return tmp_path


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def run_line(line: str, folder: Path) -> str:
    """Run a command of a README and return what it prints."""
    done = run(["bash", "-c", line], folder)
    expected = next((code for words, code in EXITS.items() if line.startswith(words)), 0)
    assert done.returncode == expected, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def unhurried(command: str) -> str:
    """Give a search the time that it may lack on a busy machine: its bound would be looser."""
    return f"{command} --time-limit 600s" if command.startswith("moetune plan ") else command


def compact(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_front_page_shows_what_its_commands_print(checkout: Path) -> None:
    shown = list(blocks(FRONT.read_text(encoding="utf-8")))
    for block, after in zip(shown, [*shown[1:], None], strict=True):
        if block.language != "sh":
            continue
        printed = [
            compact(line)
            for command in block.commands
            if not is_elsewhere(command)
            for line in unwrapped(run_line(unhurried(command), checkout)).splitlines()
        ]
        if after is None or after.language != "text":
            continue
        for line in map(compact, after.text.splitlines()):
            start = line.removesuffix(" ...")
            assert any(real.startswith(start) for real in printed), f"line {after.line}: {line}"


RUN_HERE = tuple(
    readme
    for readme in READMES[1:]
    if any(not is_elsewhere(c) for b in blocks_of(readme, "sh") for c in b.commands)
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("readme", RUN_HERE, ids=name_of)
def test_the_commands_of_a_readme_do_what_they_say(readme: Path, checkout: Path) -> None:
    for block in blocks_of(readme, "sh"):
        for command in block.commands:
            if not is_elsewhere(command):
                run_line(command, checkout)


BENCHMARKS_WITHOUT_TEST = tuple(
    path
    for path in sorted(set(paths_in(CHECKOUT / BENCHMARKS / "README.md")))
    if re.fullmatch(rf"{BENCHMARKS}/\w+\.py", path)
    and not (CHECKOUT / BENCHMARKS / f"test_{Path(path).name}").is_file()
)


@pytest.mark.slow
@pytest.mark.parametrize("path", BENCHMARKS_WITHOUT_TEST)
def test_a_benchmark_without_a_test_is_imported(path: str) -> None:
    done = run([sys.executable, "-c", f"import runpy; runpy.run_path({path!r})"], CHECKOUT)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(block.text, id=f"{name_of(readme)}:{block.line}")
        for readme in READMES
        for block in blocks_of(readme, "python")
    ],
)
def test_a_python_block_runs(code: str, checkout: Path) -> None:
    done = run([sys.executable, "-c", code], checkout)
    assert done.returncode == 0, done.stderr[-2000:]


READERS: Final[Mapping[str | None, Callable[[Path], object]]] = {
    "train": read_spec,
    "serve": read_serve_spec,
    "place": read_place_spec,
}


@each_row("readme", READMES)
def test_specs_in_readmes_are_read(checkout: Path, readme: Any) -> None:
    for block in blocks_of(readme, "yaml"):
        spec = checkout / name_of(readme.parent) / "of-a-readme.yaml"
        spec.write_text(block.text, encoding="utf-8")
        READERS[goal_kind(spec)](spec)


def test_blocks_are_read_as_they_are_typed() -> None:
    text = "Words.\n\n```sh\nmoetune a \\\n  'd e'    # why\n\nbash g\n```\n```text\nx\n```\n"
    first, second = blocks(text)
    assert first.commands == ("moetune a 'd e'", "bash g")
    assert (first.line, second.line, second.language) == (4, 10, "text")


def test_the_how_to_of_placements_names_every_method_and_rule_by_its_key() -> None:
    text = (CHECKOUT / "examples" / "placement" / "README.md").read_text(encoding="utf-8")
    assert not [key.value for key in (*Method, *Dispatch) if f"`{key.value}`" not in text]


@pytest.mark.slow
def test_deployments_placements_launches_and_checks_of_the_api_do_what_their_examples_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = present(spec_from_file_location("examples_of_the_api", CHECKOUT / "examples" / "api.py"))
    examples = module_from_spec(spec)
    present(spec.loader).exec_module(examples)
    examples.deployment(tmp_path)
    examples.placement(tmp_path)
    examples.launches_of_today()
    examples.tables()
    examples.checked()
    assert "train-llama-dense pass" in capsys.readouterr().out


@pytest.mark.slow
def test_all_functions_of_the_api_do_what_their_examples_say() -> None:
    done = run([sys.executable, "examples/api.py"], CHECKOUT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "as planned" in done.stdout
