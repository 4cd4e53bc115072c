"""Ranks that are started here end together, are named, and leave no folder behind.

They are small programs without PyTorch; tests/profilers/steps/ and test_sockets.py run real ones.
"""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from profilers.local_ranks import FOLDER_PREFIX, GRACE_S, RENDEZVOUS
from tests.patience import patient_s
from tests.rows import each_row

RANK = """
import os, signal, sys, time
from pathlib import Path
from profilers.local_ranks import PARENT, RENDEZVOUS, leave_with
rank = int(os.environ["RANK"])
meet = Path(os.environ[RENDEZVOUS])
leave_with(int(os.environ[PARENT]), folder=meet.parent)
Path(sys.argv[1], f"{rank}.pid").write_text(f"{os.getpid()} {oct(meet.parent.stat().st_mode)}")
"""
"""Says where it is, and goes on as the test says."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _signals_as_in_a_terminal() -> Iterator[None]:
    """Start a process that ignores none: under nohup, or in the background, they inherit that."""
    former = {one: signal.signal(one, signal.SIG_DFL) for one in ENDING}
    try:
        yield
    finally:
        for one, handler in former.items():
            signal.signal(one, handler)


class Job:
    """Ranks under way: `python -P -m profilers.local_ranks --ranks N rank FOLDER`."""

    def __init__(self, folder: Path, text: str, *, ranks: int) -> None:
        self.folder = folder
        self.scratch = folder / "tmp"
        self.scratch.mkdir()
        (folder / "rank.py").write_text(RANK + text)
        with _signals_as_in_a_terminal():
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "profilers.local_ranks", f"--ranks={ranks}"),
                    *("rank", str(folder)),
                ],
                env=os.environ
                | {
                    "TMPDIR": str(self.scratch),
                    "PYTHONPATH": str(folder),
                    "GLOO_SOCKET_IFNAME": "eth0",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank, once it has said where it is."""
        return self._process(f"{rank}.pid")

    def child(self, rank: int) -> psutil.Process:
        """The process that a rank has started, once it has said so."""
        return self._process(f"child-{rank}.pid")

    def _process(self, name: str) -> psutil.Process:
        file = self.folder / name
        until_s = time.monotonic() + patient_s(30.0)
        while not file.exists() or not file.read_text():
            assert time.monotonic() < until_s
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        return psutil.Process(int(file.read_text().split()[0]))

    def ended(self) -> tuple[int, str]:
        """Exit code and what it said on stderr; nobody and nothing may be left."""
        _, said = self.process.communicate(timeout=patient_s(30.0))
        return self.process.returncode, said

    def left(self) -> list[psutil.Process]:
        """Ranks that still run after a while."""
        ranks = [psutil.Process(pid) for pid in self._pids() if psutil.pid_exists(pid)]
        return psutil.wait_procs(ranks, timeout=patient_s(30.0))[1]

    def _pids(self) -> list[int]:
        return [int(file.read_text().split()[0]) for file in self.folder.glob("*.pid")]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    found: list[Job] = []
    yield found
    for job in found:
        job.process.kill()
        job.process.communicate()


def _job(jobs: list[Job], folder: Path, text: str, *, ranks: int = 2) -> Job:
    folder.mkdir(exist_ok=True)
    jobs.append(Job(folder, text, ranks=ranks))
    return jobs[-1]


def test_every_rank_knows_its_place_and_connects_in_a_private_folder(
    jobs: list[Job], tmp_path: Path
) -> None:
    text = """
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
words = [os.environ[name] for name in (*names, "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS")]
os.write(1, (" ".join(words) + "\\n").encode())
"""
    job = _job(jobs, tmp_path, text, ranks=3)
    output, complained = job.process.communicate(timeout=patient_s(30.0))
    assert (job.process.returncode, complained) == (0, "")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert sorted(output.splitlines()) == [
        f"{rank} 3 {rank} 3 lo =lo {threads}" for rank in range(3)
    ]
    modes = {file.read_text().split()[1] for file in tmp_path.glob("*.pid")}
    assert modes == {oct(stat.S_IFDIR | 0o700)}
    assert list(job.scratch.iterdir()) == []


def test_the_rank_that_failed_is_named_and_the_others_are_ended(
    jobs: list[Job], tmp_path: Path
) -> None:
    failures = {
        "sys.exit(7)": (7, "rank 1 failed with exit code 7 (exitcode: 7); the others are ended"),
        "sys.exit(77)": (77, "rank 1 failed with exit code 77 (exitcode: 77)"),
        "os.kill(os.getpid(), signal.SIGKILL)": (137, "rank 1 died with SIGKILL (exitcode: -9)"),
        "os.kill(os.getpid(), signal.SIGRTMIN + 1)": (163, "rank 1 died with signal 35"),
    }
    for number, (failure, (code, words)) in enumerate(failures.items()):
        job = _job(jobs, tmp_path / f"{number}", f"{failure} if rank else time.sleep(600)")
        begun_s = time.monotonic()
        found, said = job.ended()
        assert (found, len(said.splitlines())) == (code, 1), failure
        assert words in said
        assert not job.left()
        assert list(job.scratch.iterdir()) == [], failure
        assert time.monotonic() - begun_s < patient_s(30.0)


