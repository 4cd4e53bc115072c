"""Tokens drafted ahead and checked in one step: how many are kept, and what drafts them.

    k tokens drafted   a_j acceptance of the j-th   tau tokens that a step yields on average
    tau = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k, with one a for all (1 - a^(k+1)) / (1 - a)

A step checks k + 1 tokens of every running sequence: the one that is certain and k drafts. Those up
to the first that is refused are kept, and the check itself yields one more.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding
(arXiv:2211.17192), expected number of generated tokens; drafts of a position are taken as accepted
independently of what was accepted in other steps, as there.

The drafter is one layer that reads the model's last hidden state beside the embedding of the next
token, and ends in the model's own head:

    mtp     a layer like the model's last (DeepSeek-V3 Technical Report, arXiv:2412.19437, 2.2);
            of hybrids attention and the last layer's network (config.json of Nemotron-3 Super and
            Qwen3.5: `mtp_hybrid_override_pattern` "*E", full attention); without a compressor
            (DeepSeek-V4: the last of its `compress_ratios` is 0)
    eagle   a layer with a dense network (EAGLE, arXiv:2401.15077, 4.1)

Not covered: trees of drafts, drafters of several layers, vocabularies that were cut for drafting.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from operator import mul

from tuner.costs.serve.decoder import Decoder, Layers
from tuner.units import format_ratio

JOINED_INPUTS = 2
"""Hidden state and embedding, which a product of 2 h to h joins."""


class DraftMethod(StrEnum):
    """Method that drafts tokens."""

    MTP = "mtp"
    """The model's own head for further tokens."""
    EAGLE = "eagle"
    """A dense layer trained for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Settings of speculative decoding."""

    draft_tokens: int
    """Tokens that are drafted before each step for each sequence."""
    acceptance: float | tuple[float, ...]
    """Share of drafts that are kept where all before them were: of all, or of each position; later
    positions have the last one's."""
    method: DraftMethod = DraftMethod.MTP

    def __post_init__(self) -> None:
        if self.draft_tokens < 1:
            raise ValueError(f"draft_tokens {self.draft_tokens} must be at least 1")
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"acceptance {self.acceptance} must lie in 0..1")

    @property
    def checked_tokens(self) -> int:
        """Tokens that a running sequence brings to a step, k + 1."""
        return self.draft_tokens + 1

    @property
    def rates(self) -> tuple[float, ...]:
        """The stated shares, by position."""
        return self.acceptance if isinstance(self.acceptance, tuple) else (self.acceptance,)

    @property
    def yields(self) -> tuple[float, ...]:
        """Chances that a step yields at least 1, 2, ..., k + 1 tokens."""
        last = len(self.rates) - 1
        drafted = (self.rates[min(position, last)] for position in range(self.draft_tokens))
        return tuple(accumulate(drafted, mul, initial=1.0))

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets from a step on average."""
        return math.fsum(self.yields)

    @property
    def overshoot_tokens(self) -> float:
        """Tokens that the last step of a long output yields beyond its end, on average.

        Model:   (E[X^2] / E[X] - 1) / 2, X the tokens of a step: mean residual life of a renewal
                 process of whole steps (Feller, An Introduction to Probability Theory, vol. 2, XI)
        """
        # E[X^2] = sum of (2 j - 1) P(X >= j).
        square = math.fsum((2 * kept + 1) * ratio for kept, ratio in enumerate(self.yields))
        return 0.5 * (square / self.tokens_per_step - 1.0)


def acceptance_words(rates: tuple[float, ...]) -> str:
    """Say which share of drafted tokens is kept, by position where several are stated."""
    words = ", ".join(format_ratio(rate, digits=0) for rate in rates)
    return words if len(rates) == 1 else f"{words} (by position)"


def draft_decoder(decoder: Decoder, method: DraftMethod) -> Decoder:
    """Return the drafting layer as a model of its own, the joining product left out.

    Eagle's network is as wide as what one token of the model passes: published drafters copy the
    widths of a dense target; for models with experts the sum of those that a token reaches is ours.
    """
    attention = [group for group in decoder.layers if group.attention.kv_elements][-1].attention
    network = [group for group in decoder.layers if group.has_network][-1]
    if method is DraftMethod.MTP:
        attention = replace(attention, compressor=None, shares_index=False)
        group, experts = replace(network, count=1, attention=attention), decoder.experts
    else:
        dense = max((group.dense_ffn for group in decoder.layers), default=0)
        group = Layers(count=1, attention=attention, dense_ffn=dense or _reached_ffn(decoder))
        experts = None
    return replace(
        decoder,
        name=f"{decoder.name} {method.value}",
        layers=(group,),
        experts=experts,
        stage_unit=1,
    )


def _reached_ffn(decoder: Decoder) -> int:
    experts = decoder.experts
    return (
        0 if experts is None else round(experts.computed_top_k * experts.ffn) + experts.shared_ffn
    )
