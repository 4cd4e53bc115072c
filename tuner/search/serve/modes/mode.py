"""A mode of serving: what it is made of, how it is solved and simulated, and its words.

The module of this package that has a mode's name defines its `ServingMode` as `MODE`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module

from tuner.config.serve import Role
from tuner.search.serve.options import Options
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import InstanceGroup, SimulationResult
from tuner.spec.serving.goal import Mode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServingMode:
    """A mode: what it is made of, how it is solved and simulated, and its words."""

    priced_roles: tuple[Role, ...]
    """Roles whose priced options the mode uses."""
    launched_roles: Mapping[Role, Role] = field(default_factory=dict)
    """Roles in which instances of the program's roles are launched, where they differ."""
    is_routed: bool = False
    """Its instances are priced options, of several kinds behind a planned router or on islands;
    other modes use round robin."""
    makes_options: bool = False
    """Its instances are made of priced options, by `variants`."""
    price: Callable[[ServeProblem], Options] | None = None
    """Function that prices options for this mode alone, refused ones where releases lack the mode;
    None: there are none."""
    option_noun: str = ""
    """Plural noun for options that a release may refuse."""
    variants: Callable[[ServeProblem], Iterable[ServeProblem]] = lambda problem: (problem,)
    """Function that returns the problems that the mode is solved as, of which the best counts."""
    simulate: Callable[[ServeProblem, Sequence[InstanceGroup], RouterChoice], SimulationResult]
    """Function that simulates the problem's traffic on instances behind a router."""
    explain: Callable[[ServeProblem], str] = lambda _: ""
    """Function that says why nothing can serve in the mode; empty: the scarce resource is."""
    words: Callable[[ModeSolution], str] = lambda _: ""
    """Function that returns the words that follow the description of a solution's instances."""
    cautions: Callable[[ModeSolution], Iterable[str]] = lambda _: ()
    """Function that returns the cautions of a plan in this mode."""


@cache
def load_mode(name: Mode) -> ServingMode:
    """Return the mode of a name."""
    mode: ServingMode = import_module(f"tuner.search.serve.modes.{name}").MODE
    return mode
