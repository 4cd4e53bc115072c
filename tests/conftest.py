"""What every test may take for granted, however the run was started."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, however slow the machine: what fails once fails again. To look
# for new ones: HYPOTHESIS_PROFILE=random pytest tests/...; a find becomes an @example.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True)
settings.register_profile("random", _PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Heed SIGINT, which a shell without job control makes its background jobs ignore."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)
