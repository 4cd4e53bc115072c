"""Ends what runs in a verification's scratch folder once the verification is gone.

    trials/commands.NODE@SCRATCH    path of a verification's scratch folder; locked (flock)

Processes of a trial carry its folder as their mark (tuner/verify/termination.py), so those of one
verification are found and those of others are left alone; scratch folders have unique names.

    guardian            a shell that reads from a pipe of the verification, in a session of its own.
                        If the pipe closes without a line, whatever killed the verification, it
                        becomes `python -m tuner.verify.leftovers`, which ends the processes and
                        removes the folder
    next verification   of the plan, on this machine: does the same where the guardian was killed,
                        too, or has not finished. The lock ends with its holder

Deployments of a plan share ports, so one verification at a time launches them (deployments.lock).

Not covered: file systems without locks, on which every verification counts as running; processes on
other machines or of another user. A next verification removes no folder outside the plan's.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tuner.errors import EnvironmentMissingError, OutputError
from tuner.verify.termination import TRIAL_MARK, end_marked, single_interrupt

MOST_PATH_BYTES: Final = 4096
DISMISS_S: Final = 5.0
"""Seconds after which a guardian that is told to end is killed."""

GUARDIAN: Final = ("/bin/sh", "-c", 'trap "" HUP INT TERM; read -r line || exec "$@"', "sh")
"""A shell and not Python: it starts within milliseconds and holds next to no memory."""

SCRATCH_PREFIX: Final = "moetune-"
"""Prefix of folders with the files and logs of running trials."""
LOCK_NAME: Final = "deployments.lock"

HELD_BACK: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals that a guardian survives: a scheduler sends them to every process at once."""


@contextmanager
def register_scratch(trials: Path, *, scratch: Path) -> Iterator[None]:
    """Register and guard the folder of this verification's trials, and remove it in the end.

    Args:
        trials: folder of the plan's trials.
        scratch: folder of the trials' folders; its name is unique.

    Raises:
        OutputError: the folder cannot be written.
        EnvironmentMissingError: no shell can be started.
    """
    own = trials / f"{_prefix()}{scratch.name}"
    hidden = own.with_name(f".{own.name}")
    with _writable(trials):
        stream = hidden.open("wb")
    with stream:
        guardian = None
        try:
            stream.write(os.fsencode(scratch.resolve()))
            stream.flush()
            # Invisible until it is locked.
            with contextlib.suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hidden.rename(own)
            guardian = _start_guardian(own, scratch=scratch)
            yield
        finally:
            with single_interrupt() as interruption:
                interruption.hold()
                hidden.unlink(missing_ok=True)
                # Processes that still run are found by this file only.
                if end_marked(str(scratch.resolve())):
                    shutil.rmtree(scratch, ignore_errors=True)
                    own.unlink(missing_ok=True)
                if guardian is not None:
                    _dismiss(guardian)


@contextmanager
def scratch_folder(
    trials: Path,
    *,
    inside: Path | None = None,
    on_message: Callable[[str], None] = lambda _line: None,
) -> Iterator[Path]:
    """End leftovers, and yield a new folder for this verification's trials, guarded.

    Args:
        trials: folder of the plan's trials.
        inside: folder to make it in, e.g. `trials`, which other nodes see; None: the temporary one.
        on_message: gets a line if something was ended.

    Raises:
        OutputError: the folder cannot be written.
        EnvironmentMissingError: no shell can be started.
    """
    if end_leftovers(trials):
        on_message("a verification of this plan was killed; its processes here are ended")
    with _writable(trials):
        scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=inside))
    with register_scratch(trials, scratch=scratch):
        yield scratch


@contextmanager
def exclusive_use(trials: Path, *, plan: Path) -> Iterator[Path]:
    """Lock a plan's deployments, end leftovers, and yield the scratch folder.

    Args:
        trials: folder of the plan's trials.
        plan: folder of the plan, for the message.

    Raises:
        OutputError: the folder cannot be written, or another verification has it.
        EnvironmentMissingError: no shell can be started.
    """
    with _writable(trials):
        lock = (trials / LOCK_NAME).open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{plan}: another `moetune verify` launches this plan's deployments; wait for it,"
                " or copy the plan"
            ) from error
        except OSError:
            pass  # No locks there, see above.
        with scratch_folder(trials, inside=trials) as scratch:
            yield scratch


@contextmanager
def _writable(trials: Path) -> Iterator[None]:
    """Make the folder of trials; refuse it if it, or what is opened here, cannot be written."""
    try:
        trials.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"cannot write {str(trials)!r}: {error.strerror}") from error


def _dismiss(guardian: subprocess.Popen[bytes]) -> None:
    """Tell the guardian that nothing is left; a stopped shell does not answer."""
    try:
        guardian.communicate(b"\n", timeout=DISMISS_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()


def _start_guardian(own: Path, *, scratch: Path) -> subprocess.Popen[bytes]:
    ender = (sys.executable, "-P", "-m", "tuner.verify.leftovers", str(own), str(scratch.resolve()))
    # It must not count as a process of a trial that this verification may be.
    environment = {name: value for name, value in os.environ.items() if name != TRIAL_MARK}
    # The shell inherits the mask, which holds back what arrives before its trap is set.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        return subprocess.Popen(
            (*GUARDIAN, *ender),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentMissingError(f"{GUARDIAN[0]}: {error.strerror}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_leftovers(trials: Path) -> int:
    """End the processes of killed verifications here; return how many verifications there were."""
    dead = 0
    for file in sorted(trials.glob(f"{glob.escape(_prefix())}*")):
        with contextlib.suppress(OSError), file.open("rb+") as stream:
            # A running verification holds the lock.
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            scratch = Path(os.fsdecode(stream.read(MOST_PATH_BYTES)))
            # Its folders may be gone by now; a damaged file names none.
            is_named = scratch.is_absolute() and file.name == f"{_prefix()}{scratch.name}"
            if not is_named or end_marked(str(scratch)):
                file.unlink(missing_ok=True)
                dead += 1
                if scratch.parent == trials.resolve():
                    shutil.rmtree(scratch, ignore_errors=True)
    return dead


def _prefix() -> str:
    return f"commands.{os.uname().nodename}@"


def main(arguments: Sequence[str]) -> None:
    """End a killed verification: its file, and its scratch folder."""
    own, scratch = map(Path, arguments)
    if end_marked(str(scratch)):
        own.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
