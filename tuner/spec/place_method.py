"""Placement algorithms, and the objectives that each serves."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Method(StrEnum):
    """The placement algorithm."""

    AUTO = "auto"
    """The best method for the objective within the time limit, as marked below."""
    EPLB = "eplb"
    """EPLB (DeepSeek), the better of its two policies: the default of engines."""
    LOCAL_SEARCH = "local_search"
    """`auto` of every objective. Loads: replica counts, then a tabu search of every layer. Traffic:
    the best swap of two experts until none helps, from experts that belong together."""
    SWAPS = "swaps"
    """HierMoE's swaps of two experts, the best one first, until none helps."""
    MOETUNER = "moetuner"
    """MoETuner's two integer programs, experts to clusters and clusters to ranks, by CBC."""

    @classmethod
    def _missing_(cls, value: object) -> "Method | None":
        """Read the names of former methods as `auto`, for one release."""
        return cls.AUTO if isinstance(value, str) and value in FORMER else None


FORMER: Final = frozenset({"cp_sat", "cbc", "restarts", "annealing", "exact"})
"""Searches and programs that are no methods any more: the first note of a plan says so."""

_FOR_LOADS: Final = (Method.AUTO, Method.EPLB, Method.LOCAL_SEARCH)

METHODS: Final[Mapping[str, tuple[Method, ...]]] = {
    "balance": _FOR_LOADS,
    "layer_time": _FOR_LOADS,
    "co_activation": (Method.AUTO, Method.EPLB, Method.LOCAL_SEARCH, Method.SWAPS),
    "layer_chain": (Method.AUTO, Method.EPLB, Method.LOCAL_SEARCH, Method.MOETUNER),
}
"""Methods by objective."""


def method_refusal(method: Method, objective: str) -> str | None:
    """Say in a line why a method does not serve an objective; None if it does."""
    legal = METHODS[objective]
    if method in legal:
        return None
    served = [name for name, methods in METHODS.items() if method in methods]
    return (
        f"method {method.value!r} does not serve objective {objective} but {' and '.join(served)};"
        f" take {', '.join(option.value for option in legal)}"
    )
