"""What a user sees of an error: one line, and the exit code that the documents promise."""

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel

from profilers.errors import MissingLibraryError, ProfileUnreadableError
from profilers.records import ProfileHeader
from profilers.store import write_header
from solvers.errors import RejectedClaimError
from tests.profilers.testing import fake_machine
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.__main__ import main, shadowed
from tuner.cli import app as frame
from tuner.cli.goals import METRICS, SERVING_FORMATS, TRAINING_FORMATS
from tuner.cli.text import quote_path
from tuner.engines.registry import metrics_folders
from tuner.errors import OutputError, SpecError
from tuner.estimate.registry import NAMES
from tuner.estimate.serving.registry import READERS


class Record(BaseModel):
    count: int


def _raise(error: BaseException) -> Callable[[list[str]], int]:
    def invoke(_arguments: list[str]) -> int:
        raise error

    return invoke


def _pydantic_error() -> ValueError:
    with pytest.raises(ValueError, match="count") as raised:
        Record.model_validate({"count": "many"})
    return raised.value


@each_row(
    ("error", "code", "line"),
    [
        (SpecError("spec.yaml: goal: is missing"), 2, "moetune: spec.yaml: goal: is missing"),
        (OutputError("cannot write 'x': No space"), 3, "moetune: cannot write 'x': No space"),
        (ProfileUnreadableError("p: truncated"), 2, "moetune: p: truncated"),
        (MissingLibraryError("no torch"), 3, "moetune: no torch"),
        (RejectedClaimError("slots"), 3, "moetune: slots"),
        (SpecError("two\nlines\r\n here"), 2, "moetune: two lines here"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 3, "moetune: x: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "x"), 3, "moetune: x: Read-only"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 3, "moetune: x: Permission"),
        (_pydantic_error(), 2, "moetune: Record: count: Input should be a valid integer"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(frame, "_invoke", _raise(error))
    assert frame.run([]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert len(printed.err.splitlines()) == 1


def test_ctrl_c_ends_the_line_and_says_130(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(frame, "_invoke", _raise(KeyboardInterrupt()))
    assert frame.run([]) == 130
    assert capsys.readouterr().err == "\n"


@each_row("error", [ValueError("ours"), KeyError("x"), TypeError("ours")])
def test_a_defect_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_invoke", _raise(error))
    with pytest.raises(type(error)):
        frame.run([])


@each_row(
    ("arguments", "line"),
    [
        (["bogus"], "moetune: No such command 'bogus'. Try 'moetune --help'."),
        (["schema"], "moetune: Missing argument 'NAME'. Try 'moetune schema --help'."),
        (["doctor", "--loud"], "moetune: No such option: --loud. Try 'moetune doctor --help'."),
        (["profile", "-o", "x", "--ranks", "0"], "moetune: Invalid value for '--ranks'"),
        (["profile"], "moetune: --out is missing: say where to write"),
        (["profile", "-o", "x", "--budget", "60"], "moetune: --budget: '60' has no unit"),
        (["profile", "-o", "x", "--budget", "0s"], "moetune: --budget: '0s' must be more"),
        (["profile", "-o", "x", "--for", "/nowhere.yaml"], "moetune: /nowhere.yaml"),
        (["profile", "show", "/nowhere"], "moetune: /nowhere does not exist"),
        (["profile", "diff", "/nowhere", "/nowhere"], "moetune: /nowhere does not exist"),
        (
            ["profile", "-o", "x", "--suite", "bogus"],
            "moetune: suite 'bogus' is not one of kernels, links, storage, kv, engine",
        ),
        (["report", "x", "--format", "csv"], "moetune: --format 'csv': a report is html, md or"),
        (["schema", "bogus"], "moetune: schema 'bogus' is not one of spec, plan, verified"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    line: str,
    capsys: Captured,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, arguments).startswith(line)


def test_without_arguments_it_helps(capsys: Captured) -> None:
    assert "doctor" in output(capsys, [])


def test_the_version_is_that_of_the_distribution(capsys: Captured) -> None:
    from importlib.metadata import version

    assert output(capsys, ["--version"]) == f"{version('moetune')}\n"


def test_our_own_packages_are_not_strangers() -> None:
    assert shadowed(Path(__file__).parents[3]) == ""


@each_row("name", ["solvers", "profilers"])
@each_row("regular", [True, False])
def test_a_folder_of_the_user_that_hides_a_package_is_refused(
    name: str, regular: bool, tmp_path: Path
) -> None:
    own = tmp_path / f"{name} {regular}"
    (own / name).mkdir(parents=True)
    if regular:
        (own / name / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from tuner.__main__ import main; sys.exit(main())"],
        cwd=own,
        env={**os.environ, "PYTHONPATH": str(own)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not regular:
        # A regular package wins over a folder without __init__.py, wherever it lies.
        assert done.returncode == 0
        return
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert f"hides the package {name!r}" in line


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m tuner schema spec | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_closed_output_is_no_defect() -> None:
    command = f"{sys.executable} -m tuner schema spec >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_while_commands_are_still_imported_says_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "run", _raise(KeyboardInterrupt()))
    assert main() == 130


@each_row("swallowed", [False, True])
def test_what_fails_by_ctrl_c_says_130_whatever_it_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, swallowed: bool
) -> None:
    def importing(_arguments: list[str]) -> int:
        # As numpy's extension modules do.
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            if swallowed:
                return 1
            raise ImportError("cannot import name 'umath'") from None
        return 0

    monkeypatch.setattr(frame, "run", importing)
    before = signal.getsignal(signal.SIGINT)
    assert main() == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored_and_errors_without_one_stay_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_arguments: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 0

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(frame, "run", interrupted)
        assert main() == 0
        monkeypatch.setattr(frame, "run", _raise(ImportError("no numpy")))
        with pytest.raises(ImportError, match="no numpy"):
            main()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@each_row(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_who_is_told_to_end_leaves_by_an_exception_and_says_by_what(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    left = []

    def killed(_arguments: list[str]) -> int:
        try:
            os.kill(os.getpid(), number)
        finally:
            left.append(number)
        return 0

    monkeypatch.setattr(frame, "_invoke", killed)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            frame.run([])
        assert (ended.value.code, left) == (code, [number])
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_under_nohup_a_terminal_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hung_up(_arguments: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        return 0

    monkeypatch.setattr(frame, "_invoke", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert frame.run([]) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_the_terminal_s_encoding_lacks_is_escaped(tmp_path: Path) -> None:
    machine = fake_machine(device="Gerät 9")
    header = ProfileHeader(moetune_version="0", created="now", machine=machine, tables={})
    write_header(tmp_path, header)
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "profile", "show", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr
    assert r"Ger\xe4t 9" in done.stdout


def test_help_names_every_format() -> None:
    metrics = [name for name, _ in metrics_folders()]
    tables = ((TRAINING_FORMATS, NAMES), (SERVING_FORMATS, READERS), (METRICS, metrics))
    for named, names in tables:
        assert re.split(", | or ", named) == sorted(names)


def test_a_path_of_no_letters_is_not_the_folder_at_hand(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["plan", "s.yaml", "-o", ""],
        ["report", "p", "--out", ""],
        ["init", "--yes", "--out="],
    ):
        assert refusal(capsys, words) == "moetune: -o is empty; name what to write"
    assert not list(tmp_path.iterdir())


def test_the_next_command_can_be_typed_whatever_a_folder_is_called() -> None:
    for name, shown in (
        ("plan", "plan"),
        ("-p ü", "'./-p ü'"),
        ("a b", "'a b'"),
        ("/x/-o", "/x/-o"),
    ):
        assert quote_path(Path(name)) == shown
