"""Runs commands in its own process, one after the other, and reports how each ended.

python -m tests.fuzz.worker     tasks on stdin, results on stdout, a line of JSON each
"""

import gc
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Final

MOST_ADDRESSES: Final = 16 * 2**30
"""Protects the machine from a failing command; far above the allowed use."""


def main() -> None:
    """Run tasks until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESSES, MOST_ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "w")
    tasks = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from tuner.cli import app

    del app
    for line in tasks:
        answers.write(json.dumps(_ended(json.loads(line))) + "\n")
        answers.flush()


def _ended(task: dict[str, Any]) -> dict[str, Any]:
    from tuner.cli.app import run

    os.chdir(task["cwd"])
    os.environ["HOME"] = os.environ["TMPDIR"] = task["cwd"]
    said = os.open(task["said"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.close(said)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    crash = ""
    try:
        code = run(task["arguments"])
    except SystemExit as left:
        code, crash = 99, f"SystemExit {left.code}"
    except BaseException:
        code, crash = 99, traceback.format_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return {
        "code": code,
        "crash": crash[-3000:],
        "wall_s": time.monotonic() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "grown_bytes": _status("VmHWM") - before,
    }


def _status(name: str) -> int:
    """Return a size of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
