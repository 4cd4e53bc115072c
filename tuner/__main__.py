"""The command `moetune`: checks that its packages are not shadowed, then runs the command line.

The packages are called tuner, solvers and profilers; a folder of the user may have these names too.
"""

import gc
import os
import signal
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType

from tuner.memory_limit import memory_limit_bytes, run_limited
from tuner.streams import make_usable

SIBLINGS = ("solvers", "profilers")
DEPENDENCIES = (
    *("numpy", "optuna", "ortools", "pandas", "plotly", "psutil", "pulp", "pyarrow", "pydantic"),
    *("rich", "torch", "transformers", "typer", "yaml"),
)
COLLECTED_AFTER = (50_000, 20, 20)
"""New objects before a collection of cycles, and collections before one of older objects. A plan
makes millions of objects and few cycles, so that Python's own 700 cost a tenth of its time."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in tuner/cli/app.py, which a Ctrl-C may keep from being imported."""


def main() -> int:
    """Run `moetune` and return its exit code."""
    make_usable()
    stranger = no_folder() or shadowed(Path(__file__).resolve().parents[1])
    if stranger:
        print(f"moetune: {stranger}", file=sys.stderr)  # noqa: T201 - the command's one line
        return 3

    gc.set_threshold(*COLLECTED_AFTER)
    limit = memory_limit_bytes()
    return _run() if limit is None else run_limited(_run, most_bytes=limit)


def _run() -> int:
    interrupt = _Interrupt()
    former = signal.getsignal(signal.SIGINT)
    if former is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from tuner.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if interrupt.came:
            return INTERRUPTED
        hidden = hidden_dependency(error)
        if not hidden:
            raise
        print(f"moetune: {hidden}", file=sys.stderr)  # noqa: T201 - the command's one line
        return 3
    finally:
        signal.signal(signal.SIGINT, former)
    return INTERRUPTED if code and interrupt.came else code


class _Interrupt:
    """Handler of Ctrl-C that remembers whether it came.

    In the middle of an import a KeyboardInterrupt does not arrive as one: extension modules turn it
    into an ImportError. So every failure after it counts as an interrupt.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, stack: FrameType | None) -> None:
        self.came = True
        signal.default_int_handler(number, stack)


def no_folder() -> str:
    """Report a deleted current folder, which some libraries do not survive; empty otherwise.

    MKL, loaded by torch, prints a line of its own and ends the process with exit code 2.
    """
    try:
        os.getcwd()  # noqa: PTH109 - only whether there is one
    except OSError as error:
        return f"the current folder: {error.strerror}; change to one that exists"
    return ""


def shadowed(home: Path) -> str:
    """Say which sibling package is not the one beside `tuner` in `home`; empty when all are."""
    for name in SIBLINGS:
        module = find_spec(name)
        if module is None:
            return f"the package {name!r} is missing beside {home / 'tuner'}; reinstall moetune"
        places = [Path(place).resolve() for place in module.submodule_search_locations or ()]
        if places != [home / name]:
            where = module.origin or ", ".join(map(str, places))
            return (
                f"{where} hides the package {name!r} of moetune;"
                " start from another folder or take it off PYTHONPATH"
            )
    return ""


def hidden_dependency(error: BaseException) -> str:
    """Return which file shadows a library that we need, if an error comes from that.

    It does if importing the file failed, or the file lacks what was looked up in it. A library that
    is merely on the path twice, as in an environment that sees the system's, is not the cause.
    """
    for name in DEPENDENCIES:
        module = PathFinder.find_spec(name)
        if module is None or module.origin is None:
            continue
        file = Path(module.origin)
        if not _comes_of(error, name, file):
            continue
        home = file.parent.parent if module.submodule_search_locations else file.parent
        elsewhere = [place for place in sys.path if Path(place or ".").resolve() != home.resolve()]
        library = PathFinder.find_spec(name, elsewhere)
        if library is not None and library.origin is not None:
            return (
                f"{file} hides the library {name!r} of {Path(library.origin).parent}"
                f" ({type(error).__name__}: {_first_line(error)});"
                " start from another folder or take it off PYTHONPATH"
            )
    return ""


def _comes_of(error: BaseException, name: str, file: Path) -> bool:
    """Return whether importing a module, or a name that it lacks, caused an error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError) and _is_of(cause.name, name):
            return True
        if isinstance(cause, AttributeError) and _is_of(getattr(cause.obj, "__name__", None), name):
            return True
        if any(_is_import_of(file, inner.f_code) for inner, _ in walk_tb(cause.__traceback__)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _is_of(module: object, name: str) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == name


def _is_import_of(file: Path, code: CodeType) -> bool:
    """Return whether code is what importing a module runs: of its one file, or of its folder."""
    place = Path(code.co_filename)
    is_inside = file.parent in place.parents if file.stem == "__init__" else place == file
    return code.co_name == "<module>" and is_inside


def _first_line(error: BaseException) -> str:
    text = "".join(sign if sign.isprintable() else " " for sign in str(error).split("\n")[0])
    return text[:200]


if __name__ == "__main__":
    sys.exit(main())
