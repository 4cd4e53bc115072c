"""Decision, prediction and certificate of a training plan: the values behind `plan.json`.

    Plan          the decision with its prediction, certificate, runner-ups and provenance
    VerifiedPlan  a plan with the measurements of its trials, or why nothing was measured

Emitters accept `VerifiedPlan` only. Every prediction has an error band, `<name>_band: [low,
high]`. Names of decisions are Megatron-LM's.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from profilers.records import Record, Seconds
from profilers.steps.config import Size
from tuner.config.host_memory import HostMemory
from tuner.config.train import TrainDecision
from tuner.costs.residuals import Residual
from tuner.faults.forecast import RunForecast
from tuner.plans.goal_plan import GoalCertificate, GoalPlan, GoalProvenance
from tuner.plans.stage_placement import StagePlacement
from tuner.spec.cluster import Cluster
from tuner.spec.failure_log import FailureLog
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.search import Search

if TYPE_CHECKING:
    from pandas import DataFrame

Band = tuple[float, float]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class StagePrediction(Record):
    """Cost of one pipeline stage: seconds per micro-batch, peak bytes of one device."""

    layers: Size
    forward_s: Seconds
    backward_s: Seconds
    """Seconds of the backward pass of a micro-batch, recomputation included."""
    parameter_bytes: Size
    gradient_bytes: Size
    optimizer_bytes: Size
    activation_bytes: Size
    """Peak of the activations saved for backward, bytes of one device."""
    other_bytes: Size
    """Communication buffers and gathered parameters, bytes of one device."""
    max_chunk_tokens: Size | None = None
    """MemFine's s'_max: token copies that one device can receive in one chunk and stay inside its
    memory; absent where nothing is chunked."""


class RankAtRisk(Record):
    """The pipeline rank that is likeliest to run out of memory, on heterogeneous pools.

    It need not be the one with the largest peak.
    """

    pipeline_rank: Size
    pool: str
    peak_memory_bytes: Size
    """Peak of the device with the highest peak among its devices, bytes."""
    memory_capacity_bytes: Size
    """Bytes of all memory of one of its devices."""


class WiderRows(Record):
    """Rows of more tokens that take less time for as many documents."""

    tokens: Size
    """Tokens of a row."""
    rows: Size
    """Rows of a step, the nearest number that the layout divides."""
    step_time_s: Seconds
    """Seconds for as many documents as a step of the plan has."""
    peak_memory_bytes: Size
    """Peak memory of the device with the highest peak, bytes."""


class RowPrediction(Record):
    """Rows that documents are packed into, and the seconds that they lose.

    Seconds are means over simulated steps.
    """

    rule: str
    """Packing rule (tuner/costs/train/packing.py)."""
    fill_ratio: Probability
    """Share of the tokens of a row that are no padding."""
    documents_per_row: float
    """Documents of a row, mean."""
    document_tokens: float
    """Tokens of the document that a token is in, mean over tokens."""
    step_time_s_p10: Seconds
    """Seconds of the step that one of ten steps does not exceed, by its rows."""
    step_time_s_p90: Seconds
    """Seconds of the step that nine of ten steps do not exceed, by their rows."""
    padding_s: Seconds
    """Seconds of a step that are spent on padding."""
    waiting_s: float
    """Seconds of a step that ranks wait for the most expensive rows of others: in every micro-batch
    where they share experts, otherwise once."""
    order_s: float
    """Seconds of a step that the order of unequal micro-batches adds to the pipeline."""
    sorted_step_time_s: Seconds
    """Seconds of a step whose rows are sorted: those of equal cost in one micro-batch, small ones
    at both ends of the pipeline."""
    wider: WiderRows | None = None
    """The fastest rows of two, four or eight times the tokens, in the plan's layout; absent where
    none fit and are faster."""


class TrainPrediction(Record):
    """The predicted performance of a decision."""

    step_time_s: Seconds
    step_time_s_band: Band
    tokens_per_s_per_device: float
    tokens_per_s_per_device_band: Band
    peak_memory_bytes: tuple[Size, ...]
    """Peak memory by pipeline rank, of the device with the highest peak, bytes."""
    peak_memory_bytes_band: tuple[Band, ...]
    memory_limit_bytes: Size | None = None
    """Bytes that the plan may use of one device; absent on heterogeneous pools."""
    memory_capacity_bytes: Size | None = None
    """Bytes of all memory of one device; absent on heterogeneous pools."""
    rank_at_risk: RankAtRisk | None = None
    """Rank whose probabilities of running out of memory are stated; absent on a single kind of
    devices."""
    out_of_memory_probability: Probability | None = None
    """Probability that a device ever needs more than it has, by the errors of published peaks and
    the growth of peaks over a run (tuner/search/train/memory_risk.py). Absent, like
    `out_of_memory_at_start_probability` and `out_of_memory_loss_s`, where memory was computed on
    the reference step, which has no published errors."""
    out_of_memory_at_start_probability: Probability | None = None
    """Probability that a device needs more than it has in the first steps."""
    out_of_memory_loss_s: Seconds | None = None
    """Expected seconds of the whole run lost to failed starts and restarts after running out of
    memory; the longer step afterwards is not included."""
    activation_bytes: tuple[Size, ...]
    """Peak of the activations saved for backward by pipeline rank, of the device with the highest
    peak, bytes."""
    breakdown_s: dict[str, float]
    """Seconds of a step by cause; their sum is `step_time_s`."""
    inter_node_bytes: float | None = None
    """Inter-node bytes of dispatch and combine in a step, all devices together; absent where not
    computed."""
    communication_s: Seconds
    """Seconds of `step_time_s` in collectives, the pipeline bubble included."""
    stages: tuple[StagePrediction, ...]
    mfu_ratio: float | None = None
    """Model FLOPs (tuner/spec/accounting.py: no recomputation, causal attention, the head counted)
    over the devices' bf16 or low-precision peaks; absent where no peak is known."""
    played_step_time_s: Seconds | None = None
    """Step time by simulating the schedule pass by pass (tuner/simulate/pipeline.py); absent where
    not simulated."""
    run: RunForecast | None = None
    """Forecast of the whole run, failures included."""
    host_memory: HostMemory | None = None
    """Memory that the job takes of a node beside the devices'; absent where nothing takes any."""
    rows: RowPrediction | None = None
    """Packed rows and what they lose; absent where every sequence is one document."""

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what plans did not have before hosts and rows were counted, where none are."""
        values: dict[str, Any] = serialize(self)
        for name in ("host_memory", "rows"):
            if getattr(self, name) is None:
                values.pop(name, None)
        return values

    @model_validator(mode="after")
    def _names_a_rank(self) -> "TrainPrediction":
        ranks, at_risk = len(self.peak_memory_bytes), self.rank_at_risk
        if at_risk is not None and at_risk.pipeline_rank >= ranks:
            raise ValueError(f"rank_at_risk: no pipeline rank {at_risk.pipeline_rank} of {ranks}")
        return self


class ParetoPoint(Record):
    """A Pareto-optimal decision in step time, memory and cost."""

    decision: TrainDecision
    step_time_s: Seconds
    peak_memory_bytes: Size
    """Peak memory of the device with the highest peak, bytes."""
    cost_per_step: float | None = None
    """Cost of the devices for one step, in the cluster's currency; absent without a price."""