def test_a_rank_that_merely_lost_a_peer_is_not_blamed(jobs: list[Job], tmp_path: Path) -> None:
    # Their parent is stopped for a second, so that it finds both ended at once.
    text = """
import subprocess
if rank:
    time.sleep(600)
while not (other := Path(sys.argv[1], "1.pid")).exists() or not other.read_text():
    time.sleep(0.01)
go_on = f"import os, time; time.sleep(1.0); os.kill({os.getppid()}, {int(signal.SIGCONT)})"
os.kill(os.getppid(), signal.SIGSTOP)
subprocess.Popen([sys.executable, "-S", "-c", go_on], start_new_session=True)
os.kill(int(other.read_text().split()[0]), signal.SIGKILL)
sys.exit(1)
"""
    code, said = _job(jobs, tmp_path, text).ended()
    assert (code, said.count("rank 1 died with SIGKILL")) == (137, 1)


@each_row("number", ENDING)
def test_a_signal_ends_all_ranks_and_nothing_is_left(
    jobs: list[Job], tmp_path: Path, number: Any
) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    job = _job(jobs, tmp_path / number.name, deaf if number is signal.SIGHUP else "time.sleep(600)")
    for rank in range(2):
        job.rank(rank)
    begun_s = time.monotonic()
    job.process.send_signal(number)
    job.process.send_signal(number)
    code, said = job.ended()
    assert (code, said) == (128 + number, ""), number
    assert not job.left()
    assert list(job.scratch.iterdir()) == [], number
    assert time.monotonic() - begun_s < GRACE_S + 20.0


@each_row(
    ("name", "ending"),
    {"signalled": "time.sleep(600)", "failed": "sys.exit(7)", "well": "sys.exit(0)"}.items(),
)
def test_processes_that_a_rank_left_behind_are_ended(
    jobs: list[Job], tmp_path: Path, name: str, ending: str
) -> None:
    text = """
import subprocess
endless = "import signal, time; signal.signal(15, signal.SIG_IGN); print(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-S", "-u", "-c", endless], stdout=subprocess.PIPE)
child.stdout.readline()
Path(sys.argv[1], f"child-{rank}.pid").write_text(f"{child.pid} of {rank}")
"""
    job = _job(jobs, tmp_path / name, text + ending, ranks=1)
    if name == "signalled":
        job.child(0)
        job.process.terminate()
    code, _ = job.ended()
    assert code == {"signalled": 128 + signal.SIGTERM, "failed": 7, "well": 0}[name]
    assert (tmp_path / name / "child-0.pid").exists()
    assert not job.left(), name


def test_ranks_whose_starter_was_killed_leave_and_take_the_folder_with_them(
    jobs: list[Job], tmp_path: Path
) -> None:
    notice = "while os.getppid() == int(os.environ[PARENT]): pass\n"
    texts = {
        "waits": "time.sleep(600)",
        "ends before it polls": notice,
        "makes its store's file anew": notice
        + "while meet.parent.exists():\n    try: meet.touch()\n    except OSError: pass\n"
        "    time.sleep(0.001)\n",
    }
    for name, text in texts.items():
        job = _job(jobs, tmp_path / name, text)
        for rank in range(2):
            job.rank(rank)
        assert [oct(one.stat().st_mode) for one in job.scratch.iterdir()] == ["0o40700"]
        job.process.kill()
        assert not job.left()
        assert list(job.scratch.iterdir()) == [], name


@each_row(("name", "is_left"), (("of the user", True), (f"{FOLDER_PREFIX}x", False)))
def test_a_folder_that_was_not_made_here_is_never_removed(
    *, tmp_path: Path, name: str, is_left: bool
) -> None:
    script = """
import sys, time
from pathlib import Path
from profilers.local_ranks import leave_with
leave_with(1, folder=Path(sys.argv[1]))
time.sleep(600)
"""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "file").write_text("of the user")
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(folder)], timeout=patient_s(30.0), check=False
    )
    assert done.returncode == 1
    assert (folder / "file").exists() == is_left


def test_what_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    for words, code, said in (
        (("--ranks=0", "rank"), 2, "--ranks 0: must be at least 1"),
        (("--ranks=2", f"--folder={absent}", "rank"), 2, "No such file or directory"),
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "profilers.local_ranks", *words],
            capture_output=True,
            text=True,
            timeout=patient_s(30.0),
            check=False,
        )
        assert done.returncode == code
        assert said in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
    assert RENDEZVOUS not in os.environ
