"""Kills `moetune verify` at many moments of a launch and counts leftovers; run as

    python tests/benchmarks/kill_moments.py --seed 25 --moments 24 PLAN OPTIONS OF VERIFY ...

for example, for a plan of examples/engines/deepspeed in its environment:

    ... PLAN --launcher command --metrics deepspeed --steps 8 --command "bash {launch}/run.sh ..."

At each moment, 0.3 s to `--longest` after the start, verify gets Ctrl-C, SIGTERM, Ctrl-C twice, or
SIGKILL; after SIGKILL the next verification of the plan has to clean up. Counted are then the
processes that did not exist before, their sessions, and their memory.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

SIGNALS = (
    ("Ctrl-C", (signal.SIGINT,)),
    ("SIGTERM", (signal.SIGTERM,)),
    ("Ctrl-C twice", (signal.SIGINT, signal.SIGINT)),
    ("SIGKILL", (signal.SIGKILL,)),
)
ENDS_S = 60.0
"""Time limit for verify to end its trial."""
SETTLES_S = 3.0


def alive() -> dict[int, float]:
    """Return the processes of this machine with their start times."""
    return {
        one.pid: one.info["create_time"]
        for one in psutil.process_iter(["create_time", "status"])
        if one.info["status"] != psutil.STATUS_ZOMBIE
    }


def left(before: dict[int, float]) -> list[dict[str, Any]]:
    """Return new processes; kernel threads have no memory and do not count."""
    result = []
    for pid, began in alive().items():
        if before.get(pid) == began or pid == os.getpid():
            continue
        try:
            one = psutil.Process(pid)
            bytes_, words = one.memory_info().rss, " ".join(one.cmdline())[:100]
            session = os.getsid(pid)
        except (psutil.Error, ProcessLookupError):
            continue
        if bytes_:
            result.append({"pid": pid, "session": session, "bytes": bytes_, "words": words})
    return result


def tried(plan: Path, options: Sequence[str], *, name: str, moment_s: float) -> dict[str, Any]:
    """Start a verification, end it at a moment, and return what is left."""
    verify = [sys.executable, "-m", "tuner", "verify", str(plan), "--trials", "1", *options]
    before = alive()
    running = subprocess.Popen(
        verify, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(moment_s)
    started = len(left(before)) - 1
    for number in dict(SIGNALS)[name]:
        running.send_signal(number)
        time.sleep(0.2)
    began_s = time.monotonic()
    try:
        code: int | None = running.wait(timeout=ENDS_S)
    except subprocess.TimeoutExpired:
        code = None
    took_s = time.monotonic() - began_s
    if name == "SIGKILL":
        # The next one ends what is left before it launches anything.
        again = subprocess.Popen(
            [*verify, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(5.0)
        again.send_signal(signal.SIGINT)
        again.wait(timeout=ENDS_S)
    time.sleep(SETTLES_S)
    result = left(before)
    return {
        "signal": name,
        "moment_s": round(moment_s, 1),
        "code": code,
        "ended_after_s": round(took_s, 1),
        "processes_then": started,
        "left": result,
        "sessions": len({one["session"] for one in result}),
        "left_bytes": sum(one["bytes"] for one in result),
    }


def main() -> int:
    """Try every moment; 1 where anything was left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--seed", type=int, default=25)
    parser.add_argument("--moments", type=int, default=24)
    parser.add_argument("--longest", type=float, default=25.0, help="seconds after the start")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of moetune verify")
    chosen = parser.parse_args()
    # Shells start what is in the background with Ctrl-C ignored, and so would be what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rng = random.Random(chosen.seed)
    dirty = 0
    for number in range(chosen.moments):
        name = SIGNALS[number % len(SIGNALS)][0]
        moment_s = rng.uniform(0.3, chosen.longest)
        with tempfile.TemporaryDirectory(prefix="moetune-moments-") as scratch:
            plan = Path(scratch) / "plan"
            shutil.copytree(chosen.plan, plan, ignore=shutil.ignore_patterns("trials"))
            result = tried(plan, chosen.options, name=name, moment_s=moment_s)
        dirty += bool(result["left"]) or result["code"] is None
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"{chosen.moments} moments, {dirty} with something left\n")
    return 1 if dirty else 0


if __name__ == "__main__":
    sys.exit(main())
