"""A user's regular expression costs a bounded time, whatever it repeats."""

import time

import pytest

from tuner.engines.metrics.interface import TrialWork
from tuner.engines.metrics.regex import adapter
from tuner.errors import SpecError

JOB = TrialWork(num_devices=1, samples_per_step=1, tokens_per_step=1)


def test_groups_are_read_line_by_line() -> None:
    read = adapter(r"iter (?P<step>\d+) took (?P<step_s>[0-9.]+) s")
    result = [read(f"iter {at} took {at}.5 s \U0001f642", JOB) for at in (1, 2)]
    assert [(one.step, one.step_s) for one in result if one] == [(1, 1.5), (2, 2.5)]
    assert read("something else", JOB) is None


def test_a_quantifier_beyond_what_python_counts_is_one_line() -> None:
    for expression in ("(?P<step_s>a{1,99999999999})", "(?P<step_s>a", "(" * 250):
        with pytest.raises(SpecError, match="--metrics regex: "):
            adapter(expression)


def test_a_match_that_backtracks_for_ever_ends() -> None:
    start_s = time.monotonic()
    for expression in ("(?P<step_s>(a|a)*b)", "(?P<step_s>(?:){4294967294})"):
        with pytest.raises(SpecError, match=r"takes more than 1\.00 s or too much memory"):
            adapter(expression)("a" * 1000, JOB)
    assert time.monotonic() - start_s < 60