class Alternative(Record):
    """A runner-up, and why it lost; the best found of its layout (TP, CP, PP, DP, EP, ETP)."""

    decision: TrainDecision
    predicted: TrainPrediction
    within_band: bool
    """The band of the ratio contains 1: a tie with the plan's decision under the model."""
    ratio_band: Band | None = None
    """Band of the measured step time over the chosen one's, which holds four of five pairs of
    configurations. Narrower than the band of either time, as most errors are common to both; None
    where none is known for the engine."""
    lost_by: str
    """The cost that makes the difference, in words."""
    num_variants: Size = 0
    """Number of the plan's `variants` that run the same layout."""


Tally = Annotated[int, Field(ge=0)]
"""A number of combinations, which may be very large."""


class Space(Record):
    """Number of candidates of the search by outcome; the parts sum to the whole space."""

    priced: Tally
    """Candidates that were solved: with a layout, or a proof that none fits."""
    bounded: Tally
    """Candidates that were pruned: a lower bound proves them worse than the incumbents."""
    illegal: Tally
    """Candidates that break a rule of the model, the cluster, the batch or the target."""
    open: Tally = 0
    """Candidates that are undecided: time ran out, or the method does not cover them."""


class Certificate(GoalCertificate):
    """Proof about the decision, under the model.

    `objective` is the predicted seconds per step of the fastest decision found, with the engine's
    own gradient buckets; `bound` is the lower bound of those of every legal candidate.
    """

    decision_gap_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """Distance from the step time of the plan's decision to the bound, as a share of that time;
    absent unless another decision is preferred to the fastest."""
    space: Space
    within_band: Tally
    """Number of ties: other combinations of degrees, each at its best, whose `ratio_band` to the
    chosen one contains 1 (the step's own band where no ratio's is known)."""
    within_band_is_least: bool = False
    """`within_band` is a lower bound: candidates slower than the requested runners-up, and those
    that time ran out on, are not counted."""


