"""The goal `place`: where experts should stand, for which recorded workloads."""

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from profilers.records import Record
from tuner.spec.fields import Bytes, Count, FilePath, Name, Number, PositiveSeconds, one_or_many
from tuner.spec.place_method import Method, method_refusal

MOST_RANKS = 4096

Weight = Annotated[Number, Field(ge=1e-6, le=1e6)]
"""Further apart, a workload or rank counts for nothing beside the rounding of the others."""
Speed = Annotated[Number, Field(ge=1e-3, le=1e3)]


class Objective(StrEnum):
    """What is made small; each holds for the runtime that it names."""

    BALANCE = "balance"
    """Largest rank load of every layer: runtimes that wait for the slowest rank."""
    CO_ACTIVATION = "co_activation"
    """Ranks and nodes that a token's experts stand on: dispatches that send a token once to each
    rank or node (DeepEP, HybridEP)."""
    LAYER_CHAIN = "layer_chain"
    """Way from a token's expert to its expert in the next layer: runtimes that leave a token where
    its last expert was (MoETuner)."""
    LAYER_TIME = "layer_time"
    """Predicted seconds of the expert layers: products of the busiest rank, weights read by active
    experts, and the exchange; needs `model` and `cluster`."""


class Traffic(StrEnum):
    """What of the traffic is made small, for objectives co_activation and layer_chain."""

    TOTAL = "total"
    """Every token copy, at the cost of its way."""
    BUSIEST = "busiest"
    """What the others wait for. layer_chain: of every two layers the pair of ranks with the largest
    flow times cost (MoETuner, arXiv 2502.06643). co_activation: at each level (domain, rank) the
    group that gets most, to which HierMoE's all-to-all pads the others (arXiv 2508.09591)."""


class Robustness(StrEnum):
    """How several workloads become one number."""

    MEAN = "mean"
    """Weighted mean of the workloads' imbalances."""
    WORST = "worst"
    """The largest of them."""
    CVAR = "cvar"
    """Mean over the worst `tail_ratio` of the weight."""


class Dispatch(StrEnum):
    """Which replica of an expert a token copy goes to."""

    EVEN = "even"
    """Each replica gets the same share: EPLB's assumption, true on average."""
    STATIC = "static"
    """Own rank first, then own node, then a fixed choice per source rank (SGLang)."""
    DYNAMIC = "dynamic"
    """Any replica at random, token by token; beside an all-to-all backend near ones first."""
    LP = "lp"
    """Shares that a linear program chooses for each pass (LPLB)."""
    LEAST_LOADED = "least_loaded"
    """What a rank has beyond the mean goes to idle ranks, with a copy of the expert's weights
    (LLEP); in no engine that is written for."""
    ACTIVATED = "activated"
    """All tokens of an expert on one replica, on the rank that reads fewest experts so far (Janus'
    scheduler, for decode); in no engine that is written for."""


class Workload(Record):
    """One recorded workload."""

    name: Name
    """What plans and reports call it."""
    path: FilePath
    """A stored recording, or an engine's own; see `moetune profile import`."""
    weight: Weight = 1.0
    """Share of the traffic, relative to the others."""


Slots = Annotated[
    tuple[Annotated[int, Field(ge=1, le=100_000)], ...],
    Field(min_length=1),
    BeforeValidator(one_or_many),
]


def _no_list(value: Any) -> Any:
    if value is None:
        raise ValueError("no workload; name at least one recording")
    return value


