"""What every test may take for granted, however the run was started."""

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Callable, Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import MARK, Leaks
from tests.patience import patient_s
from tests.rows import Failures
from tests.sockets import reachable_at
from tuner.__main__ import COLLECTED_AFTER

# As tests/run.sh has it: threads of BLAS take memory and time that tests bound.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.set_threshold(*COLLECTED_AFTER)

# The same examples in every run, however slow the machine: what fails once fails again. To look
# for new ones: HYPOTHESIS_PROFILE=random pytest tests/...; a find becomes an @example.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", _PATIENT, derandomize=True)
settings.register_profile("random", _PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_finish() -> None:
    """Spare collections of cycles the thousands of tests and modules, which live until the end."""
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Give a test the more time, the more else the machine does."""
    marked = item.get_closest_marker("timeout")
    seconds = marked.args[0] if marked else item.config.getini("timeout")
    if seconds and item.config.getoption("timeout") is None:
        item.add_marker(pytest.mark.timeout(patient_s(float(seconds))), append=False)
    yield


@pytest.fixture(scope="session", autouse=True)
def _leaks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Leaks]:
    """Fail a run that leaves a process, or a folder in the temporary directory that it is given."""
    temporary = tmp_path_factory.mktemp("temporary")
    former = {"TMPDIR": os.environ.get("TMPDIR"), MARK: os.environ.get(MARK)}
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    leaks = Leaks(temporary)
    yield leaks
    found = leaks.found()
    tempfile.tempdir = None
    for name, value in former.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if found:
        pytest.fail("these tests leave\n" + "\n".join(found), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def _leaks_of_a_file(_leaks: Leaks, request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    _leaks.note(request.node.name)


@pytest.fixture(scope="module", autouse=True)
def _ctrl_c_is_not_swallowed() -> None:
    """Remove what Hypothesis calls as garbage is collected: a Ctrl-C in there would be ignored."""
    gc.callbacks[:] = [call for call in gc.callbacks if "hypothesis" not in call.__module__]


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Heed SIGINT, which a shell without job control makes its background jobs ignore."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.fixture
def failures() -> Iterator[Failures]:
    """Collect what fails in the rows of a loop; the test fails with all of it at its end."""
    noted = Failures()
    yield noted
    noted.check()


@pytest.fixture(scope="session")
def sockets_of_children() -> Callable[[], dict[int, set[str]]]:
    """Addresses at which each process that this one started can be reached, by its id."""

    def reachable() -> dict[int, set[str]]:
        found = {}
        for process in psutil.Process().children(recursive=True):
            # Whoever has ended between the two looks listens no more.
            with contextlib.suppress(psutil.Error):
                if its := reachable_at(process):
                    found[process.pid] = its
        return found

    return reachable


@pytest.fixture(scope="session")
def outside_card() -> str:
    """A network card of this machine that others can reach; loopback where it has none."""
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if any(each.family == 2 and not each.address.startswith("127.") for each in addresses):
            return name
    return "lo"
