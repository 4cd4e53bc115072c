"""Every command by name, and what an error becomes: one line on stderr and an exit code.

0 done; 1 a negative result (infeasible, regression); 2 unusable input; 3 environment; 130 Ctrl-C.
Any other exception is a defect and keeps its traceback.

Modules of commands are imported for every `--help`, so they import nothing heavy themselves.
"""

import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from profilers.errors import ProfilerError, first_problem
from profilers.out_of_memory import is_lack_of_memory
from solvers.errors import SolverError
from tuner.cli import (
    backtest,
    calibrate,
    check,
    compare,
    doctor,
    estimate,
    explain,
    init,
    plan,
    profile,
    report,
    schema,
    verify,
)
from tuner.cli.panels import PanelCommand
from tuner.cli.text import print_stderr, print_text
from tuner.errors import SpecError, TunerError

INTERRUPTED: Final = 130
SIGNALLED: Final = 128
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
ENVIRONMENT: Final = 3
UNUSABLE: Final = 2
LONGEST_LINE: Final = 2000
"""Characters of an error message; a longer one loses its middle."""
COMPLETION: Final = "_MOETUNE_COMPLETE"
"""Environment variable that a shell sets to ask for completions; Typer then handles the call."""
NO_MEMORY: Final = "no memory is left for this; free some, or raise the limit (ulimit -v)"

NOT_UTF8: Final = "a file or folder has a name that is not UTF-8, which cannot be stored; rename it"

ClickError: type[Exception] = next(
    # Typer brings its own click in some releases, so the class has no fixed home.
    base
    for base in typer.BadParameter.__mro__
    if base.__name__ == "ClickException"
)

app = typer.Typer(
    name="moetune",
    help="Measure your machines, choose the Mixture-of-Experts configuration to launch, verify it.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print_text(installed("moetune"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print_text(context.get_help())
        raise typer.Exit


app.command("doctor")(doctor.command)
app.add_typer(profile.app, name="profile")
app.command("estimate")(estimate.command)
app.command("init")(init.command)
app.command("plan")(plan.command)
app.command("verify", cls=PanelCommand)(verify.command)
app.command("explain")(explain.command)
app.command("compare")(compare.command)
app.command("report")(report.command)
app.command("backtest")(backtest.command)
app.command("calibrate")(calibrate.command)
app.command("check")(check.command)
app.command("schema")(schema.command)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with _leaving_by_an_exception():
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        code = _invoke(list(arguments))
        sys.stdout.flush()
    except KeyboardInterrupt:
        print_stderr()
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough.
        _drop_unwritable()
        return 0
    except Exception as error:
        refusal = _refusal(error)
        if refusal is None:
            raise
        message, code = refusal
        print_stderr(f"moetune: {_shortened(' '.join(message.split()))}")
        _drop_unwritable()
    return code


def _drop_unwritable() -> None:
    """Drop what is buffered for a stdout that takes nothing, on which Python would fail at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _leaving_by_an_exception() -> Iterator[None]:
    """Turn termination signals into exceptions, so that children and partial files are removed."""

    def leave(number: int, _stack: FrameType | None) -> NoReturn:
        raise SystemExit(SIGNALLED + number)

    # Under nohup a lost terminal is ignored.
    heeded = [signum for signum in ENDING if signal.getsignal(signum) is not signal.SIG_IGN]
    former = {signum: signal.signal(signum, leave) for signum in heeded}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _invoke(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    if os.environ.get(COMPLETION):
        command.main(args=[], prog_name="moetune", complete_var=COMPLETION)
    if {("-o", ""), ("--out", "")} & {*pairwise(arguments)} or {"--out="} & {*arguments}:
        # A path of no letters would be the current folder.
        raise SpecError("-o is empty; name what to write")
    try:
        with command.make_context("moetune", arguments) as context:
            command.invoke(context)
    except typer.Exit as finished:
        return finished.exit_code
    return 0


def _refusal(error: Exception) -> tuple[str, int] | None:
    """Return the message of an error and the exit code; None for a defect."""
    if isinstance(error, SolverError | ProfilerError | TunerError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError | ImportError | RuntimeError) and is_lack_of_memory(error):
        return NO_MEMORY, ENVIRONMENT
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}", ENVIRONMENT
    if isinstance(error, ClickError):
        return _usage(error), UNUSABLE
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return NOT_UTF8, UNUSABLE
    is_pydantic = type(error).__module__.split(".")[0] in ("pydantic", "pydantic_core")
    if is_pydantic and isinstance(error, ValueError):
        return _first_problem(error), UNUSABLE
    return None


def _shortened(line: str) -> str:
    """Cut the middle out of a line that a user's value makes too long."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 4 :]}"


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    message: str = error.format_message()  # type: ignore[attr-defined]  # click's, see ClickError
    path = context.command_path if context is not None else "moetune"
    return f"{message.rstrip('. ')}. Try '{path} --help'."


def _first_problem(error: ValueError) -> str:
    """Return a pydantic error as one line, for input without a message of our own."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        is_undecodable = "surrogates not allowed" in str(error)
        return NOT_UTF8 if is_undecodable else str(error)
    return f"{error.title}: {first_problem(error)}"
