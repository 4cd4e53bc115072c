"""Seconds of a step by its tokens, sequences and past, as lookup tables.

A simulation asks for a few steps per request and must not interpolate logarithms each time. So an
iteration's costs are laid out once: by every number of tokens and sequences, and over an even grid
of pasts, between whose points attention is close to linear.

The sums are those of tuner/costs/serve/whole_step.py, entry by entry: a step with drafts checks
several tokens of each sequence; where it runs as two halves, all-to-all counts as far as nothing
hides it; with a pipeline a step is a round of as many micro-batches as there are stages.

Letters: M tokens, N sequences, P pasts.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.whole_step import attention_s, draft_s, halves_s, halves_share
from tuner.prices.serve.curves import Floats

POINTS: Final = 40
"""Sizes at which an iteration is priced; between them seconds are interpolated."""
PASTS: Final = 17
PROMPTS: Final = 65
MOST_TOKENS: Final = 2_000_000
"""Tokens of a step that are laid out, at most; larger steps take in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Halves:
    """All-to-all of two half steps, by tokens of both."""

    hidden_s: list[float]
    """Seconds of all-to-all that may hide."""
    cover_s: list[float]
    """Seconds of GEMMs that hide it."""
    held_s: list[float]
    """Seconds of all-to-all that stay exposed at least."""
    attention_ratio: float
    """Share of attention that hides it too."""

    def exposed_s(self, tokens: int, attention: float) -> float:
        """Return the seconds of all-to-all that nothing hides."""
        covered_s = self.cover_s[tokens] + self.attention_ratio * attention
        return max(self.hidden_s[tokens] - covered_s, self.held_s[tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """A pipeline."""

    count: int
    slot_ratio: float
    """Share of the layers on the longest stage."""
    last_ratio: float
    """Share of the layers on the last stage."""
    passed_s: float
    """Seconds of all transfers between stages, for a step of no tokens."""
    passed_token_s: float
    """Seconds of all transfers between stages, per token."""

    def round_s(
        self, layers_s: float, last_s: float, *, gap_s: float, busy: int, tokens: int
    ) -> float:
        """Price so many micro-batches through all stages."""
        slowest_s = max(self.slot_ratio * layers_s, self.last_ratio * layers_s + last_s, gap_s)
        passed_s = self.passed_s + self.passed_token_s * tokens
        return max(layers_s + last_s + gap_s, busy * slowest_s) + passed_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTimes:
    """Tables of one engine; lists, because single entries of arrays are slow to read."""

    linear_s: list[float]
    """Seconds of everything but attention, head and scheduler, by tokens."""
    head_s: list[float]
    """Seconds of the head, by sequences that get a token."""
    decode_s: list[list[float]]
    """Seconds of attention by sequences, over pasts that are `past_step` apart."""
    past_step: float
    prompt_s: list[float]
    """Seconds of a prompt's attention, and of a drafter's GEMMs, over prompt lengths that are
    `prompt_step` apart."""
    prompt_step: float
    scheduler_s: float
    prompt_scheduler_s: float
    """Seconds between steps that hold prompts."""
    layers_launch_s: float = 0.0
    """Least seconds of the layers of a step without a graph."""
    graph_tokens: float = math.inf
    """Tokens of the largest step with prompts that has one."""
    stream_s: float = 0.0
    """Least seconds of a step for each sequence that gets its tokens streamed."""
    graph_sequences: float = math.inf
    """Sequences of the largest step without prompts that has one."""
    draft_s: list[float] | None = None
    """Seconds of drafting, by sequences."""
    checked_tokens: int = 1
    """Tokens that a running sequence brings to a step."""
    tokens_per_step: float = 1.0
    """Tokens that a running sequence gets from a step on average."""
    overshoot_tokens: float = 0.0
    """Tokens that a sequence's last step yields too many on average."""
    halves: Halves | None = None
    stages: PipelineStages | None = None
    isolated_s: list[float] | None = None
    """Seconds as `linear_s`, where the ranks that share the experts have no tokens; None: no rank
    shares them, or halves of steps hide each other."""
    waited_s: float = 0.0
    """Mean seconds that a step without prompts waits for those of ranks that share the experts."""
    others_ratio: float = 1.0
    """Tokens of ranks that share the experts over a rank's own in a step with prompts, mean."""
    decode_only_s: list[tuple[list[float], float, float]] | None = field(init=False)
    """Seconds of a step without prompts by its sequences: attention over pasts, the other layers,
    and what follows them; None: the step is two halves, or a round of a pipeline."""
    micro_batches: int = field(init=False)
    """Micro-batches that are under way at once."""

    def __post_init__(self) -> None:
        count = 1 if self.stages is None else self.stages.count
        object.__setattr__(self, "micro_batches", count)
        is_plain = self.halves is None and self.stages is None
        by_sequences = [self._decode_only(n) for n in range(len(self.decode_s) if is_plain else 0)]
        object.__setattr__(self, "decode_only_s", by_sequences or None)

    def _decode_only(self, sequences: int) -> tuple[list[float], float, float]:
        last_s = self.head_s[sequences]
        if self.draft_s is not None and sequences:
            last_s += self.draft_s[sequences]
        return self.decode_s[sequences], self._linear_s(sequences * self.checked_tokens), last_s

    def together_s(self, seconds: float, tokens: int, *, others_ratio: float) -> float:
        """Return seconds of a step of ranks that share their experts, by the slowest.

        Args:
            seconds: where every one has as many tokens.
            tokens: of the slowest.
            others_ratio: tokens of the others over as many, mean.
        """
        if self.isolated_s is None:
            return seconds
        over, tokens = max(tokens / self.most_tokens, 1.0), min(tokens, self.most_tokens)
        saved_s = over * (self.linear_s[tokens] - self.isolated_s[tokens])
        least_s = self.layers_launch_s if tokens > self.graph_tokens else 0.0
        return max(seconds - (1.0 - others_ratio) * max(saved_s, 0.0), least_s)

    def steps_of(self, tokens: int) -> int:
        """Steps until a sequence has so many tokens, on average and whole.

        By Wald's equation the mean number of steps is that of all their tokens, those beyond the
        end included, over the tokens of one.
        """
        if self.tokens_per_step == 1.0:
            return tokens
        return max(round((tokens + self.overshoot_tokens) / self.tokens_per_step), 1)

    @property
    def most_tokens(self) -> int:
        """Return the most tokens of a step that are laid out."""
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
        if self.decode_only_s is not None:
            row, layers_s, last_s = self.decode_only_s[sequences]
            place = past / self.past_step
            low = int(place)
            if low > len(row) - 2:
                low = len(row) - 2
            layers_s += row[low] + (row[low + 1] - row[low]) * (place - low)
            if sequences > self.graph_sequences:
                layers_s = max(layers_s, self.layers_launch_s)
            step_s = layers_s + last_s + self.scheduler_s + self.waited_s
            return max(step_s, sequences * self.stream_s)
        batch_sequences = -(-sequences // self.micro_batches)
        step_s = self.waited_s + self._round_s(
            batch_sequences * self.checked_tokens,
            self.attention_s(batch_sequences, past),
            running=batch_sequences,
            heads=batch_sequences,
            reads=False,
            busy=min(sequences, self.micro_batches),
        )
        return max(step_s, sequences * self.stream_s)

    def prompt_step_s(self, tokens: int, before: float, *, ended: int = 1) -> float:
        """A step that reads so many tokens of one prompt alone, behind those read before.

        With a pipeline from the first stage to the end of the last.
        """
        attention = self.prefill_s(before + tokens) - self.prefill_s(before)
        return self.mixed_s(tokens, attention, running=0, past=0.0, ended=ended)

    def mixed_s(
        self,
        tokens: int,
        attention: float,
        *,
        running: int,
        past: float,
        ended: int,
        parts: int = 1,
    ) -> float:
        """A step with prompts.

        Args:
            tokens: of prompts.
            attention: of them.
            running: sequences beside them.
            past: of those on average.
            ended: prompts that end.
            parts: micro-batches that hold them.
        """
        batch_sequences = -(-running // self.micro_batches)
        attention /= parts
        if batch_sequences:
            attention += self.attention_s(batch_sequences, past)
        step_tokens = -(-tokens // parts) + batch_sequences * self.checked_tokens
        seconds = self._round_s(
            step_tokens,
            attention,
            running=batch_sequences,
            heads=batch_sequences + ended,
            reads=True,
            busy=max(parts, min(running, self.micro_batches)),
        )
        seconds = max(seconds, running * self.stream_s)
        if self.others_ratio == 1.0:
            return seconds
        return self.together_s(seconds, step_tokens, others_ratio=self.others_ratio)

    def _round_s(
        self, tokens: int, attention: float, *, running: int, heads: int, busy: int, reads: bool
    ) -> float:
        """A step of one micro-batch; with a pipeline a round of those under way."""
        gap_s = self.prompt_scheduler_s if reads else self.scheduler_s
        layers_s = self._linear_s(tokens) + attention
        has_graph = tokens <= self.graph_tokens if reads else running <= self.graph_sequences
        if not has_graph:
            layers_s = max(layers_s, self.layers_launch_s)
        last_s = self.head_s[min(heads, len(self.decode_s) - 1)]
        if self.halves is not None:
            layers_s += self.halves.exposed_s(min(tokens, self.most_tokens), attention)
        if self.draft_s is not None and running:
            last_s += self.draft_s[running]
        if self.stages is None:
            return layers_s + last_s + gap_s
        tokens = min(tokens, self.most_tokens)
        return self.stages.round_s(layers_s, last_s, gap_s=gap_s, busy=busy, tokens=tokens)

    def _linear_s(self, tokens: int) -> float:
        """Everything but attention, head and scheduler, of so many tokens.

        A prompt that must not be split may be longer than any step that was priced.
        """
        last = len(self.linear_s) - 1
        return self.linear_s[tokens] if tokens <= last else tokens / last * self.linear_s[last]


def step_times(
    iteration: Iteration, *, most_tokens: int, most_sequences: int, longest: int
) -> StepTimes:
    """Price an engine at every size that a simulation can ask for.

    Args:
        iteration: costs of a step.
        most_tokens: of one step on one rank; at least those of its running sequences count.
        most_sequences: running on one rank at once.
        longest: tokens of the longest sequence, output included.
    """
    most_tokens = max(min(most_tokens, MOST_TOKENS), most_sequences * iteration.checked_tokens)
    token_M = _sizes(most_tokens)
    sequence_N = _sizes(most_sequences)
    past_P = np.linspace(0.0, float(longest), PASTS)
    prompt_P = np.linspace(0.0, float(longest), PROMPTS)
    pairs = np.meshgrid(sequence_N, np.maximum(past_P, 1.0), indexing="ij")
    flat = _decode_s(iteration, pairs[0].ravel(), pairs[1].ravel())
    decode_NP = flat.reshape(len(sequence_N), PASTS)
    every_N = np.arange(most_sequences + 1, dtype=np.float64)
    decode = np.stack([np.interp(every_N, sequence_N, column) for column in decode_NP.T], axis=1)
    prompt_s_P = _prompt_s(iteration, np.maximum(prompt_P, 1.0), most_tokens=most_tokens)
    prompt_s_P[0] = 0.0
    every_M = np.arange(most_tokens + 1, dtype=np.float64)
    halves = _halves(iteration, token_M, every_M) if iteration.two_batch_overlap else None
    open_M = iteration.linear_s(token_M) if halves is None else halves[0]
    isolated = None
    if halves is None and iteration.waits_for_ranks:
        isolated_M = replace(iteration, busy_ratio=0.0).linear_s(token_M)
        isolated = np.interp(every_M, token_M, isolated_M).tolist()
    drafting = iteration.drafting
    drafts_N = draft_s(iteration, sequence_N, np.ones_like(sequence_N))
    return StepTimes(
        linear_s=np.interp(every_M, token_M, open_M).tolist(),
        head_s=np.interp(every_N, sequence_N, iteration.head_s(sequence_N)).tolist(),
        decode_s=decode.tolist(),
        past_step=float(past_P[1]),
        prompt_s=prompt_s_P.tolist(),
        prompt_step=float(prompt_P[1]),
        scheduler_s=iteration.scheduler_s,
        prompt_scheduler_s=iteration.prompt_scheduler_s,
        layers_launch_s=iteration.layers_launch_s,
        graph_tokens=iteration.largest_prompt_graph,
        graph_sequences=iteration.largest_graph,
        stream_s=iteration.stream_s * iteration.tokens_per_step,
        draft_s=None if drafting is None else np.interp(every_N, sequence_N, drafts_N).tolist(),
        checked_tokens=iteration.checked_tokens,
        tokens_per_step=iteration.tokens_per_step,
        overshoot_tokens=0.0 if drafting is None else drafting.overshoot_tokens,
        halves=None if halves is None else halves[1],
        stages=_stages(iteration),
        isolated_s=isolated,
    )


def _decode_s(iteration: Iteration, n_Q: Floats, past_Q: Floats) -> Floats:
    """Attention of a step; a drafter's beyond that of an empty past."""
    ones_Q = np.ones_like(past_Q)
    drafted_Q = draft_s(iteration, n_Q, past_Q) - draft_s(iteration, n_Q, ones_Q)
    return np.asarray(attention_s(iteration, n_Q, past_Q) + drafted_Q)


def _prompt_s(iteration: Iteration, s_Q: Floats, *, most_tokens: int) -> Floats:
    """Attention of prompts; of a drafter also its GEMMs, as a step that is full takes them."""
    drafter = iteration.drafter
    if drafter is None:
        return iteration.prompt_s(s_Q)
    full = np.array([float(most_tokens)])
    token_s = float((drafter.linear_s(full) + drafter.joined_s(full))[0]) / most_tokens
    return np.asarray(iteration.prompt_s(s_Q) + drafter.prompt_s(s_Q) + token_s * s_Q)


def _stages(iteration: Iteration) -> PipelineStages | None:
    count, layers = iteration.degrees.pipeline, iteration.decoder.most_stages
    if count == 1:
        return None
    none_s, one_s = iteration.passed_s(np.array([0.0, 1.0]))
    return PipelineStages(
        count=count,
        slot_ratio=iteration.slot_ratio,
        last_ratio=layers // count / layers,
        passed_s=float(none_s),
        passed_token_s=float(one_s - none_s),
    )


def _halves(iteration: Iteration, token_M: Floats, every_M: Floats) -> tuple[Floats, Halves]:
    """Return the seconds that are paid in any case, and the tables of what may hide."""
    by_part = halves_s(iteration, token_M)
    every = {name: np.interp(every_M, token_M, by_part[name]).tolist() for name in by_part}
    return by_part["open"], Halves(
        hidden_s=every["hidden"],
        cover_s=every["cover"],
        held_s=every["held"],
        attention_ratio=halves_share(iteration),
    )


def _sizes(largest: int) -> Floats:
    """Whole sizes from 1 on, at even ratios."""
    return np.unique(np.round(np.geomspace(1.0, max(largest, 2), POINTS))).astype(np.float64)
