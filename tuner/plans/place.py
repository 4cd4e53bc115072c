"""A plan that places experts: the values behind `plan.json` where `goal.kind` is `place`.

    PlacePlan          the table of experts with what it is predicted to do, and the certificate
    VerifiedPlacement  a plan with the evidence for it, which is what emitters accept

Imbalance is the sum over layers of the largest rank load over the sum of the means: 1 is perfect.
Gains are measured pass by pass on hold-out passes.
"""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.config.place import PlaceDecision
from tuner.plans.goal_plan import GoalCertificate, GoalPlan, GoalProvenance
from tuner.plans.train import Space
from tuner.spec.cluster import Cluster
from tuner.spec.place import PlaceGoal

if TYPE_CHECKING:
    from pandas import DataFrame

Ratio = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Band = tuple[float, float]


class _Stored(Record):
    """Part of a plan that earlier releases stored with more fields."""

    FORMER: ClassVar[frozenset[str]] = frozenset()
    """Names of those fields, which are read and dropped."""

    @model_validator(mode="before")
    @classmethod
    def _without_former(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in cls.FORMER}


class PassSpread(_Stored):
    """Largest rank load over the mean, over passes and layers of one workload."""

    FORMER: ClassVar = frozenset({"mean"})

    p50: Ratio
    p99: Ratio


class WorkloadOutcome(_Stored):
    """One workload before and after, on the hold-out passes."""

    FORMER: ClassVar = frozenset({"pass_rule"})

    workload: str
    passes_planned_from: Size
    passes_judged: Size
    """0: the recording has one pass, whose token copies were split at random."""
    imbalance_before: Ratio
    """Imbalance of the current placement, or of experts in order if there is none."""
    imbalance_rule: Ratio
    """Imbalance of EPLB's better policy on the same loads."""
    imbalance_after: Ratio
    pass_before: PassSpread
    pass_after: PassSpread


class LeftOut(Record):
    """One workload under a plan that was made from the others."""

    workload: str
    imbalance_after: Ratio
    imbalance_rule: Ratio
    """Imbalance of EPLB's policy on the mean load of the others."""
    imbalance_before: Ratio
    worst_rank_ratio: Ratio
    """Largest rank load of any layer over the layer's mean."""
    worst_rank_ratio_before: Ratio | None = None
    """The same without a plan; absent in older plans."""
    traffic: tuple[float, float, float] | None = None
    """Traffic as before, EPLB and after; absent where the objective is not traffic."""


class LayerOutcome(Record):
    """One layer of the certificate."""

    layer: Size
    objective: float
    bound: float


class PlaceCertificate(GoalCertificate):
    """Solver status, objective and bound of the choice, under the model."""

    space: Space = Space(priced=0, bounded=0, illegal=0)
    """Complete placements that were compared; the solver's own steps are not counted."""
    within_band: Size = 0
    """Number of ties: alternatives whose objective differs by no more than the noise of the
    gain."""
    layers: tuple[LayerOutcome, ...] = ()
    """Layer by layer, where the objective is a sum over layers."""
    dispatch: str = "even"
    """Split of tokens over replicas in these numbers: `even`; `near_dynamic`, near replicas first
    and the others equally; `static`, these assigned once a launch, the mean over launches; `lp`,
    `near_lp` and rules that no engine implements, on fit passes."""
    objective_error: Annotated[float, Field(ge=0.0)] = 0.0
    """Standard error of an imbalance that is a mean over drawn launches; 0: exact, or seconds."""


class LayerTimes(_Stored):
    """Seconds of the expert layers of one pass, all layers, the mean over hold-out passes."""

    FORMER: ClassVar = frozenset({"before_layers_s", "after_layers_s"})

    workload: str
    before_s: Seconds
    rule_s: Seconds
    after_s: Seconds
    after_s_band: Band
    experts_after_s: Seconds
    """Seconds of `after_s` in the most-loaded rank's grouped GEMMs."""
    exchange_after_s: Seconds
    """Seconds of `after_s` in dispatch and combine."""


