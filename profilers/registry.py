"""The suites by name: functions from a `Setting` to benchmarks, imported when they are used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast

from profilers.benchmark import Suite
from profilers.errors import UnknownNameError

SUITES: Final[Mapping[str, str]] = {
    "kernels": "profilers.kernels.suite:benchmarks",
    "links": "profilers.links.suite:benchmarks",
    "storage": "profilers.background_save:benchmarks",
    "kv": "profilers.kv_transfer.suite:benchmarks",
    "restart": "profilers.restart:benchmarks",
}

DEFAULT_SUITES: Final = tuple(name for name in SUITES if name != "restart")
"""Those that are measured unasked: restarts take their time whatever the budget."""


def load_suite(name: str) -> Suite:
    """Import a suite.

    Raises:
        UnknownNameError: there is no such suite.
    """
    if name not in SUITES:
        raise UnknownNameError(f"suite {name!r} is not one of {', '.join(SUITES)}")
    module, _, attribute = SUITES[name].partition(":")
    return cast("Suite", getattr(import_module(module), attribute))
