"""A plan that serves: the values behind `plan.json` where `goal.kind` is `serve`.

    ServePlan        instances with what they are predicted to do, and the certificate
    VerifiedServing  a plan with the evidence for it, which is what emitters accept

Times are seconds, rates requests per second; percentiles are over requests.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from profilers.steps.config import Count, Size
from tuner.config.serve import (
    ServeDecision,
)
from tuner.costs.serve.residual import ServeResidual
from tuner.plans.autoscaling import Autoscaling
from tuner.plans.goal_plan import GoalCertificate, GoalPlan, GoalProvenance
from tuner.spec.cluster import Cluster
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import Mode, ServeGoal

if TYPE_CHECKING:
    from pandas import DataFrame

Ratio = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Band = tuple[float, float]


class Latency(Record):
    """A latency over requests."""

    mean: Seconds
    p50: Seconds
    p90: Seconds
    p99: Seconds


class TokenCost(Record):
    """Cost of tokens, by the device-seconds that they take; tuner/search/serve/token_cost.py."""

    currency: str = ""
    """Currency of the costs, as the spec names it; empty: the unit of `price_per_device_hour`."""
    input_per_million: Ratio
    """Cost of a million tokens of prompts, those found in the prefix cache included."""
    output_per_million: Ratio
    """Cost of a million output tokens."""
    input_ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of the cost that prompts bear, from 0 to 1."""


class PlannedHits(Record):
    """Prefix cache hits that a plan counts on, where a prefix lies on one of several caches."""

    ratio: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of the prompt tokens found in prefix caches."""
    ratio_band: Band
    """Lowest and highest share of the prompt tokens found: the lowest is that of routing to
    instances, as routing to ranks was not seen on devices; the highest is `ratio`."""
    instances: Count
    """Instances that prefill, all groups together."""
    ranks: Count
    """Attention-data ranks of all these instances, each with a cache of its own."""
    if_instances: float | None = None
    """Share found if prefixes were routed to instances; None: no router looks for prefixes."""
    if_ranks: float | None = None
    """Share found if prefixes were routed to ranks; None: no router looks for prefixes, or ranks
    were not compared."""


class ServePrediction(Record):
    """Predicted performance, memory and cost of a deployment."""

    ttft_s: Latency
    ttft_s_band: Band
    """Lowest and highest mean time to the first token that is expected, seconds: the mean times the
    error band of measured over predicted."""
    tpot_s: Latency
    tpot_s_band: Band
    is_new_pair: bool = False
    """No calibration row shares the model and the engine: the bands are those of pairs left out."""
    goodput_per_device: float
    """Requests per second that meet every target, over the number of devices."""
    requests_per_s: float
    output_tokens_per_s: float
    utilisation_ratio: dict[str, float]
    """Busy share of each group of instances, by `role@pool/layout`."""
    memory_bytes: dict[str, int]
    """Bytes on one device of each group of instances, by `role@pool/layout`."""
    input_tokens_per_s: float | None = None
    """Tokens per second of the prompts served; None in plans of older versions."""
    cost_per_hour: float | None = None
    """Cost per hour of all devices, in the spec's currency; None where a pool has no price."""
    prefix_hits: PlannedHits | None = None
    """Hits on prefixes that lie in one of several caches; None: every cache has the prefix, or
    there is none."""
    token_cost: TokenCost | None = None
    """`cost_per_hour` split over input and output tokens; None where a pool has no price."""
    breakdown_s: dict[str, float]
    """Seconds of one decode step of the most-loaded group, by operation."""


class ServeSpace(Record):
    """Number of instance options that were priced, dominated or refused."""

    priced: Size
    bounded: Size
    """Instance options that another one dominates."""
    illegal: Size
    illegal_by: dict[str, Size] = Field(default_factory=dict)
    """Illegal options by the reason, most frequent first."""


