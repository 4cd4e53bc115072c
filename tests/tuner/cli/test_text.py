"""What people read holds nothing that steers a terminal; what programs read stays as it is."""

import re
from pathlib import Path

import pytest

from tuner.cli import text
from tuner.cli.app import run
from tuner.report.printable import shortened

FOUL = "a\x1b[31m\t\u202e\x9b\u2066\x07\rb"
Captured = pytest.CaptureFixture[str]


def test_lines_stay_and_signs_that_steer_are_spelled_out(capsys: Captured) -> None:
    text.print_text(f"one\n{FOUL}")
    text.print_stderr(FOUL)
    printed = capsys.readouterr()
    spelled = r"a\x1b[31m\t\u202e\x9b\u2066\x07\rb"
    assert printed.out == f"one\n{spelled}\n"
    assert printed.err == f"{spelled}\n"


def test_what_programs_read_is_printed_as_it_is(capsys: Captured) -> None:
    text.print_exact('{"a": "\u202e"}')
    assert capsys.readouterr().out == '{"a": "\u202e"}\n'


def test_nothing_else_prints() -> None:
    folder = Path(text.__file__).parent
    printing = {
        file.name
        for file in folder.glob("*.py")
        if re.search(r"(?<![\w.])(print|echo|secho)\(|std(out|err)\.write\(", file.read_text())
    }
    assert printing == {"text.py"}


def test_a_foul_name_reaches_no_terminal(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "x\x1b]0;owned\x07\u202ey"
    folder.mkdir()
    spec = folder / "spec.yaml"
    spec.write_text("goal: {kind: train, '\x85\u202e': 1}\nclu\u202ester: 2\n")
    for arguments in (
        ["plan", str(spec), "-o", str(tmp_path / "out")],
        ["explain", str(folder)],
        ["profile", "show", str(folder)],
        ["check", str(folder)],
        ["report", str(folder)],
        ["init", str(folder / "new.yaml"), "--model", str(folder), "--goal", "\x1b[2J"],
    ):
        assert run(arguments) in (1, 2, 3)
        printed = capsys.readouterr()
        shown = (printed.out + printed.err).replace("\n", "")
        assert shown.isprintable(), (arguments, ascii(shown))


def test_long_lists_are_shortened() -> None:
    few = [f"--x{number}" for number in range(40)]
    assert shortened(few) == ", ".join(few)
    assert shortened([*few, *["--y"] * 1960]).endswith("--x39 and 1,960 more")
