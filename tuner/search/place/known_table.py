"""Static dispatch where the engine's own table is known: placements under that table.

The engine draws its table with one seed, layer by layer over all decoder layers (`static.py`). If
all of them were recorded, the table of a placement is known before the launch and replaces the mean
over launches; every slot then has a fixed share of its expert's tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from solvers.placement.balance.check import objective
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.balance.repacked import of_slots, search_on_table, slots_in_order
from solvers.placement.balance.starts import start_placement
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.static import ENGINE_SEED, split
from solvers.placement.ranks import Placement
from tuner.search.place.candidates import balance_problem
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.launch_noise import is_table_known
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

CEILINGS: Final = (None, 0.0)
"""Of packed placements that are tried in addition to the search's (`starts.py`)."""

TABLE_RATIO: Final = 0.005
"""Smallest increase of the objective under other tables that is reported."""


def uses_known_table(spec: PlaceSpec, dispatch: str) -> bool:
    """Whether a placement is scored under the engine's own table."""
    is_balance = spec.goal.objective is Objective.BALANCE
    has_replicas = spec.ranks.num_slots > spec.num_experts
    is_static = dispatch == Dispatch.STATIC.value
    return is_static and is_balance and has_replicas and is_table_known(spec)


def place_on_table(
    problem: BalanceProblem, bases: Sequence[Placement], *, time_limit_s: float
) -> Placement:
    """Place for the table that the engine will draw, starting from placements for any table."""
    packed = [start_placement(problem, ceiling=ceiling) for ceiling in CEILINGS]
    return search_on_table(problem, (*bases, *packed), seed=ENGINE_SEED, time_limit_s=time_limit_s)


def apply_known_table(
    spec: PlaceSpec, problem: BalanceProblem, placement: Placement, dispatch: str
) -> tuple[BalanceProblem, Placement]:
    """Return the problem and placement to score: with fixed slot loads where the table is known."""
    if not uses_known_table(spec, dispatch):
        return problem, placement
    case = DispatchCase(
        load_PLE=problem.load_WLE, placement=placement, ranks=problem.ranks, seed=ENGINE_SEED
    )
    slots = of_slots(problem, placement, split(case))
    return slots, slots_in_order(slots)


def table_note(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, dispatch: str
) -> Iterator[str]:
    """Note the objective under other tables, where it differs."""
    if not uses_known_table(spec, dispatch):
        return
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    known = objective(*apply_known_table(spec, problem, chosen, dispatch))
    drawn = objective(problem, chosen)
    if drawn > known * (1.0 + TABLE_RATIO):
        yield (
            f"placed for the one table that the engine draws with its seed {ENGINE_SEED}: objective"
            f" {known:.3f}, and {drawn:.3f} over other tables, which another release may draw"
        )