class PlaceGoal(Record):
    """A placement of experts on expert-parallel ranks."""

    kind: Literal["place"]
    """Always `place`."""
    objective: Objective = Objective.BALANCE
    method: Method = Method.AUTO
    """What chooses the placement; a method that does not serve the objective is refused."""
    traffic: Traffic | None = None
    """What objectives co_activation and layer_chain make small. `total`: every token copy at the
    cost of its way. `busiest`: what the others wait for, of a layer chain the pair of ranks with
    the largest flow times cost (MoETuner), of co-activation the group that gets most at each level,
    domains and ranks (HierMoE). Absent: the total. The cost of a way comes from the profile's
    measured links, else `link_matrix`, else datasheet and `nic`."""
    ranks: Annotated[Count, Field(le=MOST_RANKS)]
    """Expert-parallel ranks."""
    ranks_per_node: Count | None = None
    """Ranks of one machine; absent: as many as the first pool's machines have devices, all of them
    where no cluster is named."""
    slots_per_rank: Slots | None = None
    """Experts that a rank holds in a layer: one number, or one for each rank."""
    redundant_experts: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Slots beyond one an expert, over all ranks; another way to say `slots_per_rank`."""
    rank_speeds: Annotated[tuple[Speed, ...], Field(min_length=1)] | None = None
    """Relative speed of each rank; absent: all alike."""
    expert_groups: Count | None = None
    """Groups of experts that are routed to together (DeepSeek-V3: 8); for EPLB's hierarchical rule
    and for node-limited routing."""
    robust: Robustness = Robustness.MEAN
    tail_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Of `robust: cvar`: share of the weight whose worst imbalances are averaged."""
    workloads: Annotated[tuple[Workload, ...], Field(min_length=1), BeforeValidator(_no_list)]
    dispatch: Dispatch | None = None
    """What the engine does with replicas; absent: of what the first target of `emit` offers beside
    the backend, the rule of the least expected maximum (`moetune plan` says what others cost)."""
    a2a_backend: Name | None = None
    """All-to-all backend of the deployment by the engine's own name, `none` for none: it says which
    dispatch rules there are (tuner/spec/place_targets.py). Absent: SGLang's `deepep`, or `none`
    where `dispatch` is dynamic or even."""
    phase: Literal["prefill", "decode"] = "prefill"
    """In decode few tokens reach an expert, and reading its weights takes the time."""
    tokens_per_pass: Count | None = None
    """Tokens of one pass over all ranks; absent: as recorded, where passes were."""
    context_tokens: Count = 4096
    """Tokens that a request's attention looks back on, for the experts' share of a whole pass."""
    quantization: Literal["bf16", "fp8"] = "bf16"
    """What the experts' GEMMs compute in."""
    exchange: Literal["plain", "merged"] = "plain"
    """How the all-to-all sends tokens: `plain`, a copy for every expert, or `merged`, once to each
    rank and node (DeepEP), which objective co_activation implies."""
    judge_ratio: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the recorded passes, the last ones, that are held out and judge the plan."""
    traffic_slack_ratio: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    """How much more than EPLB's rule the largest rank may carry where traffic is the objective."""
    current: FilePath | None = None
    """The placement that runs: plan.json, or a file of an engine; absent: experts in order."""
    max_moved_experts: Annotated[int, Field(ge=0)] | None = None
    """Largest number of experts, over all layers, that ranks may have to load."""
    max_moved_bytes: Bytes | None = None
    """The same as bytes of weights; needs `model`."""
    rebalance_interval: PositiveSeconds | None = None
    """How long the placement will run, to compare with the break-even time."""

    @property
    def is_merged(self) -> bool:
        """Tokens travel once to each rank and node, as they do where co-activation counts."""
        return self.exchange == "merged" or self.objective is Objective.CO_ACTIVATION

    @property
    def is_about_traffic(self) -> bool:
        """Whether ways of tokens are made short, rather than loads or times."""
        return self.objective in (Objective.CO_ACTIVATION, Objective.LAYER_CHAIN)

    @property
    def traffic_is_of(self) -> str:
        """What a cost of traffic is the mean over: a chain follows each copy of a token."""
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
                f"traffic {self.traffic.value!r} with objective {self.objective.value!r}, which is"
                " about no traffic; plan for co_activation or layer_chain, or drop it"
            )
        if self.slots_per_rank is not None and self.redundant_experts is not None:
            raise ValueError("slots_per_rank and redundant_experts say the same; keep one")
        for name in ("slots_per_rank", "rank_speeds"):
            values = getattr(self, name)
            if values is not None and len(values) not in (1, self.ranks):
                raise ValueError(f"{name}: {len(values)} values for {self.ranks} ranks")
        if self.current is None and (self.max_moved_experts, self.max_moved_bytes) != (None, None):
            raise ValueError("a limit on moved experts needs 'current', the placement that runs")
        return self
