"""The suites by name; each is a function from a `Setting` to benches, imported when asked for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast

from profilers.benchmark import Suite
from profilers.errors import UnknownNameError

SUITES: Final[Mapping[str, str]] = {
    "kernels": "profilers.kernels.suite:benches",
    "links": "profilers.links.suite:benches",
    "storage": "profilers.storage:benches",
    "kv": "profilers.kv_transfer.suite:benches",
}


def load_suite(name: str) -> Suite:
    """Import a suite.

    Raises:
        UnknownNameError: there is no such suite.
    """
    if name not in SUITES:
        raise UnknownNameError(f"suite {name!r} is not one of {', '.join(SUITES)}")
    module, _, attribute = SUITES[name].partition(":")
    return cast("Suite", getattr(import_module(module), attribute))
