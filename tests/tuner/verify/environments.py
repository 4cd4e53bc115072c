"""Environments of real engines, which setup.sh of their examples makes in the checkout."""

import subprocess

import pytest

from tests.benchmarks.launched_engine import CHECKOUT


def require_environment(setup: str, *, limit_s: float) -> None:
    """Make an environment, or skip the test where it cannot be made.

    Args:
        setup: a shell command, run in the checkout.
        limit_s: that it may take.
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", setup],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
        timeout=limit_s,
    )
    if done.returncode:
        pytest.skip(f"the engine cannot be installed: {done.stderr.strip()[-300:]}")
