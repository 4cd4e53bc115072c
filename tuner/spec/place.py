"""The goal `place`: an expert placement for recorded workloads."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.spec.fields import (
    Bytes,
    Count,
    FilePath,
    Name,
    Number,
    PositiveSeconds,
    former,
    one_or_many,
)
from tuner.spec.place_method import Method, method_refusal

MOST_RANKS = 4096

Weight = Annotated[Number, Field(ge=1e-6, le=1e6)]
"""Largest ratio of weights or speeds; beyond it the smaller one vanishes in rounding."""
Speed = Annotated[Number, Field(ge=1e-3, le=1e3)]


class Objective(StrEnum):
    """The objective to minimise; each suits the runtime that it names."""

    BALANCE = "balance"
    """Largest rank load of every layer: runtimes that wait for the slowest rank."""
    CO_ACTIVATION = "co_activation"
    """Ranks and nodes of a token's experts: dispatchers that send a token once to each rank or node
    (DeepEP, HybridEP)."""
    LAYER_CHAIN = "layer_chain"
    """Distance from a token's expert to its expert in the next layer: runtimes that leave a token
    on the rank of its last expert (MoETuner)."""
    LAYER_TIME = "layer_time"
    """Predicted seconds of the expert layers: GEMMs of the most-loaded rank, weights read by active
    experts, and the all-to-all; needs `model` and `cluster`."""


class TrafficObjective(StrEnum):
    """Traffic to minimise, for objectives co_activation and layer_chain."""

    TOTAL = "total"
    """Every token copy, at the cost of its path."""
    MOST_LOADED = "busiest"
    """The bottleneck. layer_chain: for every two consecutive layers, the pair of ranks with the
    largest flow times cost (MoETuner, arXiv 2502.06643). co_activation: at each level (domain,
    rank) the group that receives most, to which HierMoE's all-to-all pads the others (arXiv
    2508.09591)."""


class Robustness(StrEnum):
    """Aggregate of several workloads' imbalances."""

    MEAN = "mean"
    """Weighted mean of the workloads' imbalances."""
    WORST = "worst"
    """The largest of them."""
    CVAR = "cvar"
    """Mean over the worst `tail_ratio` of the weight."""


class Dispatch(StrEnum):
    """Dispatch rule: which replica of an expert a token copy goes to."""

    EVEN = "even"
    """Each replica gets the same share: EPLB's assumption, true on average."""
    STATIC = "static"
    """Own rank first, then own node, then a fixed choice per source rank (SGLang)."""
    DYNAMIC = "dynamic"
    """A random replica per token; with an all-to-all backend near ones first."""
    LP = "lp"
    """Shares that a linear program chooses for each pass (LPLB)."""
    LEAST_LOADED = "least_loaded"
    """Load above the mean goes to idle ranks, with a copy of the expert's weights (LLEP); not in
    any supported engine."""


class RecordedWorkload(Record):
    """One recorded workload."""

    name: Name
    """Name in plans and reports."""
    path: FilePath
    """A stored recording, or that of an engine; see `moetune profile import`."""
    weight: Weight = 1.0
    """Share of the traffic, relative to the others."""


Slots = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100_000)], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]


