"""A user's regular expression costs a bounded time, whatever it repeats."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.engines.metrics import regex_worker
from tuner.engines.metrics.interface import TrialWork
from tuner.engines.metrics.regex import adapter
from tuner.errors import SpecError

JOB = TrialWork(num_devices=1, samples_per_step=1, tokens_per_step=1)


def test_groups_are_read_line_by_line() -> None:
    read = adapter(r"iter (?P<step>\d+) took (?P<step_s>[0-9.]+) s")
    result = [read(f"iter {at} took {at}.5 s \U0001f642", JOB) for at in (1, 2)]
    assert [(one.step, one.step_s) for one in result if one] == [(1, 1.5), (2, 2.5)]
    assert read("something else", JOB) is None


@each_row("expression", ("(?P<step_s>a{1,99999999999})", "(?P<step_s>a", "(" * 250))
def test_a_quantifier_beyond_what_python_counts_is_one_line(expression: str) -> None:
    with pytest.raises(SpecError, match="--metrics regex: "):
        adapter(expression)


def test_a_match_that_backtracks_for_ever_ends() -> None:
    start_s = time.monotonic()
    for expression in ("(?P<step_s>(a|a)*b)", "(?P<step_s>(?:){4294967294})"):
        with pytest.raises(SpecError, match=r"takes more than 1\.00 s or too much memory"):
            adapter(expression)("a" * 1000, JOB)
    assert time.monotonic() - start_s < 60


# The process that matches expressions is limited, and lives with limits that are stricter.

STRICTER_KIB = 800_000


@each_row(
    ("limit", "expected"),
    {
        "true": regex_worker.LIMIT_BYTES,
        f"ulimit -v {STRICTER_KIB}": STRICTER_KIB * 1024,
    }.items(),
)
def test_it_is_held_to_its_limit_or_to_a_stricter_one_of_the_user(
    limit: str, expected: Any
) -> None:
    worker = str(Path(regex_worker.__file__))
    with subprocess.Popen(
        ["bash", "-c", f'{limit}; exec "$@"', "bash", sys.executable, "-I", worker, "(?P<a>b)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert json.loads(present(process.stdout).readline()) == {"groups": ["a"]}
        _, hard = psutil.Process(process.pid).rlimit(psutil.RLIMIT_AS)
        assert hard == expected, limit
        present(process.stdin).close()
