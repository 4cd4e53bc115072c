"""Requests cut in two at a prompt length: the long ones are prefilled elsewhere.

A threshold t sends the share p = P(L > t) of the requests to a remote pool, and with them the mean
E[x(L) | L > t] of all that a prompt costs (seconds of prefill, bytes of KV cache); the rest stays.
Shares and means become classes and rates of the program in solvers/instances, one t of a grid each.

Source: Prefill-as-a-Service (arXiv:2604.15039), equations 3-6, which take the cost at the mean
length; here it is the mean of the costs, the same where cost is linear in length.

Letters: N prompts, or points of a distribution.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

POINTS: Final = 6
"""Lengths at which prompts of one side are priced, evenly in their quantiles."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptSplit:
    """Prompts on both sides of a threshold."""

    long_share: float
    """Share of the requests whose prompts exceed the threshold."""
    long_weight_N: Floats
    """Weights of the long prompts, which sum to 1; 0 for the others."""
    short_weight_N: Floats

    def long_mean(self, value_N: Floats) -> float:
        """Mean of a quantity of prompts over the long ones."""
        return float(self.long_weight_N @ value_N)

    def short_mean(self, value_N: Floats) -> float:
        """Mean of a quantity of prompts over the short ones."""
        return float(self.short_weight_N @ value_N)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LengthThreshold:
    """Prompts on both sides of a threshold."""

    above_tokens: int
    """Prompts with more to compute are long."""
    split: PromptSplit
    tokens_N: Floats
    """Tokens to compute of every prompt that was drawn."""
    computed_ratio: float
    """Share of a prompt that must be computed; the rest is found in the prefix cache."""

    @property
    def long_share(self) -> float:
        """Return the share of the requests whose prompts are long."""
        return self.split.long_share

    def input_tokens(self, *, is_long: bool) -> float:
        """Tokens of a mean prompt of one side, what is found in the cache included."""
        mean = self.split.long_mean if is_long else self.split.short_mean
        return mean(self.tokens_N) / self.computed_ratio

    def lengths(self, *, is_long: bool) -> Floats:
        """Tokens to compute of equally likely prompts of one side."""
        own_N = self.tokens_N[(self.tokens_N > self.above_tokens) == is_long]
        return np.asarray(np.quantile(own_N, (np.arange(POINTS) + 0.5) / POINTS))


def split_at(threshold_tokens: float, *, tokens_N: Floats, weight_N: Floats) -> PromptSplit:
    """Cut prompts of these lengths and weights above a threshold; both sides must hold some."""
    if (weight_N < 0.0).any() or not weight_N.sum() > 0.0:
        raise ValueError("weights of prompts must be at least 0, and one must be more")
    long_N = np.where(tokens_N > threshold_tokens, weight_N, 0.0)
    short_N = weight_N - long_N
    if not (long_N.sum() > 0.0 and short_N.sum() > 0.0):
        raise ValueError(
            f"threshold {threshold_tokens:g} leaves one side empty; prompts have "
            f"{tokens_N.min():g} to {tokens_N.max():g} tokens"
        )
    return PromptSplit(
        long_share=float(long_N.sum() / weight_N.sum()),
        long_weight_N=long_N / long_N.sum(),
        short_weight_N=short_N / short_N.sum(),
    )
