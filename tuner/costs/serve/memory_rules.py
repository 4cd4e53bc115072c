"""How each engine sizes its KV cache, by release.

    V memory that CUDA shows    W weights    S what steps take: activations, graphs, buffers
    C context and communicators    r the share that a launch states, or the engine's own

    share of the device    cache = r V - W - S       vLLM: a profiling step measures S
    share of what is free  cache = r (V - C) - W     SGLang: S must fit in what is left, or the
                                                     server runs out of memory once it works
    share of what is left  cache = r (V - C - W - S) TensorRT-LLM: a profiling step measures S

Sources: vLLM 0.33.0 `v1/worker/gpu_worker.py`, `determine_available_memory`, and `config/cache.py`
(0.92; 0.9 in releases up to 0.11); SGLang 0.5.23 `mem_cache/kv_cache_configurator.py`,
`_profile_available_bytes`; TensorRT-LLM `llmapi/llm_args.py`, `free_gpu_memory_fraction`.

vLLM takes `kv_cache_memory_bytes` instead of a share where a launch states it, whatever its steps
then lack. It also ends where the cache does not hold one request of `max_model_len` (0.33.0,
`v1/core/kv_cache_utils.py`, `_check_enough_kv_cache_memory`).

Releases of vLLM differ in what they measure. The first profiled steps before 0.21 left CUDA graphs
out (`VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`), sorted whole logits in the sampler, and took the
first look at free memory before communicators were made, so that those counted. Where a release
between was not read, the older rule is taken up to 0.20.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from tuner.costs.serve.engine import ServingEngine


class MemoryFractionKind(StrEnum):
    """What an engine's share of memory is a share of."""

    OF_DEVICE = "of the device"
    OF_FREE = "of what is free before weights are loaded"
    OF_LEFT = "of what weights and steps leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """One engine from one release on."""

    since: tuple[int, ...]
    share: MemoryFractionKind
    ratio: float | None
    """Where a launch states none; None: what the engine's own reserve leaves."""
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


RULES: Final[Mapping[ServingEngine, tuple[MemoryRule, ...]]] = MappingProxyType(
    {
        ServingEngine.VLLM: (
            MemoryRule(
                since=(0, 21),
                share=MemoryFractionKind.OF_DEVICE,
                ratio=0.92,
                sampler_bytes=14.0,
                counts_graphs=True,
                wants_whole_length=True,
                graphs_per_size=2,
            ),
            MemoryRule(
                since=(0,),
                share=MemoryFractionKind.OF_DEVICE,
                ratio=0.9,
                sampler_bytes=38.0,
                counts_communicators=True,
                wants_whole_length=True,
            ),
        ),
        ServingEngine.SGLANG: (
            MemoryRule(
                since=(0,),
                share=MemoryFractionKind.OF_FREE,
                ratio=None,
                sampler_bytes=12.0,
                window_pool_ratio=0.8,
            ),
        ),
        ServingEngine.TRTLLM: (
            MemoryRule(since=(0,), share=MemoryFractionKind.OF_LEFT, ratio=0.9, sampler_bytes=22.0),
        ),
    }
)
"""The newest first. Bytes of a logit, counted from the engines' samplers:

- vLLM up to 0.20: bf16 and fp32 logits (2 + 4), and in `torch.sort` its values and indices (4 + 8),
  the indices that it starts from (8) and the scratch of a segmented radix sort of pairs (4 + 8;
  PyTorch, aten/src/ATen/native/cuda/SortStable.cu, `segmented_sort_pairs`).
- vLLM from 0.21: bf16 and fp32 logits, probabilities and the exponential draws they are divided by
  (2 + 4 + 4 + 4; `v1/sample/ops/topk_topp_sampler.py`).
- SGLang: gathered logits in bf16 twice (2 + 2), in fp32, and probabilities (4 + 4;
  `layers/logits_processor.py`, `layers/sampler.py`).
- TensorRT-LLM: logits, as fp32, probabilities, sorted, order (2 + 4 + 4 + 4 + 8)."""


def memory_rule(engine: ServingEngine, release: str = "") -> MemoryRule:
    """Return the rule of a release; of the newest where none or no number is named."""
    rules = RULES[engine]
    number = _numbers(release)
    if not number:
        return rules[0]
    return next((rule for rule in rules if rule.since <= number), rules[-1])


def _numbers(release: str) -> tuple[int, ...]:
    """Leading numbers of a release: `0.10.1rc2` is 0, 10, 1."""
    numbers: list[int] = []
    for part in release.strip().lstrip("v").split(".")[:3]:
        digits = part[: next((at for at, sign in enumerate(part) if not sign.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits[:6]))
    return tuple(numbers)
