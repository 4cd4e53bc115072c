"""The process that matches expressions is limited, and lives with limits that are stricter."""

import json
import subprocess
import sys
from pathlib import Path

import psutil

from tuner.engines.metrics import regex_worker

STRICTER_KIB = 800_000


def test_it_is_held_to_its_limit_or_to_a_stricter_one_of_the_user() -> None:
    cases = {
        "true": regex_worker.LIMIT_BYTES,
        f"ulimit -v {STRICTER_KIB}": STRICTER_KIB * 1024,
    }
    worker = str(Path(regex_worker.__file__))
    for limit, expected in cases.items():
        with subprocess.Popen(
            ["bash", "-c", f'{limit}; exec "$@"', "bash", sys.executable, "-I", worker, "(?P<a>b)"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()) == {"groups": ["a"]}
            _, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_AS)
            assert hard == expected, limit
            process.stdin.close()
