"""Everything that a deployment is solved from, and what its modes are solved to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from solvers.instances.problem import InstancePlan, InstancesProblem
from solvers.result import Outcome
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.offload import LengthThreshold
from tuner.search.serve.demand import Demand, PrefixHits
from tuner.search.serve.kv_transfers import KvTransfers
from tuner.search.serve.options import Options, ServingPool
from tuner.search.serve.program import SolvedProgram, Spare
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import InstanceGroup, SimulationResult
from tuner.search.settings import SearchSettings
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.spec import ServeSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeSolution:
    """The chosen instances of one mode, and how they were simulated."""

    solved: SolvedProgram
    groups: tuple[InstanceGroup, ...]
    simulated: SimulationResult
    spare: Spare
    missed: tuple[str, ...]
    """SLO targets that the simulation misses."""
    threshold: LengthThreshold | None = None
    """Length threshold above which prompts are prefilled on another pool; None: no offload."""
    bound: float = 0.0
    """Proven lower bound on the objective at the goal's `spare_ratio`."""
    missed_at_goal_spare: tuple[str, ...] = ()
    """SLO targets missed at the goal's `spare_ratio`, before more was added."""
    router: RouterChoice
    """Router policies that spread the requests."""
    covered_kinds: int = 1
    """Most kinds of instances in one role that the bound covers."""
    prefix_hit: float | None = None
    """Prefix-hit share behind a router that is not cache-aware; None: as stated."""
    rate_per_s: float | None = None
    """Most requests a second at which the targets hold; None: not the goal."""

    @property
    def objective(self) -> float:
        """Return the program's objective; seconds per served request where the rate is the goal."""
        return self.solved.outcome.objective if self.rate_per_s is None else 1.0 / self.rate_per_s

    @property
    def mode(self) -> Mode:
        """Return the mode that was solved."""
        return self.solved.program.mode

    @property
    def price_per_hour(self) -> float | None:
        """Return the price of all instances per hour; None where a pool has no price."""
        prices = [group.option.serving_pool.pool.price_per_device_hour for group in self.groups]
        if any(price is None for price in prices):
            return None
        return sum(
            group.count * group.option.devices * (price or 0.0)
            for group, price in zip(self.groups, prices, strict=True)
        )

    @property
    def devices(self) -> int:
        """Count the devices of all instances."""
        return sum(group.count * group.option.devices for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeSolutions:
    """The solutions of all modes."""

    serving: tuple[ModeSolution, ...]
    """Modes that serve the traffic, whether they meet the targets or not."""
    refused: Mapping[Mode, tuple[str, ...]]
    """Refusals of the engine's release, by mode."""
    fitting: tuple[ModeSolution, ...]
    """Solutions that meet the targets and can be launched, best first."""

    @property
    def best(self) -> ModeSolution | None:
        """Return the best solution that meets the targets and can be launched."""
        return self.fitting[0] if self.fitting else None

    @property
    def launchable(self) -> tuple[ModeSolution, ...]:
        """Return the solutions that can be launched, whether they meet the targets or not."""
        return tuple(solution for solution in self.serving if not self.refused[solution.mode])

    def of(self, mode: Mode) -> ModeSolution | None:
        """Return a mode's solution; None where it serves nothing."""
        return next((solution for solution in self.serving if solution.mode == mode), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServeProblem:
    """Everything that a mode is solved from."""

    spec: ServeSpec
    serving_pools: tuple[ServingPool, ...]
    demand: Demand
    options: Options
    kv_transfers: KvTransfers
    decoder: Decoder
    formats: Formats
    settings: SearchSettings
    loads: ExpertLoads | None = None
    """Recorded loads of experts; None: those of the kernel tables."""
    threshold: LengthThreshold | None = None
    """Length threshold that this problem is restricted to; None: there is none."""
    cell_pool: str = ""
    """Pool whose machines hold cells (cells.py); empty: instances are anywhere."""
    cell_nodes: int = 1
    """Machines of a cell."""
    own_options: Mapping[Mode, Options] = field(default_factory=dict)
    """Options priced for one mode alone, such as AFD units, by the mode."""
    simulation_cache: dict[tuple[Any, ...], tuple[SimulationResult, Any]] = field(
        default_factory=dict
    )
    """Results so far, by everything that a simulation depends on."""
    outcomes: dict[InstancesProblem, Outcome[InstancePlan]] = field(default_factory=dict)
    """Outcomes of the programs that were solved to the end so far."""
    simulated: list[ModeSolution] = field(default_factory=list)
    """Every solution that was simulated so far, whether it meets the targets or not."""
    hits: PrefixHits | None = None
    """Hits of recorded prompts in prefix caches; None: the share that the traffic states."""
    routers: tuple[RouterChoice, ...] = ()
    """Router choices to plan with; empty: those of the engines' router stacks."""
    restriction: "Callable[[ServeProblem], ServeProblem] | None" = None
    """Function that limits what may be used, also when the traffic is repriced; None: no limit."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Return the requested modes, in the order of `Mode`."""
        return tuple(mode for mode in get_args(Mode) if mode in self.spec.goal.modes)

    @property
    def launchable_modes(self) -> tuple[Mode, ...]:
        """Return the requested modes that the release of a pool has."""
        return tuple(mode for mode in self.modes if mode in self.spec.modes)


def restrict_problem(
    problem: ServeProblem, restriction: Callable[[ServeProblem], ServeProblem]
) -> ServeProblem:
    """Change what a problem may use, also after its traffic is repriced."""
    return replace(restriction(problem), restriction=restriction)