class PlaceGoal(Record):
    """A placement of experts on expert-parallel ranks."""

    kind: Literal["place"]
    """Always `place`."""
    objective: Objective = Objective.BALANCE
    method: Method = Method.AUTO
    """The algorithm; a method that does not serve the objective is refused."""
    traffic: TrafficObjective | None = None
    """Traffic that objectives co_activation and layer_chain minimise. `total`: every token copy at
    the cost of its path. `busiest`: the bottleneck, for layer_chain the pair of ranks with the
    largest flow times cost (MoETuner), for co_activation the group that receives most at each
    level, domains and ranks (HierMoE). Absent: the total. The cost of a path comes from the
    profile's measured links, else `link_matrix`, else datasheet and `nic`."""
    ranks: Annotated[Count, Field(le=MOST_RANKS)]
    """Expert-parallel ranks."""
    ranks_per_node: Count | None = None
    """Ranks of one machine; absent: the devices per machine of the first pool, or all ranks if no
    cluster is named."""
    slots_per_rank: Slots | None = None
    """Expert slots of a rank in a layer: one number, or one for each rank."""
    redundant_experts: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Slots beyond one per expert, over all ranks; an alternative to `slots_per_rank`."""
    rank_speeds: Annotated[tuple[Speed, ...], Field(min_length=1)] | None = None
    """Relative speed of each rank; absent: all equal."""
    expert_groups: Count | None = None
    """Expert groups of group-limited routing (DeepSeek-V3: 8); for EPLB's hierarchical policy and
    for node-limited routing."""
    robust: Robustness = Robustness.MEAN
    tail_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Share of the weight, under `robust: cvar`, whose worst imbalances are averaged."""
    workloads: Annotated[tuple[RecordedWorkload, ...], Field(min_length=1)]
    dispatch: Annotated[
        Dispatch | None,
        former("activated", "no engine has the rule; take dynamic, or least_loaded without emit"),
    ] = None
    """Dispatch rule for replicas; absent: of the rules of the first target of `emit` with the
    backend, the one with the least expected maximum load (`moetune plan` gives the cost of the
    others)."""
    a2a_backend: Name | None = None
    """All-to-all backend of the deployment by the engine's name, `none` for none: it determines the
    available dispatch rules (tuner/catalog/place_rules.py). Absent: SGLang's `deepep`, or `none`
    where `dispatch` is dynamic or even."""
    phase: Literal["prefill", "decode"] = "prefill"
    """Phase of inference; in decode, experts get few tokens and are bound by reading weights."""
    tokens_per_pass: Count | None = None
    """Tokens of one pass over all ranks; absent: as recorded, if passes were."""
    context_tokens: Count = 4096
    """Context length of a request, for the experts' share of a whole pass."""
    quantization: Literal["bf16", "fp8"] = "bf16"
    """Precision of the experts' GEMMs."""
    exchange: Literal["plain", "merged"] = "plain"
    """Rule by which the all-to-all sends tokens: `plain`, a copy for every expert, or `merged`,
    once to each rank and node (DeepEP), which objective co_activation implies."""
    judge_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the recorded passes, the last ones, that are held out to evaluate the plan."""
    traffic_slack_ratio: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """Share by which the largest rank load may exceed EPLB's if traffic is the objective."""
    current: FilePath | None = None
    """The current placement: plan.json, or a file of an engine; absent: experts in order."""
    max_moved_experts: Annotated[int, Field(ge=0)] | None = None
    """Largest number of experts, over all layers, that ranks may have to load."""
    max_moved_bytes: Bytes | None = None
    """Most bytes of expert weights, over all layers, that ranks may have to load; needs `model`."""
    rebalance_interval: PositiveSeconds | None = None
    """Time that the placement will be in use, to compare with the break-even time."""

    @property
    def is_merged(self) -> bool:
        """Tokens are sent once to each rank and node, as objective co_activation implies."""
        return self.exchange == "merged" or self.objective is Objective.CO_ACTIVATION

    @property
    def is_about_traffic(self) -> bool:
        """Return whether the objective is traffic, rather than load or time."""
        return self.objective in (Objective.CO_ACTIVATION, Objective.LAYER_CHAIN)

    @property
    def traffic_unit(self) -> str:
        """The unit of mean traffic costs: a chain follows each copy of a token."""
        return "a token copy" if self.objective is Objective.LAYER_CHAIN else "a token"

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        refused = method_refusal(self.method, self.objective.value)
        if refused is not None:
            raise ValueError(refused)
        names = [workload.name for workload in self.workloads]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two workloads are named {twice[0]!r}; give each its own name")
        if self.ranks_per_node is not None and self.ranks % self.ranks_per_node:
            raise ValueError(
                f"ranks {self.ranks} is no multiple of ranks_per_node {self.ranks_per_node}"
            )
        if self.traffic is not None and not self.is_about_traffic:
            raise ValueError(
                f"traffic {self.traffic.value!r} with objective {self.objective.value!r}, which has"
                " no traffic; plan for co_activation or layer_chain, or drop it"
            )
        if self.slots_per_rank is not None and self.redundant_experts is not None:
            raise ValueError("slots_per_rank and redundant_experts say the same; keep one")
        for name in ("slots_per_rank", "rank_speeds"):
            values = getattr(self, name)
            if values is not None and len(values) not in (1, self.ranks):
                raise ValueError(f"{name}: {len(values)} values for {self.ranks} ranks")
        if self.current is None and (self.max_moved_experts, self.max_moved_bytes) != (None, None):
            raise ValueError("a limit on moved experts needs 'current', the current placement")
        return self