class Relaxation(Record):
    """A limit that is binding, and the change that would make a plan fit."""

    limit: str
    """Name of the limit, e.g. `memory_per_device`."""
    change: str
    """Change of the limit in words, with numbers."""
    decision: TrainDecision | None = None
    predicted: TrainPrediction | None = None


class Preference(Record):
    """Reasons why the plan's decision is not the fastest found."""

    fastest: TrainDecision
    fastest_step_s: Seconds
    slower_ratio: Annotated[float, Field(ge=0.0)]
    """Share by which a step of the plan's decision is longer than the fastest one's."""
    reasons: tuple[str, ...]
    """Advantages of the plan's decision, most important first."""
    expected_step_s: Seconds | None = None
    """Expected seconds per step of the plan's decision, with the cost of running out of memory."""
    fastest_expected_step_s: Seconds | None = None
    """Expected seconds per step of the fastest decision, with the cost of running out of memory."""
    fastest_out_of_memory_probability: Probability | None = None
    fastest_tried_first_step_s: Seconds | None = None
    """Expected seconds per step if the fastest decision is tried first and the plan's decision runs
    after it; absent unless the fastest is excluded because it probably runs out of memory."""


class Roomier(Record):
    """The fastest decision with a low risk of running out of memory, where the plan's is high."""

    decision: TrainDecision
    step_time_s: Seconds
    slower_ratio: Annotated[float, Field(ge=0.0)]
    """Share by which a step is longer than the plan's."""
    slower_s: Seconds
    """Additional seconds of the whole run, against the plan's decision."""
    peak_memory_bytes: Size
    """Peak memory of the device with the highest peak, bytes; on heterogeneous pools, of the device
    that is likeliest to run out."""
    out_of_memory_probability: Probability
    rank_at_risk: RankAtRisk | None = None
    """Rank whose peak and probability are stated; absent on a single kind of devices."""
    pools: tuple[str, ...] = ()
    """Pools that the decision runs on; empty where they are the plan's."""


class Unlaunchable(Record):
    """The cost of a feature that a target lacks."""

    target: str
    feature: str
    gain_ratio: float
    """Predicted share of the step time that the feature would save."""
    condition: str = ""
    """Condition that the target does not allow though it has the feature; empty where the target
    lacks the feature."""

    @property
    def why(self) -> str:
        """Reason why the feature cannot be launched, in words."""
        if self.condition:
            return f"{self.target} does not allow {self.condition}"
        return f"{self.target} {'do' if ', ' in self.target else 'does'} not have it"


class Provenance(GoalProvenance):
    """The inputs of the plan."""

    profile_sha256: dict[str, str]
    """SHA-256 of the profile by pool."""
    profile_source: dict[str, str]
    """Source of the kernel times by pool: `measured`, `imported` or `datasheet`."""
    links_sha256: dict[str, str] = Field(default_factory=dict)
    """SHA-256 by pool of its link matrix as `used/` holds it; empty where no links were
    measured."""
    device_kind: dict[str, Literal["cpu", "cuda"]] = Field(default_factory=dict)
    """Kind of devices by pool; a pool that is not named has accelerators."""
    extrapolated: tuple[str, ...]
    """Operations priced outside the measured range."""
    residual: Residual | None = None
    """Correction of predictions on a profile of the reference step, for the launched engine; None:
    the one that ships for the reference step, or no such profile."""

    @property
    def kind_of_devices(self) -> Literal["cpu", "cuda"]:
        """`cpu` where every pool was measured on processors."""
        return "cpu" if set(self.device_kind.values()) == {"cpu"} else "cuda"