class LinkFacts(Record):
    """Cost of one token copy between ranks, where the objective is traffic."""

    unit: Literal["seconds", "relative"]
    """Unit of the costs; relative ones are multiples of a copy inside a scale-up domain."""
    inside_source: str | None
    """Source of costs inside a scale-up domain; absent where none has two ranks."""
    inside_cost: Ratio | None
    """Cost of a copy inside a domain, the median over pairs of ranks."""
    between_source: str | None
    """Source of costs between domains; absent where there is one."""
    between_cost: Ratio | None
    slowest_cost: Ratio
    """Cost of a copy between the most expensive pair of ranks."""
    slowest_ranks: tuple[Size, Size]
    """Sending and receiving rank of that pair."""


class TrafficTimes(Record):
    """Seconds that the traffic of a pass takes on the links, all layers.

    `total`: what a rank sends on average, each copy at the cost of its link. `busiest`: the sum
    over layers of the most-loaded pair of ranks (layer_chain), or of every hop padded to the group
    that receives most (co_activation). Objective co_activation counts dispatch and combine.
    """

    workload: str
    tokens_judged: Size
    """Sampled hold-out tokens; 0: evaluated on the fit tokens."""
    before_s: Seconds
    rule_s: Seconds
    after_s: Seconds


class MigrationCost(Record):
    """Cost of moving from the current placement to this one."""

    moved_experts: Size
    """Experts, over all layers, that a rank must load because it does not hold them yet."""
    moved_bytes: Size | None = None
    """Bytes of those experts' weights; absent where no model is known."""
    transfer_s: Seconds | None = None
    break_even_s: Seconds | None = None
    """Running time after which the gain has paid for the move; absent without a gain."""


class DispatchOutcome(_Stored):
    """The placement under one dispatch rule that an engine offers."""

    FORMER: ClassVar = frozenset(
        {
            "counts_copies",
            "draws",
            "imbalance_sampled",
            "is_allowed",
            "is_chosen",
            "tables",
            "tokens_per_rank",
        }
    )

    dispatch: str
    """The engine's name."""
    rule: str
    """The solvers' name of the rule (solvers/placement/dispatch/sampling.py)."""
    has_backend: bool
    """Whether the rule runs with an all-to-all backend."""
    imbalance: Ratio
    """Largest rank load over the mean on hold-out passes; under `static` the mean over launches."""
    layer_time_s: Seconds | None = None
    """Seconds of the expert layers of a pass; absent where no model and devices were named."""
    words: str
    """Its cost relative to the chosen one, and why it is not allowed, or has no engine."""


class MadeFor(Record):
    """Launch settings that an emitted placement requires; others need another plan."""

    engine: str
    release: str
    """Engine release whose rules were used; empty where they are not specific to a release."""
    nodes: Count
    ep_size: Count
    dispatch: str = ""
    """The engine's option; empty where it has none."""
    a2a_backend: str = ""
    is_judged: bool = True
    """The plan's verdict and expected loads hold under the rule that this engine applies."""

    @property
    def words(self) -> str:
        """The settings in one line."""
        release = f" {self.release}" if self.release else ""
        rule = f", dispatch {self.dispatch}" if self.dispatch else ""
        backend = f", all-to-all {self.a2a_backend}" if self.a2a_backend else ""
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.engine}{release}, {nodes}, EP {self.ep_size}{rule}{backend}"


