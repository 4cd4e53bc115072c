"""Start ranks on this host that connect through a file, without a port reachable from outside.

    python -P -m profilers.local_ranks --ranks 2 profilers.steps step.json --report report.json

Each rank is `python -P -m MODULE ...` in a session of its own, with RANK, WORLD_SIZE, LOCAL_RANK
and LOCAL_WORLD_SIZE set as torchrun sets them. They connect through a `torch.distributed.FileStore`
in a folder that only this user may enter; a TCPStore would listen on every address of the host,
even when it is given 127.0.0.1, and accepts whatever it is sent. gloo and NCCL are restricted to
loopback.

The first rank that fails ends the run, and is named on stderr as torchrun names it (`exitcode`).
The exit code is that rank's, 128 plus the number of the signal that killed it. Ctrl-C, SIGTERM and
SIGHUP end all ranks; whatever ends this process, the folder goes with it: if it is killed outright,
its ranks notice, remove the folder and leave.

Not covered: other users of this host, who can connect to gloo's ports on loopback.
"""

import argparse
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

LOOPBACK_ONLY: Final[Mapping[str, str]] = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
"""Environment of ranks on one host; overrides what a login script exports for several nodes."""

RENDEZVOUS: Final = "MOETUNE_RENDEZVOUS"
"""Environment variable of ranks that connect through a file: its path."""

PARENT: Final = "MOETUNE_RENDEZVOUS_PARENT"
"""The process that started them, without which they leave."""

STORE_NAME: Final = "meet"
FOLDER_PREFIX: Final = "moetune-ranks-"
"""Prefix of the folders that are made here; no others are removed."""
GRACE_S: Final = 2.0
"""Seconds between asking a rank to leave and killing it."""
PARENT_POLL_S: Final = 0.5
POLL_S: Final = 0.02
"""Seconds between two checks whether a rank that received SIGTERM has left."""
SIGNAL_EXIT: Final = 128
OUT_OF_MEMORY_EXIT: Final = 77
"""Exit code of a rank of profilers/steps that ran out of memory."""


@contextmanager
def rendezvous_folder(inside: Path | None = None) -> Iterator[Path]:
    """Make a folder that only this user may enter, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=inside) as folder:
        yield Path(folder)


def end_sessions(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to every session, then kill what is left of it."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline_s = time.monotonic() + GRACE_S
    for process in processes:
        while not has_ended(process) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        _signal(process, signal.SIGKILL)
        process.wait()


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a session's leader has ended; unreaped, its number is not reused."""
    if process.returncode is not None:
        return True
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a leader that has ended, and kill what is left of its session."""
    if not has_ended(process):
        return None
    _signal(process, signal.SIGKILL)
    return process.wait()


def leave_with(parent: int, *, folder: Path) -> None:
    """End this process when its parent is gone, and remove the folder, as nothing else would."""

    def watch() -> NoReturn:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)
        _remove(folder)
        os._exit(1)

    def clean_up() -> None:
        if os.getppid() != parent:
            _remove(folder)

    # A rank may end first, from writing to a pipe without a reader.
    atexit.register(clean_up)
    threading.Thread(target=watch, daemon=True).start()


def _remove(folder: Path) -> None:
    """Remove a folder of ranks; another rank may create its store's file anew meanwhile."""
    # The path is from the environment, where anything may stand.
    if not folder.name.startswith(FOLDER_PREFIX):
        return
    deadline_s = time.monotonic() + GRACE_S
    while folder.exists() and time.monotonic() < deadline_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(POLL_S)


def run_ranks(command: Sequence[str], *, ranks: int, inside: Path | None = None) -> int:
    """Run a command once for every rank and wait for all of them.

    Args:
        command: program and arguments, the same for every rank.
        ranks: how many.
        inside: where their folder is made; None: where temporary files go.

    Returns:
        The exit code: 0, or that of the first rank that failed.
    """
    with (
        rendezvous_folder(inside) as folder,
        started_ranks(command, ranks=ranks, folder=folder) as started,
    ):
        return _first_failure(started)


