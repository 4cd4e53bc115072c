"""Traits of a serving engine: batching, admission and memory; `TRAITS` of its capabilities."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Final, Literal

from tuner.devices.datasheet import Generation, Vendor
from tuner.spec.model import ModelSpec


class Batching(StrEnum):
    """Rule by which prompts and running sequences share steps."""

    CHUNKED = "chunked"
    """Parts of prompts fill what running sequences leave of a step's token budget (vLLM)."""
    WHOLE = "whole"
    """Whole prompts join running sequences (TensorRT-LLM)."""
    PREFILL_FIRST = "prefill_first"
    """While prompts wait, nothing else runs (SGLang)."""


class MemoryFractionKind(StrEnum):
    """Base of an engine's share of memory."""

    OF_DEVICE = "of the device"
    OF_FREE = "of what is free before weights are loaded"
    OF_LEFT = "of what weights and steps leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """States of linear attention as an engine keeps them."""

    per_request: int = 1
    """States that a running request holds at most, those of drafts apart."""
    bf16_architectures: frozenset[str] = frozenset()
    """Models whose states are in bf16; others' are in fp32."""

    def element_bytes(self, architecture: str) -> float:
        """Bytes of an element of a state."""
        return 2.0 if architecture in self.bf16_architectures else 4.0

    @property
    def sent(self) -> "StateRule":
        """The one state that a finished prompt leaves."""
        return replace(self, per_request=1)


