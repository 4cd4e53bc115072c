"""Choices beside an instance's degrees: token budgets of a step, drafting, overlap, loads.

Budgets are of one attention-data rank: 2048 to 16384 tokens. Small ones keep the steps of running
sequences short, large ones prefill prompts in fewer steps; engines that take whole prompts unless
chunked prefill is on are priced both ways where a budget holds the longest request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

from tuner.catalog.serve_rules.traits import Batching, EngineTraits
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.speculative import Drafting
from tuner.search.serve.expert_copies import ExpertCopies

BUDGETS: Final = (2048, 4096, 8192, 16384)
"""Tokens of a step: what recipes of vLLM, SGLang and TensorRT-LLM set (`--max-num-batched-tokens`,
`--chunked-prefill-size`, `max_num_tokens`) spans this range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Tokens that a step with prompts may hold on one rank."""

    tokens: int
    is_chunked: bool
    """Prompts are split to fill it (chunked prefill)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Everything that is tried for each way to split an instance."""

    budgets: tuple[TokenBudget, ...]
    drafting: Drafting | None = None
    """The deepest drafting that is tried, beside fewer tokens and none; None: not tried."""
    a2a_backends: tuple[A2aBackend, ...] = (A2aBackend.LEAST,)
    """All-to-all backends that are tried with attention-data ranks; without, only the first."""
    overlapped: frozenset[A2aBackend] = frozenset()
    """Backends behind which the other half of a batch may compute, which is tried too."""
    copies: ExpertCopies = field(default_factory=ExpertCopies)
    """Recorded loads of experts, and whether an expert may have copies."""
    page_by_pool: Mapping[str, int] = field(default_factory=dict)
    """Tokens of a page, where it is not the engine's own."""
    is_spread: bool = False
    """Whether every stage of an instance is on a machine of its own (cells.py)."""

    def variants(
        self, degrees: InstanceDegrees
    ) -> Iterator[tuple[Drafting | None, A2aBackend, bool]]:
        """Yield drafting, the all-to-all, and whether two half batches overlap."""
        a2a_backends = self.a2a_backends if degrees.attention_data > 1 else (self.a2a_backends[0],)
        for drafting, a2a_backend in product(self._draftings(), a2a_backends):
            yield drafting, a2a_backend, False
            if degrees.attention_data > 1 and a2a_backend in self.overlapped:
                yield drafting, a2a_backend, True

    def _draftings(self) -> Iterator[Drafting | None]:
        yield None
        if self.drafting is not None:
            for tokens in range(1, self.drafting.draft_tokens + 1):
                yield replace(self.drafting, draft_tokens=tokens)


def engine_budgets(traits: EngineTraits, *, longest: int) -> tuple[TokenBudget, ...]:
    """Return the budgets that an engine can be given.

    Args:
        traits: of the engine.
        longest: tokens of one request at most.
    """
    return tuple(_budgets(traits, longest))


def _budgets(traits: EngineTraits, longest: int) -> Iterator[TokenBudget]:
    for tokens in BUDGETS:
        yield TokenBudget(tokens=tokens, is_chunked=True)
        if traits.batching is Batching.WHOLE and tokens >= longest:
            yield TokenBudget(tokens=tokens, is_chunked=False)


def usual_choices(traits: EngineTraits) -> Choices:
    """Return the budget that recipes give an engine, and nothing else."""
    is_chunked = traits.batching is not Batching.WHOLE
    return Choices(budgets=(TokenBudget(tokens=traits.step_tokens, is_chunked=is_chunked),))
