"""A goal as a table of functions, from the spec to the report.

The tables are in train.py, serve.py and place.py beside this file, and registry.py finds the one of
a spec or of a plan. Elsewhere only the command line (tuner/cli/goals.py) and the report branch on
the goal.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, NamedTuple, TypeVar

from profilers.records import Record
from tuner.goals.plan_ratios import PlanRatio
from tuner.goals.stored_figures import Json, StoredFigure
from tuner.paths import AnyPath
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.plans.what_if import Band, LimitChange, Rival
from tuner.prices.lookups import WantedSizes
from tuner.report.content import Report
from tuner.report.read import StoredPlan as StoredPlan
from tuner.report.read import read_report
from tuner.spec.cluster import Cluster
from tuner.spec.spec_file import Keys

Kind = Literal["train", "serve", "place"]
PlanT = TypeVar("PlanT", bound=StoredPlan)
DecisionT = TypeVar("DecisionT", bound=Record)
MadeT = TypeVar("MadeT")
ExplainedT = TypeVar("ExplainedT", bound=StoredPlan)
VerifiedT = TypeVar("VerifiedT", bound=Record)

MOST_RIVALS = 5
"""Most runners-up that are explained; the plan holds them all."""
SMALLEST_S = 1e-9
"""Seconds up to which two terms are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpec:
    """The spec of a plan, ready to be changed and planned again."""

    keys: Keys
    """Keys of the YAML file, paths absolute; never changed in place."""
    cluster: Cluster | None
    """The planned cluster; None where a placement names none."""
    is_reference: bool = False
    """The plan is priced on a profile of the reference step, which has no datasheet links."""
    residual: object = None
    """Correction of the plan's predictions, of the goal's own type; None: there is none."""
    memory_bytes: Mapping[str, int]
    """Memory of one device by pool, bytes, where only a profile states it."""


class Figures(NamedTuple):
    """Figures of a plan, with the objective by which outcomes compare."""

    values: dict[str, float]
    bands: dict[str, Band]
    objective: str
    more_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal(Generic[PlanT, DecisionT, MadeT, ExplainedT, VerifiedT]):
    """The functions of one goal, on its types of plans and decisions."""

    kind: Kind
    plan_type: type[PlanT]
    explained: type[ExplainedT]
    """Type of the plan with `why`."""
    plan: Callable[..., MadeT]
    """Plan a spec from its file and the options of the goal; return a value with `.plan` and
    `.spec`."""
    write: Callable[[AnyPath, MadeT], PlanT]
    """Write what was planned into a folder; return the plan with its files named."""
    read: Callable[[Path], PlanT]
    """Read the plan of a folder."""
    verified: type[VerifiedT]
    """Type of the goal's `verified.json`."""
    spec: Callable[[PlanT, Keys, Path], PlannedSpec]
    """Return the spec to be changed, from a plan, the keys of its spec and the folder of the
    profiles used."""
    words: Callable[[DecisionT], str]
    """Format a decision as one table cell."""
    differences: Callable[[DecisionT, DecisionT], tuple[str, ...]]
    """List the differences of two decisions, e.g. `PP 2 -> 4`."""
    figures: Callable[[PlanT], Figures | None]
    """Return the figures of a plan; None where it has no decision."""
    rivals: Callable[[PlanT], tuple[Rival, ...]]
    """Explain the first runners-up of a plan, term by term."""
    changes: tuple[str, ...]
    """Limits that a what-if can change (tuner/plans/what_if.py)."""
    usual_changes: Callable[[PlanT], tuple[LimitChange, ...]]
    """Return the what-ifs of a plan for which none was requested."""
    ratio_band: Callable[[PlanT, PlanT, str], PlanRatio | None]
    """Return the band of a figure's ratio, second plan over first."""
    stored_figures: Callable[[Json], Iterator[StoredFigure]]
    """Yield the compared figures of a prediction's JSON, of any version, the main one first."""
    seconds: Callable[[PlanT], Mapping[str, float]]
    """Return the seconds of a plan's prediction by cause."""
    wanted_sizes: Callable[[Path], WantedSizes]
    """List the kernels whose prices planning a spec looks up."""
    other_kernels: Callable[[PlanT, Sequence[Path]], tuple[str, ...]] = lambda _plan, _profiles: ()
    """Return notes on kernels that changed since the plan was made."""
    replay: Callable[..., object] = lambda *_options, **_more: None
    """Simulate again what the report of a folder shows, with the profiles given."""
    has_price: bool = False
    """Whether the first stored figure is the search's objective, in seconds."""
    gains_nothing: Callable[[PlanT, PlanT, float], bool] = lambda _plan, _base, _gain: False
    """Return whether a plan's added nodes cannot be used, or gain nothing over its base."""

    def report(self, folder: Path, **solved: object) -> Report:
        """Build the report of a folder; `solved` is new evidence: `what_if`, `replay`."""
        return read_report(folder, self.read(folder), verified=self.verified, **solved)


def terms(chosen: Mapping[str, float], alternative: Mapping[str, float]) -> dict[str, float]:
    """Return the additional seconds of another decision by cause, the largest first."""
    by_term = {
        name: alternative.get(name, 0.0) - chosen.get(name, 0.0)
        for name in dict.fromkeys((*chosen, *alternative))
    }
    ordered = sorted(by_term.items(), key=lambda item: (-abs(item[1]), item[0]))
    return {name: seconds for name, seconds in ordered if abs(seconds) > SMALLEST_S}


def seconds_by_cause(plan: Plan | ServePlan) -> Mapping[str, float]:
    """Return the predicted seconds by cause; empty without a prediction."""
    return {} if plan.predicted is None else plan.predicted.breakdown_s


def changes_of_pools(plan: Plan | ServePlan) -> list[LimitChange]:
    """Return the usual what-ifs of a plan on pools: more nodes of each, less memory."""
    pools = plan.cluster.pools
    names = [pool.name for pool in pools] if len(pools) > 1 else [None]
    more = [LimitChange(key="nodes", pool=name, value="+1") for name in names]
    return [*more, LimitChange(key="memory", value="-20%")]


def pools_of(keys: Keys) -> list[Keys]:
    """Return the pools among the keys of a spec."""
    cluster = keys.get("cluster") or {}
    pools: list[Keys] = cluster.get("pools", [])
    return pools


def profiled_memory(keys: Keys) -> dict[str, int]:
    """Return one device's memory in bytes for every pool that names a profile."""
    from profilers.store import read_header

    machines = {
        pool["name"]: read_header(Path(pool["profile"])).machine
        for pool in pools_of(keys)
        if "profile" in pool
    }
    return {name: machine.memory_bytes_per_device for name, machine in machines.items()}


def use_planned_profiles(keys: Keys, cluster: Cluster) -> None:
    """Write the profiles that the pools were planned with into `keys`."""
    for written, pool in zip(pools_of(keys), cluster.pools, strict=True):
        if pool.profile is not None:
            written["profile"] = str(pool.profile.absolute())
