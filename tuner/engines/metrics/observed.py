"""Steps and requests of a running server's logs, whatever wrote them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of an engine, or of one of its attention-data ranks."""

    seconds: float
    prompts: int
    """Prompts that the step reads, or parts of them."""
    prompt_tokens: int
    """Tokens that are computed of them."""
    running: int
    """Sequences that get a token."""
    before_tokens: int = 0
    """Tokens of the prompts that were read before, all of them together; 0 also where not said."""
    past_tokens: float | None = None
    """Tokens in the caches of the running sequences, all of them together; None: not said."""
    cache_ratio: float | None = None
    """Share of the cache in use; None: not said."""
    number: int = 0
    """Number of the step by the engine's own count."""
    rank: str = ""
    """Rank, and the process or worker, as far as the log says."""
    at_s: float | None = None
    """Clock at the end of the step, in whole seconds; None: not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request, by any clock that all of a log share."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    """Seconds from arrival to the first token."""
    end_s: float
    cached_tokens: int | None = None
    """Tokens of the prompt that were found in a prefix cache; None: not said."""

    @property
    def is_possible(self) -> bool:
        """Return whether its tokens and times can be those of a request."""
        has_tokens = self.input_tokens > 0 and self.output_tokens > 0
        return has_tokens and 0.0 < self.ttft_s <= self.end_s - self.arrival_s + 1e-6
