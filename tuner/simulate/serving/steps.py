"""Seconds of a step by its tokens, sequences and past, as tables that are read in no time.

A simulation asks for a few steps per request and must not interpolate logarithms each time. So an
iteration's costs are laid out once: by every number of tokens and sequences, and over an even grid
of pasts, between whose points attention is close to linear.

Letters: M tokens, N sequences, P pasts.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.costs.serving.curves import Floats
from tuner.costs.serving.iteration import Iteration

POINTS: Final = 40
"""Sizes at which an iteration is priced; between them seconds are interpolated."""
PASTS: Final = 17
PROMPTS: Final = 65


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Tables of one engine; lists, because single entries of arrays are slow to read."""

    linear_s: list[float]
    """By tokens: everything but attention, head and scheduler."""
    head_s: list[float]
    """By sequences that get a token."""
    decode_s: list[list[float]]
    """By sequences, over pasts that are `past_step` apart."""
    past_step: float
    prompt_s: list[float]
    """Over prompt lengths that are `prompt_step` apart."""
    prompt_step: float
    scheduler_s: float
    prompt_scheduler_s: float
    """Between steps that hold prompts."""

    @property
    def most_tokens(self) -> int:
        """Of one step."""
        return len(self.linear_s) - 1

    @property
    def most_sequences(self) -> int:
        """Running at once."""
        return len(self.decode_s) - 1

    def attention_s(self, sequences: int, past: float) -> float:
        """Decode attention of that many sequences with that past on average."""
        row = self.decode_s[sequences]
        place = past / self.past_step
        low = min(int(place), len(row) - 2)
        return row[low] + (row[low + 1] - row[low]) * (place - low)

    def prefill_s(self, length: float) -> float:
        """Attention of a prompt of that length from its start."""
        place = length / self.prompt_step
        low = min(int(place), len(self.prompt_s) - 2)
        return self.prompt_s[low] + (self.prompt_s[low + 1] - self.prompt_s[low]) * (place - low)

    def decode_step_s(self, sequences: int, past: float) -> float:
        """A step without prompts."""
        return (
            self.linear_s[sequences]
            + self.head_s[sequences]
            + self.attention_s(sequences, past)
            + self.scheduler_s
        )


def step_times(
    iteration: Iteration, *, most_tokens: int, most_sequences: int, longest: int
) -> StepTimes:
    """Price an engine at every size that a simulation can ask for.

    Args:
        iteration: costs of a step.
        most_tokens: of one step on one rank.
        most_sequences: running on one rank at once.
        longest: tokens of the longest sequence, answer included.
    """
    token_M = _sizes(most_tokens)
    sequence_N = _sizes(most_sequences)
    past_P = np.linspace(0.0, float(longest), PASTS)
    prompt_P = np.linspace(0.0, float(longest), PROMPTS)
    pairs = np.meshgrid(sequence_N, np.maximum(past_P, 1.0), indexing="ij")
    flat = iteration.decode_s(pairs[0].ravel(), pairs[1].ravel())
    decode_NP = flat.reshape(len(sequence_N), PASTS)
    every_N = np.arange(most_sequences + 1, dtype=np.float64)
    decode = np.stack([np.interp(every_N, sequence_N, column) for column in decode_NP.T], axis=1)
    prompt_s_P = iteration.prompt_s(np.maximum(prompt_P, 1.0))
    prompt_s_P[0] = 0.0
    every_M = np.arange(most_tokens + 1, dtype=np.float64)
    return StepTimes(
        linear_s=np.interp(every_M, token_M, iteration.linear_s(token_M)).tolist(),
        head_s=np.interp(every_N, sequence_N, iteration.head_s(sequence_N)).tolist(),
        decode_s=decode.tolist(),
        past_step=float(past_P[1]),
        prompt_s=prompt_s_P.tolist(),
        prompt_step=float(prompt_P[1]),
        scheduler_s=iteration.scheduler_s,
        prompt_scheduler_s=iteration.scheduler_s * iteration.traits.prompt_scheduler_ratio,
    )


def _sizes(most: int) -> Floats:
    """Whole sizes from 1 on, at even ratios."""
    return np.unique(np.round(np.geomspace(1.0, max(most, 2), POINTS))).astype(np.float64)