class ServeCertificate(GoalCertificate):
    """Proof about the instance counts, under the model.

    `infeasible` means that nothing was found which keeps the targets; `binding_constraint` says how
    far the search went. `bound` is the least that any mode which can be launched could take if
    requests never waited, including modes that miss a target once their traffic is simulated; where
    the goal is the rate, the most requests per second that any such mode could serve.
    """

    covers: str = ""
    """Modes and kinds of instances that the bound holds for, in words."""
    program_gap_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Gap of the program that chooses the instance counts, to its own bound, with the spare
    capacity that simulation asked for."""
    space: ServeSpace
    within_band: Size
    """Number of other sets of instances, of this mode or another, whose objective the model cannot
    tell apart from the chosen one's."""
    within_band_is_least: bool = False
    """`within_band` is a lower bound: only so many were looked for."""


class ServeAlternative(Record):
    """A runner-up."""

    decision: ServeDecision
    predicted: ServePrediction
    within_band: bool
    lost_by: str


class ServeRelaxation(Record):
    """A constraint that was relaxed, and the decision that then fits."""

    limit: str
    change: str
    decision: ServeDecision | None = None


class ServeUnlaunchable(Record):
    """A mode or knob that the engine's release lacks."""

    feature: str
    gain_ratio: float
    rule: str = ""
    """Name of the rule between vendors that forbids it (catalog/serve_rules/vendor_pairs.py)."""


class MissedTarget(Record):
    """A latency target that a deployment does not meet."""

    target: str
    """Latency and statistic, e.g. `tpot p90`."""
    seconds: Seconds
    """Predicted latency, seconds."""
    limit_s: Seconds
    """Target that is missed, seconds."""


class ServeNearMiss(Record):
    """The cheapest deployment that misses targets by less than the error bands of its latencies."""

    decision: ServeDecision
    cost_per_hour: float | None = None
    missed: Annotated[tuple[MissedTarget, ...], Field(min_length=1)]
    """Targets that are missed, each by less than its band."""
    comparison: str = ""
    """Comparison with the chosen deployment, in words; empty without one."""


class ServeModeResult(Record):
    """Outcome of one requested mode."""

    mode: Mode
    status: Literal["chosen", "alternative", "unlaunchable", "missed", "none"]
    """Result of the mode; `missed`: a target does not hold, whatever spare capacity; `none`:
    nothing serves the traffic."""
    devices: Size | None = None
    cost_per_hour: float | None = None
    ttft_s: Seconds | None = None
    """Mean time to the first token, simulated; of a single prompt for an AFD mode that no release
    launches."""
    tpot_s: Seconds | None = None
    requests_per_s: float | None = None
    """Requests per second that the mode serves within the targets, where the goal is the most of
    them."""
    gain_ratio: float | None = None
    """Share of the devices, money or seconds per request, by the goal, saved against the chosen
    mode; negative: more."""
    told: str = ""
    """Reason why the mode is not chosen, in words."""


class PrefixReuse(Record):
    """Prefix cache hits of a recorded traffic whose trace has the block ids of prompts."""

    router: Literal["in_turn", "own_ranks", "cache_aware", "ranks", "one"]
    """Rule by which requests are sent: to instances in turn (`in_turn`), also where each
    sends them to its own ranks by the cache-aware rule (`own_ranks`), by that rule to instances
    (`cache_aware`; tuner/simulate/serving/prefix_hits.py) or to the ranks of all instances
    (`ranks`), or all to one cache (`one`)."""
    instances: Count
    """Instances that prefill."""
    ranks: Count
    """Attention-data ranks of one instance, each with a cache of its own."""
    cache_blocks: Count
    """Blocks of 512 tokens that the cache of one rank holds, beside the outputs that run on it."""
    stay_s: Seconds
    """Seconds that a request is in flight, by which the router counts loads."""
    hit_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the prompt tokens found, from empty caches on."""
    by_router: dict[str, float] = Field(default_factory=dict)
    """`hit_ratio` under each rule of `router`."""
    most_loaded_ratio: Ratio = 1.0
    """Requests of the most-loaded rank over the mean of all ranks."""
    requests: Size = 0
    """Requests from the beginning of the trace that were counted."""
    share_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of all requests that this island gets; 1 where there are no islands."""
    islands: tuple["PrefixReuse", ...] = ()
    """Hits of each island, with its own caches and router. The record around them then has the sum
    of their `instances`, the largest `ranks` and the smallest `cache_blocks`."""


