"""The engines that there are: one folder each, and what its files must be called.

    capabilities.py   what its releases can launch; a training engine lists them in `TARGETS`
    write.py          its launch files: the function that a target names, `emit`
    read.py           launches of it as settings; `FORMATS` in capabilities.py names the readers
    metrics.py        `read`: step times in its output; `METRICS` in capabilities.py names it
    kv.py             pages and transfers of the KV caches of a serving engine

A serving engine has `TRAITS` and `RELEASES` in capabilities.py; `server` in write.py, and there
`command_files` where its command reads files, and `DYNAMO` where Dynamo has it; `SERVER`, `read`
and `knob_flags` in read.py. Its folder has the engine's name; a plugin has a folder of its own. An
engine that takes a placement has `PLACE_TARGET` in capabilities.py, and `emit` in placement.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final, get_args

from tuner.devices.datasheet import Generation
from tuner.engines.manifest import Capabilities
from tuner.engines.place_rules import PlaceTarget
from tuner.engines.serve_rules.manifest import ServingCapabilities
from tuner.spec.serving.goal import EngineName

TRAIN_ENGINES: Final = ("reference", "megatron_lm", "megatron_bridge", "torchtitan", "deepspeed")
"""Folders, in the order in which their targets are listed."""
SERVE_ENGINES: Final = (*get_args(EngineName), "vllm_afd", "vllm_ascend")
"""Folders; a release with a plugin comes after those without, so that it must be named."""


PLACE_ENGINES: Final = ("eplb", "megatron_lm")
"""Folders of others that take a placement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A release of a training engine that users name in `emit`."""

    capabilities: Capabilities
    family: str
    """Published runs that it resembles, for its residuals (tuner/search/train/regimes.py)."""
    software: str
    """Generation of that software, as `tuner.costs.train.constants.Software` names it."""
    runs_same_layers: bool = True
    """Those runs are of its own layers, so that their band holds for it."""
    emitter: str = "emit"
    """Function of write.py: (verified) -> tuple of EmittedFile."""

    @property
    def name(self) -> str:
        """The name that users type."""
        return self.capabilities.names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFormat:
    """One format of an engine's launch files."""

    name: str
    """As users choose it with --format."""
    suffixes: tuple[str, ...] = ()
    """Of files that have this format unless --format says otherwise; empty: by --format alone, and
    Megatron-LM's arguments for all other files (tuner/estimate/registry.py)."""
    reader: str = "read"
    """Function of read.py: (text, source=...) -> LaunchSettings."""


class Batching(StrEnum):
    """How prompts and running sequences share steps."""

    CHUNKED = "chunked"
    """Parts of prompts fill what running sequences leave of a step's token budget (vLLM)."""
    WHOLE = "whole"
    """Whole prompts join running sequences (TensorRT-LLM)."""
    PREFILL_FIRST = "prefill_first"
    """While prompts wait, nothing else runs (SGLang)."""


class MemoryFractionKind(StrEnum):
    """What an engine's share of memory is a share of."""

    OF_DEVICE = "of the device"
    OF_FREE = "of what is free before weights are loaded"
    OF_LEFT = "of what weights and steps leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """How an engine sizes its KV cache, from one release on.

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
    """Where a launch states none; None: `own_memory_ratio` of the engine's read.py."""
    sampler_bytes: float
    """Of one logit of one sequence, at the sampler's peak."""
    counts_graphs: bool = False
    """CUDA graphs are measured before the cache is made."""
    counts_communicators: bool = False
    """So are communicators."""
    window_pool_ratio: float | None = None
    """Tokens of the pool of windowed layers over those of the others; None: pages of both come from
    one pool, and a request holds its window."""
    wants_whole_length: bool = False
    """The server ends unless one request of the longest length has room."""
    graphs_per_size: int = 1
    """Graphs of each captured batch: for vLLM a whole one and one in pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One engine; its seconds are from public benchmarks of releases of 2025 and early 2026."""

    batching: Batching
    step_tokens: int
    """Token budget of a step that holds prompts, in the InferenceX recipes
    (github.com/SemiAnalysisAI/InferenceX, benchmarks/)."""
    scheduler_s: float
    """Between two steps, beyond the sum of their kernels."""
    prompt_scheduler_ratio: float = 2.0
    """Factor on it where a step holds prompts, which no CUDA graph covers."""
    reserves_output: bool = True
    """A request is admitted where its whole output has room too, beside all that run. Else
    pages are taken as outputs grow, and where there are none left the newest request is preempted
    and recomputed."""
    client_s: float = 15e-3
    """Of a request in HTTP server, tokeniser and client, as published launches show it."""
    memory: tuple[MemoryRule, ...]
    """The newest release first."""
    mxfp4_multiples: tuple[int, int] | None = None
    """What hidden and expert width of a rank are padded to, of mxfp4 experts; None: as they are."""
    spoilt_gemms: frozenset[str] = frozenset()
    """Types whose measured GEMMs hold more than the kernel (tuner/costs/serve/tables.py)."""
    experts_like: Mapping[tuple[str, Generation], str] = field(default_factory=dict)
    """By type and device: the engine whose table holds other expert kernels that this one chooses
    from."""

    def memory_rule(self, release: str = "") -> MemoryRule:
        """Return the rule of a release; of the newest where none or no number is named."""
        number = _numbers(release)
        if not number:
            return self.memory[0]
        return next((rule for rule in self.memory if rule.since <= number), self.memory[-1])


def _numbers(release: str) -> tuple[int, ...]:
    """Leading numbers of a release: `0.10.1rc2` is 0, 10, 1."""
    numbers: list[int] = []
    for part in release.strip().lstrip("v").split(".")[:3]:
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits[:6]))
    return tuple(numbers)


def engine_file(folder: str, name: str) -> ModuleType:
    """Import a file of an engine's folder."""
    return import_module(f"tuner.engines.{folder}.{name}")


def train_targets() -> Iterator[tuple[str, Target]]:
    """Yield every target of training with the folder of its engine."""
    for folder in TRAIN_ENGINES:
        for target in engine_file(folder, "capabilities").TARGETS:
            yield folder, target


def serve_releases() -> Iterator[ServingCapabilities]:
    """Yield every release of every serving engine, on any vendor's devices."""
    for folder in SERVE_ENGINES:
        yield from engine_file(folder, "capabilities").RELEASES


@cache
def serve_traits() -> Mapping[str, EngineTraits]:
    """Return every serving engine whatever its release, by the name users type."""
    return {name: engine_file(name, "capabilities").TRAITS for name in get_args(EngineName)}


def place_targets() -> Iterator[tuple[str, PlaceTarget]]:
    """Yield what every engine that takes a placement accepts, with its folder."""
    for folder in (*sorted(SERVE_ENGINES), *PLACE_ENGINES):
        target = getattr(engine_file(folder, "capabilities"), "PLACE_TARGET", None)
        if target is not None:
            yield folder, target


def launch_formats() -> Iterator[tuple[str, LaunchFormat]]:
    """Yield every format of launch files with the folder of its engine."""
    for folder in TRAIN_ENGINES:
        for one in getattr(engine_file(folder, "capabilities"), "FORMATS", ()):
            yield folder, one


def metrics_folders() -> Iterator[tuple[str, str]]:
    """Yield the name of every engine whose output is read, with its folder."""
    for folder in TRAIN_ENGINES:
        if name := getattr(engine_file(folder, "capabilities"), "METRICS", ""):
            yield name, folder
