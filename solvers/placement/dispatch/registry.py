"""Every dispatch rule by name: how an engine shares an expert's tokens out over its replicas.

A rule is `rank_loads(case) -> [passes][layers][ranks]`, pure. Adding one is one file and one line.
"""

import importlib
from collections.abc import Mapping
from typing import Final, Protocol, cast

from solvers.errors import UnknownSolverError
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats

DISPATCH: Final[Mapping[str, str]] = {
    "even": "solvers.placement.dispatch.even:rank_loads",
    "static": "solvers.placement.dispatch.static:rank_loads",
    "dynamic": "solvers.placement.dispatch.dynamic:rank_loads",
    "lp": "solvers.placement.dispatch.lp:rank_loads",
    "activated": "solvers.placement.dispatch.activated:rank_loads",
    "least_loaded": "solvers.placement.dispatch.least_loaded:rank_loads",
}


class DispatchRule(Protocol):
    """What a line of the table names."""

    def __call__(self, case: DispatchCase, /) -> Floats: ...


def rank_loads(rule: str, case: DispatchCase) -> Floats:
    """Return token copies of each rank in each pass and layer under the named rule.

    Raises:
        UnknownSolverError: no rule has this name.
        ValueError: the rule cannot serve the case: it says why.
    """
    if rule not in DISPATCH:
        raise UnknownSolverError(f"dispatch rule {rule!r} is not one of {', '.join(DISPATCH)}")
    module, _, function = DISPATCH[rule].partition(":")
    return cast(DispatchRule, getattr(importlib.import_module(module), function))(case)
