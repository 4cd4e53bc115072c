"""The suites by name: functions from a `Setting` to benchmarks, imported when they are used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast

from profilers.benchmark import Suite
from profilers.errors import UnknownNameError

SUITES: Final[Mapping[str, str]] = {
    "kernels": "profilers.kernels.suite:benchmarks",
    "links": "profilers.links.suite:benchmarks",
    "storage": "profilers.checkpoint_load:benchmarks",
    "kv": "profilers.kv_transfer.suite:benchmarks",
}

ENGINE: Final = "engine"
"""Suite without benchmarks of ours: a training engine times its steps (`steps/`)."""

FORMER: Final[Mapping[str, str]] = {
    "restart": "state goal.reliability.restart, as your job's logs say it; loads of checkpoints are"
    " measured with storage"
}
"""Suites that left, and what to do instead."""


def load_suite(name: str) -> Suite:
    """Import a suite.

    Raises:
        UnknownNameError: there is no such suite.
    """
    if name in FORMER:
        raise UnknownNameError(f"suite {name!r} is no more: {FORMER[name]}")
    if name not in SUITES:
        raise UnknownNameError(f"suite {name!r} is not one of {', '.join((*SUITES, ENGINE))}")
    module, _, attribute = SUITES[name].partition(":")
    return cast("Suite", getattr(import_module(module), attribute))