class FrontPoint(Record):
    """An option that no other of its mode dominates in both speeds.

    At the steady state, every instance full and none waiting (tuner/search/serve/front.py).
    """

    mode: Mode
    tokens_per_s_per_user: float
    """Output tokens per second of one request: 1 over the time per output token."""
    tokens_per_s_per_device: float
    """Output tokens per second of all requests, over all devices, prefill ones included."""
    running: Count
    """Sequences of one attention-data rank."""
    instance: str
    """The decoding instance, in words."""
    prefill: str = ""
    """The prefill instance, in words; empty where the decoding instance prefills."""
    prefill_per_instance: Ratio | None = None
    """Prefill instances per decode instance."""
    ttft_s: Seconds
    """Seconds to the first token of a request that meets no others."""
    within_targets: bool
    """Both speeds keep the strictest target in the steady state."""
    on_joint_front: bool
    """No option of another mode dominates this one either."""


class ServeProvenance(GoalProvenance):
    """Inputs that the plan was made from."""

    profile_source: dict[str, str]
    """Source of the kernel times by pool: `profile`, `tables` or `datasheet`; older plans also
    `aiconfigurator-core`."""
    kernels_sha256: dict[str, str] = Field(default_factory=dict)
    """SHA-256 by pool of the files that its kernels were read from and of its datasheet."""
    residual: ServeResidual | None = None
    """Correction of predictions, fitted to launches of the engine on these devices; None: there are
    none."""


class ServePlan(GoalPlan):
    """`plan.json` of a deployment."""

    model: ModelSpec
    cluster: Cluster
    goal: ServeGoal
    decision: ServeDecision | None
    predicted: ServePrediction | None
    certificate: ServeCertificate
    alternatives: tuple[ServeAlternative, ...] = ()
    near_miss: ServeNearMiss | None = None
    """The cheapest deployment that misses a target by less than its band, where it takes less than
    the chosen one."""
    unlaunchable: tuple[ServeUnlaunchable, ...] = ()
    relaxations: tuple[ServeRelaxation, ...] = ()
    modes: tuple[ServeModeResult, ...] = ()
    """Result of every requested mode, in the order of all modes in the schema."""
    prefix_reuse: PrefixReuse | None = None
    """Prefix cache hits on the chosen instances; None where no trace names the blocks of its
    prompts."""
    autoscaling: Autoscaling | None = None
    """Triggers and bounds of the autoscaler in `emit`; None without one."""
    pareto: tuple[FrontPoint, ...] = ()
    """Pareto fronts of the throughput of a device against the speed of one request, mode by mode,
    slow users first."""
    provenance: ServeProvenance

    def candidates(self) -> "DataFrame":
        """Return the compared candidates as a data frame; tuner/plans/candidates.py says which."""
        from tuner.plans.candidates import serve_candidates

        return serve_candidates(self)


class VerifiedServing(Record):
    """A deployment with the evidence for it, or a stated reason for its absence."""

    plan: ServePlan
    decision: ServeDecision
    predicted: ServePrediction
    waived: str = ""
    """Reason why nothing was measured; stated in or beside every emitted file."""
    measured: str = ""
    """Results of launches of the deployment, one line; stated in or beside every emitted file."""
    is_part: bool = False
    """The plan's cluster has only those pools that serve; others were left out of it."""

    @property
    def autoscaling(self) -> Autoscaling | None:
        """Return the autoscaler of the planned instances; None without one, or for others.

        A launch may have won with other instances, whose load was not simulated.
        """
        is_planned = self.plan.decision is not None and (
            self.decision.instances == self.plan.decision.instances
        )
        return self.plan.autoscaling if is_planned else None
