"""What is decided, what it is predicted to do, and how sure we are: the values behind `plan.json`.

    Plan          the decision with its prediction, certificate, runner-ups and provenance
    VerifiedPlan  a plan with what its trials measured, or with the reason why nothing was measured

Emitters accept `VerifiedPlan` only. Every prediction carries its error band beside it, as
`<name>_band: [low, high]`. Names of decisions are Megatron-LM's.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Recompute, Size
from tuner.costs.residuals import Residual
from tuner.faults.forecast import RunForecast
from tuner.placement import Placement
from tuner.spec.cluster import Cluster
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.search import Search

SCHEMA_VERSION = 1
# 1: first release.

Band = tuple[float, float]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class TrainDecision(Record):
    """One launchable training configuration.

    World = TP * CP * DP * PP = ETP * EP * EDP * PP (Megatron's parallel folding).
    """

    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    virtual_pipeline_model_parallel_size: Count
    context_parallel_size: Count
    data_parallel_size: Count
    expert_model_parallel_size: Count
    expert_tensor_parallel_size: Count
    expert_data_parallel_size: Count
    sequence_parallel: bool
    micro_batch_size: Count
    zero_stage: Literal[0, 1, 2, 3]
    shard_ranks: Count | None = None
    """HSDP: data and context ranks that share one copy of the sharded state; None: all of them."""
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep", "hierarchical"] = "alltoall"
    """What moves token copies between expert-parallel ranks."""
    a2a_overlap: bool = False
    """Dispatch and combine of one micro-batch run beside another's work."""
    recompute: Recompute
    """The strongest level used on any stage; see `stage_recompute`."""
    recompute_modules: tuple[str, ...] = ()
    """Megatron's names of what selective recompute covers, e.g. `moe`."""
    recompute_num_layers: Count | None = None
    """Full recomputation of so many layers of every stage only; None means of all."""
    stage_recompute: Annotated[tuple[Recompute, ...], Field(min_length=1)]
    """Level of each stage, in execution order."""
    chunks: Annotated[tuple[Count, ...], Field(min_length=1)]
    """MemFine chunks of the MoE layers of each stage, in execution order."""
    pipeline_layout: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Transformer layers of each stage in execution order; stage s runs on pipeline rank s % PP."""
    mtp_num_layers: Size = 0
    fp8_recipe: str = ""
    """Empty for bf16; otherwise a precision of tuner/spec/goal.py, e.g. `mxfp8`."""
    schedule: Literal["1f1b", "interleaved", "zero_bubble"] | None = None
    """Order of passes in the pipeline; None: interleaved where virtual, otherwise 1F1B."""
    rank_order: str = "tp-cp-ep-dp-pp"
    """Groups from neighbouring to distant ranks; decides which lie inside a scale-up domain."""
    cuda_graph: Literal["none", "partial", "full_iteration"] = "none"
    overlap_grad_reduce: bool = False
    """Gradient sums run beside the backward pass."""
    ddp_bucket_size: Count | None = None
    """Parameters of one bucket of overlapped gradient reduction; None: the engine's own size."""
    overlap_param_gather: bool = False
    """Parameter gathers of the sharded optimizer run beside the forward pass."""
    gradient_bytes: Literal[2, 4] = 4
    """Of one main gradient."""
    optimizer_offload: bool = False
    """The optimizer state lives in host memory."""
    activation_offload: bool = False
    """Saved activations live in host memory."""
    ends_as_layers: bool = False
    """Embedding and loss were counted as layers when the stages were balanced."""

    @property
    def num_devices(self) -> int:
        """Devices that the decision asks for."""
        return (
            self.tensor_model_parallel_size
            * self.context_parallel_size
            * self.data_parallel_size
            * self.pipeline_model_parallel_size
        )

    @property
    def num_stages(self) -> int:
        """Pipeline stages, counting every model chunk of interleaving."""
        return self.pipeline_model_parallel_size * self.virtual_pipeline_model_parallel_size

    @property
    def num_state_copies(self) -> int:
        """Copies of the sharded training state; 1 unless `shard_ranks` says otherwise."""
        shared = self.data_parallel_size * self.context_parallel_size
        return max(1, shared // (self.shard_ranks or shared))

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches per pipeline in one optimizer step."""
        return global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    @model_validator(mode="after")
    def _consistent(self) -> "TrainDecision":
        per_stage = {len(self.stage_recompute), len(self.chunks), len(self.pipeline_layout)}
        if per_stage != {self.num_stages}:
            raise ValueError(f"{self.num_stages} stages, but lists of {sorted(per_stage)} entries")
        experts = (
            self.expert_tensor_parallel_size
            * self.expert_model_parallel_size
            * self.expert_data_parallel_size
            * self.pipeline_model_parallel_size
        )
        if experts != self.num_devices:
            raise ValueError(f"ETP*EP*EDP*PP = {experts}, TP*CP*DP*PP = {self.num_devices}")
        shared = self.data_parallel_size * self.context_parallel_size
        copies = self.num_state_copies
        if shared != copies * (self.shard_ranks or shared):
            raise ValueError(
                f"shard_ranks {self.shard_ranks} does not divide data_parallel_size *"
                f" context_parallel_size = {shared}"
            )
        if self.data_parallel_size % copies or self.expert_data_parallel_size % copies:
            raise ValueError(
                f"shard_ranks {self.shard_ranks} makes {copies} copies, which do not divide"
                f" data_parallel_size {self.data_parallel_size} and expert_data_parallel_size"
                f" {self.expert_data_parallel_size}"
            )
        return self


class StagePrediction(Record):
    """What one pipeline stage costs: seconds per micro-batch, bytes on its fullest device."""

    layers: Size
    forward_s: Seconds
    backward_s: Seconds
    """Recomputation included."""
    parameter_bytes: Size
    gradient_bytes: Size
    optimizer_bytes: Size
    activation_bytes: Size
    """Largest live sum of what is saved for backward."""
    other_bytes: Size
    """Communication buffers and gathered parameters."""
    max_chunk_tokens: Size | None = None
    """MemFine's s'_max: token copies that one device can receive in one chunk and stay inside its
    memory; absent where nothing is chunked."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.other_bytes
        )


class RankAtRisk(Record):
    """The pipeline rank that is likeliest to run out of memory, where devices are unlike.

    It need not be the one with the largest peak.
    """

    pipeline_rank: Size
    pool: str
    peak_memory_bytes: Size
    """Of its fullest device."""
    memory_capacity_bytes: Size
    """All that one of its devices has."""


class TrainPrediction(Record):
    """What the model expects of a decision."""

    step_time_s: Seconds
    step_time_s_band: Band
    tokens_per_s_per_device: float
    tokens_per_s_per_device_band: Band
    peak_memory_bytes: tuple[Size, ...]
    """Per pipeline rank, the fullest device."""
    peak_memory_bytes_band: tuple[Band, ...]
    memory_limit_bytes: Size | None = None
    """What the plan may use of one device; absent where devices are unlike."""
    memory_capacity_bytes: Size | None = None
    """All that one device has; absent where devices are unlike."""
    rank_at_risk: RankAtRisk | None = None
    """Whose chance of running out is told; absent where devices are alike."""
    out_of_memory_probability: Probability | None = None
    """That a device ever needs more than it has, by the errors of published peaks and what a peak
    grows by over a run (tuner/planner/analytic/memory_risk.py). This and the next two are absent
    where bytes were counted on the reference step, which published no errors."""
    out_of_memory_at_start_probability: Probability | None = None
    """The same in the first steps."""
    out_of_memory_loss_s: Seconds | None = None
    """Seconds of the whole run that failed starts and restarts for want of memory are expected to
    take; the longer step that the run then goes on with is not in it."""
    activation_bytes: tuple[Size, ...]
    """Per pipeline rank, the fullest device: largest live sum of what is saved for backward."""
    breakdown_s: dict[str, float]
    """Seconds of a step by cause; they add up to `step_time_s`."""
    inter_node_bytes: float | None = None
    """What dispatch and combine send from node to node in a step, all devices together; absent
    where it was not counted."""
    communication_s: Seconds
    """What of `step_time_s` is spent in collectives, waiting in the bubble included."""
    stages: tuple[StagePrediction, ...]
    mfu_ratio: float | None = None
    """Model FLOPs (tuner/spec/accounting.py: no recomputation, causal attention, the head counted)
    over what the devices' bf16 or low-precision peaks could do in `step_time_s`; absent where no
    peak is known."""
    played_step_time_s: Seconds | None = None
    """The same schedule played pass by pass (tuner/simulate/pipeline.py); absent where it was not
    played."""
    run: RunForecast | None = None
    """The whole run, failures included."""

    @model_validator(mode="after")
    def _names_a_rank(self) -> "TrainPrediction":
        ranks, at_risk = len(self.peak_memory_bytes), self.rank_at_risk
        if at_risk is not None and at_risk.pipeline_rank >= ranks:
            raise ValueError(f"rank_at_risk: no pipeline rank {at_risk.pipeline_rank} of {ranks}")
        return self


class ParetoPoint(Record):
    """A decision that no other beats in step time, memory and cost at once."""

    decision: TrainDecision
    step_time_s: Seconds
    peak_memory_bytes: Size
    """Of the fullest device."""
    cost_per_step: float | None = None
    """Devices times their price for one step; absent without a price."""


class Alternative(Record):
    """A runner-up, and why it lost; the best found of its layout (TP, CP, PP, DP, EP, ETP)."""

    decision: TrainDecision
    predicted: TrainPrediction
    within_band: bool
    """1 lies inside the band of the ratio: the model cannot tell the two apart."""
    ratio_band: Band | None = None
    """Seconds of its step over those of the chosen one's, as they may measure: four pairs of
    configurations of five. Narrower than the band of either time, as most errors are common to
    both; None where none is known for the engine."""
    lost_by: str
    """The cost that made the difference, in words."""
    num_variants: Size = 0
    """How many of the plan's `variants` run the same layout."""


Tally = Annotated[int, Field(ge=0)]
"""Combinations, of which there can be any number."""


class Space(Record):
    """Where every candidate of the search went; the parts add up to the whole space."""

    priced: Tally
    """Solved, to a layout or to the proof that none fits."""
    bounded: Tally
    """Dropped because a lower bound proved them worse than the kept ones."""
    illegal: Tally
    """Break a rule of the model, the cluster, the batch or the target."""
    open: Tally = 0
    """Left without a verdict: time ran out, or the method does not cover them."""


class Certificate(Record):
    """What is proven about the choice, under the model."""

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    objective: float | None
    """Predicted seconds per step of the fastest decision found, in the engine's own buckets of
    gradients; absent without one."""
    bound: float | None
    """No legal candidate is faster than this, under the model."""
    gap_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    decision_gap_ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """The same of the plan's decision where another is preferred to the fastest."""
    space: Space
    within_band: Tally
    """Other combinations of degrees, each at its best, that the model cannot tell from the
    chosen one: their `ratio_band` holds 1 (the step's own band where no ratio's is known)."""
    within_band_is_least: bool = False
    """There may be more: the search leaves what is slower than the runners-up asked for uncounted,
    and what time ran out on."""
    solve_s: Seconds
    """Wall time of planning: from reading the spec to the finished plan, all searches included."""
    method: str


class Relaxation(Record):
    """A limit that stands in the way, and how far it must move."""

    limit: str
    """E.g. `memory_per_device`."""
    change: str
    """In words, with numbers."""
    decision: TrainDecision | None = None
    predicted: TrainPrediction | None = None


class Preference(Record):
    """Why the plan's decision is another than the fastest found."""

    fastest: TrainDecision
    fastest_step_s: Seconds
    slower_ratio: Annotated[float, Field(ge=0.0)]
    """How much longer a step of the plan's decision takes than the fastest one's."""
    reasons: tuple[str, ...]
    """What is better about the plan's decision, most important first."""
    expected_step_s: Seconds | None = None
    """Seconds of a step of the plan's decision with what running out of memory costs on average."""
    fastest_expected_step_s: Seconds | None = None
    """The same of the fastest one."""
    fastest_out_of_memory_probability: Probability | None = None
    fastest_tried_first_step_s: Seconds | None = None
    """Where the fastest is excluded, as it runs out of memory more likely than not: seconds of a
    step on average, were it tried first and the plan's decision run after it."""


class Roomier(Record):
    """The fastest decision that hardly runs out of memory, where the plan's may."""

    decision: TrainDecision
    step_time_s: Seconds
    slower_ratio: Annotated[float, Field(ge=0.0)]
    """How much longer a step takes than the plan's."""
    slower_s: Seconds
    """The same over the whole run."""
    peak_memory_bytes: Size
    """Of the fullest device; where devices are unlike, of the one that is likeliest to run out."""
    out_of_memory_probability: Probability
    rank_at_risk: RankAtRisk | None = None
    """Whose peak and chance these are; absent where devices are alike."""
    pools: tuple[str, ...] = ()
    """That it runs on; empty where they are the plan's."""


class Unlaunchable(Record):
    """What a missing feature of a target costs."""

    target: str
    feature: str
    gain_ratio: float
    """Share of the step time that the feature would save, predicted."""
    condition: str = ""
    """Where the target has the feature: what of it the target does not allow; else empty."""

    @property
    def why(self) -> str:
        """Say in words why the feature cannot be launched."""
        if self.condition:
            return f"{self.target} does not allow {self.condition}"
        return f"{self.target} does not have it"


class Provenance(Record):
    """What the plan rests on."""

    moetune_version: str
    spec_sha256: str
    profile_sha256: dict[str, str]
    """By pool."""
    profile_source: dict[str, str]
    """By pool: `measured`, `imported` or `datasheet`."""
    links_sha256: dict[str, str] = Field(default_factory=dict)
    """By pool, of its link matrix as `used/` holds it; empty where no links were measured."""
    device_kind: dict[str, Literal["cpu", "cuda"]] = Field(default_factory=dict)
    """By pool; a pool that is not named has accelerators."""
    extrapolated: tuple[str, ...]
    """Operations priced outside the measured range."""
    residual: Residual | None = None
    """By which predictions on a profile of the reference step were corrected, for the engine that
    is launched; None: the one that ships for the reference step, or no such profile."""
    notes: tuple[str, ...] = ()
    """What the reader must know, e.g. that routing was assumed balanced."""


class Plan(Record):
    """`plan.json`."""

    schema_version: Literal[1] = 1
    model: ModelSpec
    cluster: Cluster
    goal: TrainGoal
    search: Search = Search()
    """What the user allowed to be chosen."""
    emit: tuple[str, ...]
    decision: TrainDecision | None
    predicted: TrainPrediction | None
    certificate: Certificate
    binding_constraint: str
    """What keeps the plan from being faster, or from existing."""
    alternatives: tuple[Alternative, ...]
    """One for each layout but the decision's own."""
    variants: tuple[Alternative, ...] = ()
    """What runs the layout of the decision or of an alternative in another way: other micro-batch,
    interleaving, ZeRO stage, recomputation, overlap and so on. Trials tell them apart."""
    preferred: Preference | None = None
    """Absent where the decision is the fastest found."""
    roomier: Roomier | None = None
    """Absent where the decision hardly runs out of memory, and where no other with more room was
    found."""
    roomier_within_ratio: Annotated[float, Field(ge=0.0)] | None = None
    """Up to this share longer than the plan's were the steps of decisions with more room that were
    searched for and not found; absent where one was, and where the search had no limit."""
    no_roomier: bool = False
    """Every decision was searched, and none hardly runs out of memory."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Time against memory and cost, fastest first; empty where it was not asked for."""
    unlaunchable: tuple[Unlaunchable, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    """What would make something fit: where nothing does, and where all that was found runs out of
    memory more likely than not."""
    placement: Placement | None = None
    """Which machines run which stage; absent where all are alike and none was measured apart."""
    load_ratio: tuple[tuple[float, ...], ...] = ()
    """[MoE layers][experts] that the plan was priced with; empty means balanced."""
    provenance: Provenance
    files: tuple[str, ...] = ()

    @property
    def runners_up(self) -> tuple[Alternative, ...]:
        """Alternatives and variants together, fastest first."""
        every = (*self.alternatives, *self.variants)
        return tuple(sorted(every, key=lambda one: one.predicted.step_time_s))

    @model_validator(mode="after")
    def _payload_agrees(self) -> "Plan":
        found = self.certificate.status in ("optimal", "feasible")
        if found != (self.decision is not None) or found != (self.predicted is not None):
            raise ValueError(f"status {self.certificate.status} disagrees with the decision")
        there = sum(pool.nodes * pool.devices_per_node for pool in self.cluster.pools)
        if self.decision is not None and self.decision.num_devices > there:
            raise ValueError(f"decision asks for {self.decision.num_devices} devices of {there}")
        return self


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
    """What to launch: the measured winner, or the plan's own choice when nothing was measured."""
    predicted: TrainPrediction
    """What the plan's model expects of it."""
    trials: tuple[TrialSummary, ...] = ()
    waived: str = ""
    """Why nothing was measured; printed at the top of every emitted file."""

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
