"""Static dispatch where the engine's own table is known: what a placement is worth under it.

The engine draws its table with one seed, layer by layer over all decoder layers (`static.py`). With
each of them recorded the table of a placement is known before the launch, so that it is no mean
over launches that counts; every slot then has a fixed share of its expert's tokens.
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
from tuner.planner.place.candidates import balance_problem
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.launch_noise import is_table_known
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

CEILINGS: Final = (None, 0.0)
"""Of packed placements that are tried beside what a search found (`starts.py`)."""

TABLE_RATIO: Final = 0.005
"""That other tables make the objective larger, from which on it is said."""


def counts_on_table(spec: PlaceSpec, dispatch: str) -> bool:
    """Whether a placement is weighed under the engine's own table."""
    is_balance = spec.goal.objective is Objective.BALANCE
    has_replicas = spec.ranks.num_slots > spec.num_experts
    is_static = dispatch == Dispatch.STATIC.value
    return is_static and is_balance and has_replicas and is_table_known(spec)


def on_table(
    problem: BalanceProblem, bases: Sequence[Placement], *, time_limit_s: float
) -> Placement:
    """Place for the table that the engine will draw, from placements for any."""
    packed = [start_placement(problem, ceiling=ceiling) for ceiling in CEILINGS]
    return search_on_table(problem, (*bases, *packed), seed=ENGINE_SEED, time_limit_s=time_limit_s)


def weighed_as(
    spec: PlaceSpec, problem: BalanceProblem, placement: Placement, dispatch: str
) -> tuple[BalanceProblem, Placement]:
    """Return what a placement is weighed as: where the table is known, its slots of fixed load."""
    if not counts_on_table(spec, dispatch):
        return problem, placement
    case = DispatchCase(
        load_PLE=problem.load_WLE, placement=placement, ranks=problem.ranks, seed=ENGINE_SEED
    )
    slots = of_slots(problem, placement, split(case))
    return slots, slots_in_order(slots)


def table_note(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, dispatch: str
) -> Iterator[str]:
    """Say in a line what a placement for one table would have under others, where they differ."""
    if not counts_on_table(spec, dispatch):
        return
    problem = balance_problem(evidence, goal=spec.goal, ranks=spec.ranks, dispatch=dispatch)
    known = objective(*weighed_as(spec, problem, chosen, dispatch))
    drawn = objective(problem, chosen)
    if drawn > known * (1.0 + TABLE_RATIO):
        yield (
            f"placed for the one table that the engine draws with its seed {ENGINE_SEED}: objective"
            f" {known:.3f}, and {drawn:.3f} over other tables, which another release may draw"
        )