class Plan(GoalPlan):
    """`plan.json`."""

    model: ModelSpec
    cluster: Cluster
    goal: TrainGoal
    search: Search = Search()
    """Limits that the user set on the search."""
    decision: TrainDecision | None
    predicted: TrainPrediction | None
    certificate: Certificate
    alternatives: tuple[Alternative, ...]
    """Runners-up, one for each layout but the decision's own."""
    variants: tuple[Alternative, ...] = ()
    """Runners-up with the layout of the decision or of an alternative and other execution options:
    micro-batch, interleaving, ZeRO stage, recomputation, overlap and so on. Trials decide between
    them."""
    preferred: Preference | None = None
    """Reasons to prefer the decision to the fastest found; absent where it is the fastest."""
    roomier: Roomier | None = None
    """The fastest decision with more headroom; absent where the plan's has a low risk of running
    out of memory, and where none with more headroom was found."""
    roomier_within_ratio: Annotated[float, Field(ge=0.0)] | None = None
    """Share by which steps may be longer than the plan's in the search for decisions with more
    headroom, which found none; absent where one was found, and where the search had no limit."""
    no_roomier: bool = False
    """Every decision was searched, and none has a low risk of running out of memory."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Pareto-optimal decisions in step time, memory and cost, fastest first; empty where not
    requested."""
    unlaunchable: tuple[Unlaunchable, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    """Changes of limits that would make a plan fit, where none fits or where all found decisions
    probably run out of memory."""
    placement: StagePlacement | None = None
    """Machines of every stage; absent where all machines are the same and no links were
    measured."""
    load_ratio: tuple[tuple[float, ...], ...] = ()
    """Expert loads that the plan was priced with, [MoE layers][experts]; empty means balanced."""
    failures: FailureLog | None = None
    """Failures that the spec's log shows; absent without one."""
    provenance: Provenance

    @property
    def runners_up(self) -> tuple[Alternative, ...]:
        """Alternatives and variants together, fastest first."""
        every = (*self.alternatives, *self.variants)
        return tuple(sorted(every, key=lambda alternative: alternative.predicted.step_time_s))

    @model_validator(mode="after")
    def _has_devices(self) -> "Plan":
        available = sum(pool.nodes * pool.devices_per_node for pool in self.cluster.pools)
        if self.decision is not None and self.decision.num_devices > available:
            raise ValueError(
                f"decision asks for {self.decision.num_devices} devices of {available}"
            )
        return self

    def candidates(self) -> "DataFrame":
        """Return the compared candidates as a data frame; tuner/plans/candidates.py says which."""
        from tuner.plans.candidates import train_candidates

        return train_candidates(self)


class TrialSummary(Record):
    """One trial as an emitted file or a report needs it."""

    decision: TrainDecision
    status: Literal["ok", "out_of_memory", "timeout", "crashed"]
    predicted_step_s: float
    measured_step_s: float | None


class VerifiedPlan(Record):
    """A plan with the evidence for it: trials, or a stated reason for their absence."""

    plan: Plan
    decision: TrainDecision
    """Decision to launch: the fastest measured, or the plan's decision when nothing was
    measured."""
    predicted: TrainPrediction
    """The plan's prediction for `decision`."""
    trials: tuple[TrialSummary, ...] = ()
    waived: str = ""
    """Reason why nothing was measured; printed at the top of every emitted file."""

    @model_validator(mode="after")
    def _evidence(self) -> "VerifiedPlan":
        if bool(self.trials) == bool(self.waived):
            raise ValueError("a verified plan has trials or a waiver, and not both")
        return self

    @classmethod
    def waive(cls, plan: Plan, *, reason: str) -> "VerifiedPlan":
        """Accept a plan without measuring it.

        Raises:
            ValueError: the plan has no decision to launch, or no reason is given.
        """
        if plan.decision is None or plan.predicted is None or not reason:
            raise ValueError("only a feasible plan can be waived, and only with a reason")
        return cls(plan=plan, decision=plan.decision, predicted=plan.predicted, waived=reason)