@contextmanager
def started_ranks(
    command: Sequence[str],
    *,
    ranks: int,
    folder: Path,
    errors: Callable[[int], Path] | None = None,
    pipe: int | None = None,
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a command once for every rank, and end the sessions of all in the end.

    Args:
        command: program and arguments, the same for every rank.
        ranks: how many.
        folder: in which they connect, of `rendezvous_folder`.
        errors: file of a rank for what it prints; None: it prints where this process does.
        pipe: write end of a pipe that all of them have; None: there is none.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        # One by one: those that run must be known when starting the next one fails.
        for rank in range(ranks):
            with ExitStack() as files:
                output = None if errors is None else files.enter_context(errors(rank).open("wb"))
                started.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        pass_fds=() if pipe is None else (pipe,),
                        start_new_session=True,
                        env=rank_environment(rank, ranks=ranks, folder=folder),
                    )
                )
        yield started
    finally:
        end_sessions(started)


def rank_environment(rank: int, *, ranks: int, folder: Path) -> dict[str, str]:
    """Return the variables of a rank that connects through a folder of `rendezvous_folder`."""
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        **LOOPBACK_ONLY,
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}",
        "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{ranks}",
        RENDEZVOUS: str(folder / STORE_NAME),
        PARENT: f"{os.getpid()}",
    }


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended well or one has not; name that one."""
    left = dict(enumerate(processes))
    while left:
        # Sleeps until a child ends, whichever it is, and leaves it for `exit_code` to find.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        if ended is not None and ended.si_pid not in {process.pid for process in processes}:
            os.waitpid(ended.si_pid, 0)  # A child from before this process was exec'ed.
            continue
        codes = {rank: exit_code(process) for rank, process in left.items()}
        failed = [(code, rank) for rank, code in codes.items() if code]
        if failed:
            # A rank that merely lost a peer ends by itself, with a traceback.
            code, rank = min(
                failed, key=lambda failure: (failure[0] > 0, failure[0] != OUT_OF_MEMORY_EXIT)
            )
            _print(f"rank {rank} {_ending(code)} (exitcode: {code}); the others are ended")
            return code if code > 0 else SIGNAL_EXIT - code
        left = {rank: process for rank, process in left.items() if codes[rank] is None}
    return 0


def _ending(code: int) -> str:
    if code > 0:
        return f"failed with exit code {code}"
    with suppress(ValueError):
        return f"died with {signal.Signals(-code).name}"
    return f"died with signal {-code}"


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    # A leader that is not reaped keeps its number, even when it has ended before its session.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _print(line: str) -> None:
    print(f"profilers.local_ranks: {line}", file=sys.stderr, flush=True)  # noqa: T201 - one line


def _leave(number: int, _stack: FrameType | None) -> NoReturn:
    # The ranks are being ended from here on; another signal must not interrupt that. Not SIG_IGN:
    # Python complains of a signal that came before that and is handled after it.
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, _go_on)
    raise SystemExit(SIGNAL_EXIT + number)


def _go_on(_number: int, _stack: FrameType | None) -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    """Run a module on some ranks and return the exit code of the first that failed."""
    parser = argparse.ArgumentParser(prog="profilers.local_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, required=True, help="how many, at least 1")
    parser.add_argument("--folder", type=Path, help="where the folder of the store is made")
    parser.add_argument("module", help="that every rank runs, e.g. profilers.steps")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the module")
    options = parser.parse_args(arguments)
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: must be at least 1")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    command = (sys.executable, "-P", "-m", options.module, *options.arguments)
    try:
        return run_ranks(command, ranks=options.ranks, inside=options.folder)
    except OSError as error:
        _print(f"{error.filename or options.module}: {error.strerror}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
