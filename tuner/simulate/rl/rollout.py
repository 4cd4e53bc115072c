"""Rollout: all responses of a step, sent at once; the last one ends it.

Requests are grouped by prompt, and of every group all but the first find their prompt in the prefix
cache, but for its last token. Ranks get as many each, and every rank is simulated: what ends a
synchronous rollout is the slowest rank's longest response, which runs alone at the end.

Where responses may be trained on by later versions of the weights nobody waits for the longest:
ranks keep as many sequences running as the staleness allows, and a step takes as long as its share
of a closed loop.

Letters: P prompts, N responses of a step, R of a rank.
Not covered: turns with tools between them; requests that move from a slow rank to an idle one.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.costs.serve.cache_capacity import Room, room_of
from tuner.costs.serve.capacity import instance_kv_bytes_per_token, instance_weight_bytes
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.reserve import step_reserve
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.client import engine_rules, waiting_ranks
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.lockstep import simulate_ranks
from tuner.simulate.serving.steps import StepTimes, step_times
from tuner.spec.serving.lengths import LengthLaw, quantile_tokens

LOOP_ROUNDS: Final = 6
"""Requests of a closed loop, in multiples of its concurrency; the first and last do not count."""
SEED: Final = 20_261


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Sequences of one step, grouped by prompt."""

    prompt_N: Ints
    response_N: Ints
    samples: int
    """Responses of a prompt."""

    @property
    def length_N(self) -> Ints:
        """Return the tokens of every sequence."""
        return self.prompt_N + self.response_N


def draw_batch(
    *, prompts: int, samples: int, prompt_tokens: LengthLaw, response_tokens: LengthLaw
) -> Batch:
    """Draw the lengths of a step: every quantile once, in random order."""
    rng = np.random.default_rng(SEED)
    return Batch(
        prompt_N=np.repeat(_quantiles(prompt_tokens, prompts, rng), samples),
        response_N=_quantiles(response_tokens, prompts * samples, rng),
        samples=samples,
    )


def _quantiles(law: LengthLaw, count: int, rng: np.random.Generator) -> Ints:
    drawn = [quantile_tokens(law, ratio=(place + 0.5) / count) for place in range(count)]
    return rng.permutation(np.maximum(np.rint(np.array(drawn)), 1).astype(np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutSide:
    """The engines of a rollout, all alike."""

    iteration: Iteration
    instances: int
    step_tokens: int
    """Token budget of a step that holds prompts."""
    most_running: int
    """Sequences of one attention-data rank at once."""
    memory_ratio: float | None
    """Share of the memory that the launch gives an engine; None: the engine's own."""
    memory_bytes: float

    @property
    def ranks(self) -> int:
        """Return the attention-data ranks of all engines, which share the responses."""
        return self.instances * self.iteration.degrees.attention_data

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of weights of one device."""
        return instance_weight_bytes(self.iteration)

    def room(self, *, longest: int) -> Room:
        """Return how an engine divides a device's memory."""
        reserve = step_reserve(
            self.iteration,
            step_tokens=self.step_tokens,
            running=self.most_running,
            longest=longest,
        )
        return room_of(
            self.iteration.memory_rule,
            weights=self.weight_bytes,
            reserve=reserve,
            memory_bytes=self.memory_bytes,
            ratio=self.memory_ratio,
        )

    def kv_tokens(self, *, longest: int) -> float:
        """Return the tokens that the caches of one rank hold."""
        token_bytes = instance_kv_bytes_per_token(self.iteration, request_tokens=float(longest))
        return self.room(longest=longest).cache_bytes / max(token_bytes, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Seconds of a rollout."""

    last_s: float
    """Seconds until the last response has ended, or of a step's share of a closed loop."""
    most_s: float
    """Seconds until nine of ten responses have ended; of a closed loop as above."""


def roll_out(batch: Batch, side: RolloutSide, *, versions: float, gap_s: float = 0.0) -> Rollout:
    """Serve the responses of a step.

    Args:
        batch: of the step.
        side: that rolls it out.
        versions: of the weights that responses may be behind; 0: all wait for the last.
        gap_s: seconds between two steps beyond those of the engine's traits.
    """
    longest = int(batch.length_N.max())
    share = -(-len(batch.response_N) // side.ranks)
    running = max(1, min(side.most_running, round((1.0 + versions) * share)))
    times = step_times(
        side.iteration,
        most_tokens=side.step_tokens,
        most_sequences=1 << running.bit_length(),
        longest=longest,
    )
    times = replace(
        times,
        scheduler_s=times.scheduler_s + gap_s,
        prompt_scheduler_s=times.prompt_scheduler_s + gap_s,
    )
    rules = engine_rules(
        side.iteration.traits,
        step_tokens=side.step_tokens,
        kv_tokens=max(side.kv_tokens(longest=longest), float(longest)),
        most_running=running,
    )
    if versions > 0.0:
        share_s = _loop_s(batch, side, times, rules)
        return Rollout(last_s=share_s, most_s=share_s)
    places = np.array_split(np.arange(len(batch.response_N)), side.ranks)
    end_s_N = np.concatenate(
        [_burst_s_R(batch, chosen_R, side, times, rules) for chosen_R in places if len(chosen_R)]
    )
    return Rollout(last_s=float(end_s_N.max()), most_s=float(np.quantile(end_s_N, 0.9)))


def _burst_s_R(
    batch: Batch, chosen_R: Ints, side: RolloutSide, times: StepTimes, rules: Rules
) -> Floats:
    """Return when each response of a rank ends that all came at once."""
    served = simulate_ranks(
        _requests(batch, chosen_R),
        times=times,
        rules=rules,
        ranks=waiting_ranks(side.iteration),
        concurrency=len(chosen_R),
    )
    return served.end_s_R


def _requests(batch: Batch, chosen_R: Ints) -> Requests:
    """Return the requests of a rank; all but the first of a prompt find it in the prefix cache."""
    prompt_R = batch.prompt_N[chosen_R]
    is_first_R = np.diff(chosen_R // batch.samples, prepend=-1) > 0
    return Requests(
        input_R=prompt_R,
        output_R=batch.response_N[chosen_R],
        cached_R=np.where(is_first_R, 0, prompt_R - 1),
    )


def _loop_s(batch: Batch, side: RolloutSide, times: StepTimes, rules: Rules) -> float:
    """Return the seconds of a step's responses where ranks never run dry."""
    running = rules.most_running
    rng = np.random.default_rng(SEED)
    chosen_R = np.sort(rng.integers(0, len(batch.response_N), size=LOOP_ROUNDS * running))
    served = simulate(_requests(batch, chosen_R), times=times, rules=rules, concurrency=running)
    counted_R = np.sort(served.end_s_R)[running - 1 : -running]
    rate_per_s = (len(counted_R) - 1) / float(counted_R[-1] - counted_R[0])
    return len(batch.response_N) / side.ranks / rate_per_s