class PlacePrediction(Record):
    """The plan's predictions."""

    imbalance: dict[str, float]
    """Imbalance of the plan by workload, on hold-out passes."""
    imbalance_band: dict[str, Band]
    """Central 90 % over passes."""
    outcomes: tuple[WorkloadOutcome, ...]
    left_out: tuple[LeftOut, ...] = ()
    """Results of plans made without each workload; empty with a single workload."""
    layer_times: tuple[LayerTimes, ...] = ()
    """Seconds of expert layers by workload; empty where no model and device were named."""
    traffic: dict[str, tuple[float, float, float]] = Field(default_factory=dict)
    """Traffic by objective name, as before, EPLB and after; in the unit of `links` per token
    (layer_chain: per token copy), all layers; empty where the objective is not traffic."""
    links: LinkFacts | None = None
    """Costs of links; absent where the objective is not traffic."""
    traffic_times: tuple[TrafficTimes, ...] = ()
    """Seconds of traffic by workload; empty unless the objective is traffic and its costs are
    seconds."""
    migration: MigrationCost | None = None
    dispatches: tuple[DispatchOutcome, ...] = ()
    """Dispatch rules that the first target offers, the chosen one first; empty: it has one."""


class Verdict(Record):
    """Judgement whether the placement is worth deploying."""

    word: Literal["worth it", "not worth it", "fragile"]
    reason: str
    gain_ratio: float
    """Share of the priced time (or of the largest loads, without a price) that is saved."""
    noise_ratio: float
    """Uncertainty of the gain, from the spread over passes and from counting."""
    step_gain_ratio: float | None = None
    """Share of a whole pass that is saved, where a model and device were named."""


class PlaceAlternative(Record):
    """Another candidate placement."""

    method: str
    decision: PlaceDecision
    objective: float
    imbalance: dict[str, float]
    is_legal: bool = True
    """Keeps the load limits of the objective."""
    lost_by: str


class PlaceProvenance(GoalProvenance):
    """The inputs of the plan."""

    recording_sha256: dict[str, str]
    """Hash of each recording by workload."""


class PlacePlan(_Stored, GoalPlan):
    """`plan.json` of a placement."""

    FORMER: ClassVar = frozenset({"relaxations", "unlaunchable"})

    goal: PlaceGoal
    cluster: Cluster | None = None
    """Cluster of the spec, which prices the plan; absent where the spec names none."""
    decision: PlaceDecision | None
    predicted: PlacePrediction | None
    verdict: Verdict | None
    certificate: PlaceCertificate
    alternatives: tuple[PlaceAlternative, ...] = ()
    unlaunchable: tuple[()] = ()
    """Empty: `predicted.dispatches` says what each dispatch rule would gain."""
    relaxations: tuple[()] = ()
    """Empty: `moetune explain` solves for other limits."""
    provenance: PlaceProvenance
    made_for: tuple[MadeFor, ...] = ()
    """Engine release, nodes and ranks of the placement, by target of `emit`; empty in older
    plans."""

    @model_validator(mode="after")
    def _predicts_workloads(self) -> "PlacePlan":
        if self.predicted is not None:
            predicted = {*self.predicted.imbalance, *self.predicted.imbalance_band}
            unknown = sorted(predicted - {workload.name for workload in self.goal.workloads})
            if unknown:
                raise ValueError(f"predicted: {unknown[0]!r} is no workload of the goal")
            for name in ("outcomes", "layer_times", "traffic_times"):
                rows = getattr(self.predicted, name)
                is_whole = len(rows) == len(self.goal.workloads)
                if not is_whole and (rows or name == "outcomes"):
                    raise ValueError(f"predicted.{name}: not one for each workload of the goal")
            if len(self.predicted.traffic) > 1:
                raise ValueError("predicted.traffic: more than one objective")
        return self

    def candidates(self) -> "DataFrame":
        """Return the compared candidates as a data frame; tuner/plans/candidates.py says which."""
        from tuner.plans.candidates import place_candidates

        return place_candidates(self)


class VerifiedPlacement(Record):
    """A placement with the evidence for it, or a stated reason for its absence."""

    plan: PlacePlan
    decision: PlaceDecision
    waived: str = ""
    """Reason why nothing was measured; stated in or beside every emitted file."""