ONE_STATE: Final = StateRule()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRule:
    """One pool of blocks for all layers (tuner/costs/serve/cache_groups.py)."""

    overlaps_steps: bool = True
    """A step is scheduled before the one ahead of it has ended, so that the tokens of both are in
    flight, of a pipeline those of a step more than it has stages."""
    logs_groups: bool = False
    """The log has the tokens of all blocks, shared evenly by the groups; else those of the longest
    requests, as many as have room."""

    def in_flight_tokens(self, step_tokens: int, *, stages: int) -> int:
        """Tokens that are scheduled and not settled, at most."""
        return step_tokens * (stages + 1 if self.overlaps_steps else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGraphs:
    """Launches whose steps with prompts have graphs, from one release of an engine on.

    None has them without CUDA, through stages, with context ranks or in two halves.
    """

    since: tuple[int, ...]
    """Release from which on it is so."""
    eager_mixers: frozenset[str] = frozenset()
    """Kinds of token mixers without graphs of prompts."""
    eager_models: Mapping[str, frozenset[Generation]] = field(default_factory=dict)
    """Devices on which models of a class have none."""
    vision_models: frozenset[str] = frozenset()
    """Classes of models with a vision tower that have them."""
    data_ranks: bool = True
    """Attention data ranks have them."""
    dispatches: bool = True
    """Launches that send tokens to their experts by DeepEP have them."""
    drafts: bool = True
    """Launches with drafts have them."""
    latent_tokens: float = math.inf
    """Tokens of the largest step of latent attention that a graph holds."""

    def hold(
        self,
        architecture: str,
        mixers: Collection[str],
        *,
        device: Generation,
        data_ranks: int,
        dispatches: bool,
        drafts: bool,
    ) -> bool:
        """Say whether a launch's steps with prompts have graphs."""
        has_vision = architecture.endswith(VISION_SUFFIX) and architecture not in WITHOUT_VISION
        return not (
            (data_ranks > 1 and not self.data_ranks)
            or (dispatches and not self.dispatches)
            or (drafts and not self.drafts)
            or (has_vision and architecture not in self.vision_models)
            or device in self.eager_models.get(architecture, ())
            or device.vendor is not Vendor.NVIDIA
            or any(mixer in self.eager_mixers for mixer in mixers)
        )


class ExpertKernels(StrEnum):
    """Kernels of routed experts that a device has a choice of."""

    USUAL = ""
    """Kernels that most engines run on the device."""
    GENERATED = "generated"
    """TensorRT-LLM's for Blackwell, routing among them."""
    PORTABLE = "portable"
    """Triton's and Marlin's, which were not made for Blackwell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKernels:
    """Kernels that layers run, from one release of an engine on."""

    since: tuple[int, ...] = (0,)
    """Release from which on it is so."""
    all_reduce: str = ""
    """Engine whose all-reduce of small buffers it runs; empty: its own."""
    fused_norms: Mapping[str, frozenset[Generation]] = field(default_factory=dict)
    """Devices, by class of the model, on which an all-reduce of TensorRT-LLM holds the norm behind
    it: on one node, without attention data ranks and without dispatch of tokens."""
    torch_routing: frozenset[tuple[str, int]] = frozenset()
    """Classes of models and numbers of experts that PyTorch's kernels route to on CUDA."""
    portable_experts: frozenset[str] = frozenset()
    """Formats of experts that Triton's or Marlin's kernels multiply on Blackwell."""
    generated_experts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Formats of a class's experts, of all under an empty name, that TensorRT-LLM's generated
    kernels, which route themselves, multiply there instead."""
    latent_kernels: int = 0
    """Small kernels of compressed attention (MLA) beside the norm before it."""
    delta_kernels: Mapping[str, int] = field(default_factory=dict)
    """Kernels of a delta rule's mixer beside its norms, two GEMMs before it and one behind, its
    convolution and its update, by class of the model."""

    def expert_kernels(self, architecture: str, dtype: str, device: Generation) -> ExpertKernels:
        """Return whose kernels multiply experts."""
        generated = self.generated_experts
        if device is not Generation.BLACKWELL:
            return ExpertKernels.USUAL
        if dtype in generated.get(architecture, generated.get("", ())):
            return ExpertKernels.GENERATED
        is_portable = dtype in self.portable_experts
        return ExpertKernels.PORTABLE if is_portable else ExpertKernels.USUAL


VISION_SUFFIX: Final = "ForConditionalGeneration"
"""End of the names of models with a vision tower, in transformers."""
WITHOUT_VISION: Final = frozenset({"Llama4ForConditionalGeneration"})
"""Models whose vision tower engines leave out unless they are asked for it (`mm_disabled_models` of
SGLang 0.5.23, configs/model_config.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """Rule by which an engine sizes its KV cache, from one release on.

    V memory that CUDA shows    W weights    S what steps take: activations, graphs, buffers
    C context and communicators    r the share that a launch states, or the engine's own

    share of the device    cache = r V - W - S        a profiling step measures S
    share of what is free  cache = r (V - C) - W      S must fit in what is left, or the server runs
                                                      out of memory once it works
    share of what is left  cache = r (V - C - W - S)  a profiling step measures S
    """

    since: tuple[int, ...] = (0,)
    share: MemoryFractionKind
    ratio: float | None
    """Share where a launch states none; None: `own_memory_ratio` of the engine's read.py."""
    sampler_bytes: float
    """Bytes of one logit of one sequence, at the sampler's peak."""
    draft_bytes: float | None = None
    """The same of one logit of a draft, of which the profiling step checks one a sequence, however
    many are drafted; None: `sampler_bytes` of all that are."""
    counts_graphs: bool = False
    """CUDA graphs are measured before the cache is made."""
    counts_communicators: bool = False
    """Communicators are measured before the cache is made, too."""
    window_pool_ratio: float | None = None
    """Tokens of the pool of windowed layers over those of the others; None: pages of both come from
    one pool, and a request holds its window."""
    entry_window_pool_ratio: float | None = None
    """`window_pool_ratio` of models whose other pool holds the entries of compressors."""
    wants_whole_length: bool = False
    """The server ends unless one request of the longest length has room."""
    wants_state_blocks: bool = False
    """The server ends unless each sequence of whole graphs has a block for its state."""
    states: StateRule = ONE_STATE
    blocks: BlockRule | None = None
    """Pool of blocks for all layers; None: each kind of layer has a pool of its own."""
    sizes_plain_sparse: bool = False
    """An fp8 cache of sparse attention gets room for a byte an element, whatever it then takes."""
    gathers_sparse: bool = False
    """Prompts of sparse attention gather keys of whole requests in bf16."""
    allocates_late: bool = False
    """The profiled step holds one prompt. Once the cache is made the sampler sees a full batch, and
    graphs with their logits and buffers of cache transfers are made again beside the first ones."""
    compiles: bool = False
    """Steps without graphs are compiled, so that a layer's input is freed inside it."""
    graphs_per_size: int = 1
    """Graphs of each captured batch: for vLLM a whole one and one in pieces."""
    mxfp4_multiples: Mapping[Generation, tuple[int, int]] = field(default_factory=dict)
    """`EngineTraits.mxfp4_multiples` of devices for which the release has other kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One engine; its seconds are from public benchmarks of releases of 2025 and early 2026."""

    name: str
    """Name in `goal.engine.name`."""
    batching: Batching
    step_tokens: int
    """Token budget of a step that holds prompts, in the InferenceX recipes
    (github.com/SemiAnalysisAI/InferenceX, benchmarks/)."""
    scheduler_s: float
    """Seconds between two steps, beyond the sum of their kernels."""
    prompt_scheduler_ratio: float = 2.0
    """Factor on `scheduler_s` where a step holds prompts, which no CUDA graph covers."""
    graphs_in_pieces: frozenset[Vendor] = frozenset()
    """Devices on which the host launches attention between the graphs of a decode step."""
    waits_for_host: bool = False
    """Steps with prompts and without a graph take as long as the host needs to launch them."""
    prompt_graphs: tuple[PromptGraphs, ...] = ()
    """Graphs of steps with prompts, the newest release first; an older one has none."""
    stream_s: float = 0.0
    """Seconds of the server's one process for a token that it streams: less than its fastest
    published run with chats that all begin at once, whose steps take some of them. Others take up
    to twice as long."""
    streams_by_rank: bool = True
    """Each attention-data rank has a process that streams; else one process serves all ranks."""
    compiles_layers: bool = False
    """Layers without a graph are compiled, where the device's vendor has a compiler."""
    graph_tokens: int = 0
    """Tokens of the largest step with prompts that a graph holds where others are without."""
    untuned_experts: frozenset[tuple[Vendor, str]] = frozenset()
    """Vendors and formats of weights for which the engine ships no tuned kernels of experts."""
    exposed_host_s: float = 0.0
    """Host work of a step that nothing hides where NCCL sends over the network: a CUDA graph holds
    a call of the host before each such collective or message (NCCL, src/enqueue.cc,
    `hostStreamPlanCallback`; inside a domain none, NVIDIA/nccl, issue 1805), and its launch blocks
    for about as long as the devices work (meta-pytorch/torchcomms, pull request 3152), so that
    schedulers which else work beside the devices wait. TensorRT-LLM's does not: of
    eight published runs with TP 16 on 2 x 8 H100 seven are within 16 % of their kernels."""
    reserves_output: bool = True
    """A request is admitted where its whole output has room too, beside all that run. Else
    pages are taken as outputs grow, and where there are none left the newest request is preempted
    and recomputed."""
    draft_gaps_s: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Seconds of the host between two steps with drafts, beyond `scheduler_s`, once it knows which
    of them were kept; by the release from which it is so, the newest first."""
    layer_kernels: tuple[LayerKernels, ...] = (LayerKernels(),)
    """Kernels of layers, the newest release first."""
    indexer_kernels: tuple[tuple[tuple[int, ...], int], ...] = (((0,), 4),)
    """Kernels of an indexer beside its GEMMs, scores and attention: norms, angles, rotations,
    scales, caching, the choice; by the release from which on, the newest first. SGLang 0.5.14's
    whole module takes 8 to 25 us longer on H200 than its other parts (aiconfigurator-core)."""
    aligns_prompts: bool = False
    """Attention-data ranks wait until all of them have prompts, and read them in one step."""
    client_s: float = 15e-3
    """Seconds of a request in HTTP server, tokeniser and client, as published launches show
    them."""
    memory: tuple[MemoryRule, ...]
    """The newest release first."""
    shares_networks: bool = False
    """Dense and shared networks and the head are parted among all ranks under attention data
    parallelism, too, where experts are not dispatched to."""
    mxfp4_multiples: tuple[int, int] | None = None
    """Multiples that the hidden and the expert width of a rank are padded to, for mxfp4 experts;
    None: they are not padded."""
    spoilt_gemms: frozenset[str] = frozenset()
    """Types whose measured GEMMs hold more than the kernel (tuner/prices/serve/tables.py)."""
    multiplies_fp8_caches: bool = False
    """Attention of running sequences multiplies fp8 caches as they are; else they are converted."""
    computes_zero_copies: bool = False
    """Copies for experts without weights are dispatched and computed all the same, by expert 0 with
    weight 0 (tuner/costs/serve/zero_experts.py)."""
    fp8_caches: Mapping[str, frozenset[Generation]] = field(default_factory=dict)
    """Devices, by class of the model, on which a cache of type `auto` is fp8, whatever the
    checkpoint asks for."""
    plain_sparse_since: Mapping[Generation, tuple[int, ...]] = field(default_factory=dict)
    """Release from which a device's fp8 cache of sparse attention has a byte an element, no more;
    of other devices it also has scales and bf16 positions."""
    scaled_rotary: frozenset[str] = frozenset()
    """Classes of models whose table of angles has a row for every position times the factor that
    they are scaled by, in fp32, beside one of the positions alone."""
    has_context: bool = False
    """Tensor ranks can share the positions of a cache (decode context parallelism)."""
    shares_side_caches: bool = False
    """Context ranks share an indexer's keys and a drafter's cache, too; else these are whole."""
    experts_like: Mapping[tuple[str, Generation], str] = field(default_factory=dict)
    """Engine whose table holds other expert kernels that this one chooses from, by type and
    device."""

    def auto_cache(self, model: ModelSpec, generation: Generation | None) -> Literal["bf16", "fp8"]:
        """Return the type that a cache of type `auto` has."""
        is_fp8 = generation in self.fp8_caches.get(model.architecture, ())
        return "fp8" if is_fp8 else model.released_cache

    def cache_word(self, model: ModelSpec, *, dtype: str, word: str) -> str:
        """Return an option's value for a cache of that type, where `word` leaves bf16 to `auto`.

        DeepSeek-V4 keeps it: its windows and entries are fp8 whatever a plan says.
        """
        is_sure = model.released_cache == "bf16" and model.architecture not in self.fp8_caches
        if dtype != "bf16" or is_sure or model.attention.kind == "shared_kv":
            return word
        return "bfloat16"

    def rank_stream_s(self, ranks: int) -> float:
        """Return the seconds in which a token of every rank's sequence is streamed."""
        return self.stream_s * (1 if self.streams_by_rank else ranks)

    def packs_sparse(self, generation: Generation, release: str = "") -> bool:
        """Say whether an fp8 cache of sparse attention has scales and bf16 positions, too."""
        since, number = self.plain_sparse_since.get(generation), _numbers(release)
        return since is None or (bool(number) and number < since)

    def draft_gap_s(self, release: str = "") -> float:
        """Return a release's seconds of `draft_gaps_s`; the newest's where no number is named."""
        return _of_release(self.draft_gaps_s, release)

    def indexer_launches(self, release: str = "") -> float:
        """Return a release's count of `indexer_kernels`; the newest's where no number is named."""
        return _of_release(self.indexer_kernels, release)

    def kernels(self, release: str = "") -> LayerKernels:
        """Return a release's kernels of layers; the newest's where no number is named."""
        number = _numbers(release)
        since = (row for row in self.layer_kernels if not number or row.since <= number)
        return next(since, self.layer_kernels[-1])

    def graphs_of_prompts(self, release: str = "") -> PromptGraphs | None:
        """Return those of a release; of the newest where none or no number is named."""
        number = _numbers(release)
        since = (graphs for graphs in self.prompt_graphs if not number or graphs.since <= number)
        return next(since, None)

    def memory_rule(self, release: str = "") -> MemoryRule:
        """Return the rule of a release; of the newest where none or no number is named."""
        number = _numbers(release)
        if not number:
            return self.memory[0]
        return next((rule for rule in self.memory if rule.since <= number), self.memory[-1])


def _of_release(stated: tuple[tuple[tuple[int, ...], float], ...], release: str) -> float:
    number = _numbers(release)
    return next((value for since, value in stated if not number or since <= number), 0.0)


@lru_cache(maxsize=64)
def _numbers(release: str) -> tuple[int, ...]:
    """Leading numbers of a release: `0.10.1rc2` is 0, 10, 1."""
    numbers: list[int] = []
    for part in release.strip().lstrip("v").split(".")[:3]:
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits[:6]))
    return tuple(numbers)
