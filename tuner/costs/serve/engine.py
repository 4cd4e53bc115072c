"""What an engine does beside its kernels: batching, scheduler time, admission.

The seconds of the scheduler and the small kernels are the ones that measured steps show beyond the
sum of their kernels on public benchmarks; they belong to releases of 2025 and early 2026.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class ServingEngine(StrEnum):
    """Serving engines."""

    VLLM = "vllm"
    SGLANG = "sglang"
    TRTLLM = "trtllm"


class Batching(StrEnum):
    """How prompts and running sequences share steps."""

    CHUNKED = "chunked"
    """Parts of prompts fill what running sequences leave of a step's token budget (vLLM)."""
    WHOLE = "whole"
    """Whole prompts join running sequences (TensorRT-LLM)."""
    PREFILL_FIRST = "prefill_first"
    """While prompts wait, nothing else runs (SGLang)."""


class A2aBackend(StrEnum):
    """How tokens of attention-data ranks reach their experts."""

    LEAST = "least"
    """Whatever is fastest at each size; for launches that do not say."""
    ALLGATHER = "allgather"
    """Every rank gathers all tokens; results are summed and scattered."""
    NORMAL = "deepep_normal"
    """Copies go to their experts by DeepEP's kernels for many tokens."""
    LOW_LATENCY = "deepep_low_latency"
    """By its kernels for few, and by the others where a step has more than their buffers hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTraits:
    """One engine."""

    batching: Batching
    step_tokens: int
    """Token budget of a step that holds prompts."""
    scheduler_s: float
    """Between two steps."""
    prompt_scheduler_ratio: float = 2.0
    """Factor on it where a step holds prompts, which no CUDA graph covers."""
    reserves_output: bool = True
    """A request is admitted where its whole output has room too, beside all that run. Else
    pages are taken as outputs grow, and where there are none left the newest request is preempted
    and recomputed."""


TRAITS: Final[Mapping[ServingEngine, EngineTraits]] = MappingProxyType(
    {
        ServingEngine.VLLM: EngineTraits(
            batching=Batching.CHUNKED,
            step_tokens=8192,
            scheduler_s=1.0e-3,
            reserves_output=False,
        ),
        ServingEngine.SGLANG: EngineTraits(
            batching=Batching.PREFILL_FIRST, step_tokens=16384, scheduler_s=0.5e-3
        ),
        ServingEngine.TRTLLM: EngineTraits(
            batching=Batching.WHOLE,
            step_tokens=8192,
            scheduler_s=0.5e-3,
        ),
    }
)
"""Budgets are those of the InferenceX recipes (github.com/SemiAnalysisAI/InferenceX,
benchmarks/). Admission: vLLM 0.33.0 `v1/core/sched/scheduler.py` (allocate_slots for the tokens of
a step, `_preempt_request`); TensorRT-LLM's default policy GUARANTEED_NO_EVICT; SGLang 0.5.23
`managers/schedule_policy.py` sets `new_token_ratio` of what outputs may still grow by aside, which
is taken as all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceDegrees:
    """How one instance is split over devices."""

    attention_tensor: int = 1
    attention_data: int = 1
    moe_tensor: int = 1
    expert: int = 1
    pipeline: int = 1

    @property
    def devices(self) -> int:
        """Of one instance."""
        return self.attention_tensor * self.attention_data * self.pipeline
