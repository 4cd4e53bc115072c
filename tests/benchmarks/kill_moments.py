"""Kills `moetune verify` at many moments of a launch and counts leftovers; run as

    python tests/benchmarks/kill_moments.py --seed 25 --moments 24 PLAN OPTIONS OF VERIFY ...

for example, for a plan of examples/engines/deepspeed or of examples/serving/cpu in its environment:

    ... PLAN --launcher command --metrics deepspeed --steps 8 --command "bash {launch}/run.sh ..."
    ... PLAN --launcher command --url http://127.0.0.1:30000 --command "bash {launch}/local.sh ..."

At each moment, `--earliest` to `--longest` after the start, verify gets Ctrl-C, SIGTERM, Ctrl-C
twice or SIGKILL, or SIGKILL ends a command that it has started, or one of the command's larger
processes; then verify has to say so and to end. Counted is what is there `SETTLES_S` after verify
at the latest: processes, the ports that they listened at, the files of /dev/shm that they had
mapped, and verify's own folders. What engines leave in the temporary folder is only printed
(`engine_files`): vLLM its sockets, PyTorch its cache of compiled code.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.bars import parse, say

SIGNALS = {
    "Ctrl-C": (signal.SIGINT,),
    "SIGTERM": (signal.SIGTERM,),
    "Ctrl-C twice": (signal.SIGINT, signal.SIGINT),
    "SIGKILL": (signal.SIGKILL,),
}
"""To verify."""
COMMAND, WORKER = "SIGKILL of a command", "SIGKILL of a worker"
KINDS = (*SIGNALS, COMMAND, WORKER)

ENDS_S = 90.0
"""Time limit for verify to end its trial."""
SETTLES_S = 10.0
WORKER_BYTES = 100_000_000
SHARED = re.compile(r"/dev/shm/[^\s/]+$", re.MULTILINE)


@dataclass(kw_only=True)
class Verification:
    """A verification that runs, and what belongs to it."""

    process: subprocess.Popen[bytes]
    plan: Path
    temporary: Path
    sessions: set[int] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    shared: set[Path] = field(default_factory=set)

    def look(self) -> None:
        """Note the sessions of its processes, their ports and their files in /dev/shm."""
        own = {one.pid for one in self.processes()}
        for pid in own:
            with suppress(ProcessLookupError):
                self.sessions.add(os.getsid(pid))
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
                self.shared |= {Path(name) for name in SHARED.findall(maps)}
        self.ports |= {port for pid, port in listeners() if pid in own}

    def processes(self) -> list[psutil.Process]:
        """Return those with its temporary folder, or in a session of one of them."""
        return [one for one in psutil.process_iter() if self._has(one)]

    def _has(self, one: psutil.Process) -> bool:
        with suppress(psutil.Error, ProcessLookupError):
            if one.status() == psutil.STATUS_ZOMBIE:
                return False
            if os.getsid(one.pid) in self.sessions:
                return True
            return one.environ().get("TMPDIR") == str(self.temporary)
        return False

    def left(self) -> dict[str, Any]:
        """Return what is left of it."""
        folders = (*self.temporary.glob("moetune-*"), *(self.plan / "trials").glob("*-*"))
        return {
            "processes": [_words(one) for one in self.processes()],
            "ports": sorted(self.ports & {port for _, port in listeners()}),
            "shared": sorted(str(one) for one in self.shared if one.exists()),
            "folders": sorted(one.name for one in folders),
        }

    def phase(self) -> str:
        """Return how far it is."""
        if "ready after" in (self.plan.parent / "stderr").read_text(encoding="utf-8"):
            return "traffic"
        return "trial" if self.victims(COMMAND) else "before"

    def victims(self, name: str) -> list[psutil.Process]:
        """Return the commands that it has started, or their larger processes."""
        with suppress(psutil.Error, ProcessLookupError):
            commands = [
                one
                for one in psutil.Process(self.process.pid).children()
                if os.getsid(one.pid) == one.pid and "tuner.verify.termination" not in one.cmdline()
            ]
            if name == COMMAND:
                return commands
            below = [one for command in commands for one in command.children(recursive=True)]
            return [one for one in below if one.memory_info().rss > WORKER_BYTES]
        return []


def listeners() -> Iterator[tuple[int | None, int]]:
    """Yield the processes that listen, and their ports."""
    for one in psutil.net_connections("inet"):
        if one.status == psutil.CONN_LISTEN and one.laddr:
            yield one.pid, one.laddr.port


def _words(one: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{one.pid} {one.memory_info().rss} {' '.join(one.cmdline())[:100]}"
    return f"{one.pid}"


def started(plan: Path, options: Sequence[str], *, temporary: Path) -> Verification:
    """Start a verification of one trial."""
    words = [sys.executable, "-m", "tuner", "verify", str(plan), "--trials", "1", *options]
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=(plan.parent / "stderr").open("wb"),
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )
    return Verification(process=process, plan=plan, temporary=temporary, sessions={process.pid})


def hit(running: Verification, *, name: str, rng: random.Random) -> str:
    """Send the signals; return what was killed, if it was not verify."""
    running.look()
    for number in SIGNALS.get(name, ()):
        running.process.send_signal(number)
        time.sleep(0.2)
    if name in SIGNALS:
        return ""
    while not (victims := running.victims(name)) and running.process.poll() is None:
        time.sleep(0.1)
    if not victims:
        return "nothing, it was over"
    running.look()
    victim = rng.choice(victims)
    words = _words(victim)
    victim.kill()
    return words


def tried(plan: Path, options: Sequence[str], *, name: str, moment_s: float, seed: int) -> Any:
    """Start a verification, end it at a moment, and return what is left."""
    temporary = plan.parent / "tmp"
    temporary.mkdir()
    running = started(plan, options, temporary=temporary)
    time.sleep(moment_s)
    phase = running.phase()
    victim = hit(running, name=name, rng=random.Random(seed))
    then = len(running.processes())
    began_s = time.monotonic()
    code = None
    with suppress(subprocess.TimeoutExpired):
        code = running.process.wait(timeout=ENDS_S)
    ended_s = time.monotonic()
    while any((left := running.left()).values()) and time.monotonic() < ended_s + SETTLES_S:
        time.sleep(0.1)
    running.process.kill()
    return {
        "kind": name,
        "moment_s": round(moment_s, 1),
        "phase": phase,
        "victim": victim,
        "said": _said(plan) if victim else "",
        "code": code,
        "ended_after_s": round(ended_s - began_s, 1),
        "gone_after_s": round(time.monotonic() - began_s, 1),
        "processes_then": then,
        "left": {what: found for what, found in left.items() if found},
        "engine_files": sorted(one.name for one in temporary.iterdir()),
    }


def _said(plan: Path) -> str:
    """Return the reason that the record of the trial holds."""
    files = sorted((plan / "trials").glob("[0-9]*.json"))
    reasons = [str(json.loads(file.read_text())["reason"]) for file in files]
    return reasons[-1] if reasons else (plan.parent / "stderr").read_text()[-200:]


def main() -> int:
    """Try every moment; 1 where anything was left."""
    chosen = parse(
        __doc__,
        {
            "plan": Path,
            "--seed": 25,
            "--moments": 24,
            "--earliest": 0.3,
            "--longest": 25.0,
            "options": {"nargs": argparse.REMAINDER, "help": "of moetune verify"},
        },
    )
    # Shells start what is in the background with Ctrl-C ignored, and so would be what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(chosen.seed)
    results = []
    for number in range(chosen.moments):
        name = KINDS[number % len(KINDS)]
        moment_s = rng.uniform(chosen.earliest, chosen.longest)
        with tempfile.TemporaryDirectory(prefix="moments-") as scratch:
            plan = Path(scratch) / "plan"
            shutil.copytree(chosen.plan, plan, ignore=shutil.ignore_patterns("trials"))
            result = tried(plan, chosen.options, name=name, moment_s=moment_s, seed=number)
        results.append(result)
        say(json.dumps(result))
    return _conclude(results)


def _conclude(results: Sequence[dict[str, Any]]) -> int:
    dirty = [one for one in results if one["left"] or one["code"] is None]
    for name in KINDS:
        own = [one for one in results if one["kind"] == name]
        if own:
            longest_s = max(one["gone_after_s"] for one in own)
            unclean = sum(one in dirty for one in own)
            say(f"{name}: {len(own)}, {unclean} unclean, {longest_s} s at most")
    say(f"{len(results)} moments, {len(dirty)} with something left")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
