"""Seconds per token where prompts and running sequences share an engine, in the steady state.

    n running sequences of a rank    I computed tokens of a prompt    O output tokens
    B token budget of a step         tau tokens that a step gives each sequence
    f = n tau / O prompts that come with every step of all n, q = f I their tokens

A rank that decodes n sequences must prefill q prompt tokens per step on average:

    prompts beside running ones    chunks of c = min(max(I, q), B - n) tokens in a share q / c of
                                   the steps; from q = c on prompts use up every step: no more than
                                   n = B / (tau I / O + 1) run at once, less than one of them where
                                   prompts are longer than a step and outputs short
    prompts first                  steps of c = min(max(I, q), B) tokens of prompts alone, q / c of
                                   them between two steps of the running ones

To both comes the attention of f prompts. In a pipeline a prompt holds up a round as long as its
longest stage takes. Requests are taken to come one by one; bursts are what simulation is for.

Where R attention-data ranks share experts, a prompt on one of them delays all (lockstep.py). If s
of a rank's steps read prompts, 1 - (1 - s)^R of all steps do: R times as many while prompts seldom
meet, as many where every rank reads all the time. Experts compute what the ranks have together.

Where prompts and steps run beside each other on shares of a device (multiplexing.py), each has the
share that is left of the processors and of the memory's rate.

Letters: N numbers of sequences, P steps of a prompt.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from tuner.catalog.serve_rules.traits import Batching
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.multiplexing import DeviceShare, drawn_ratio, on_share
from tuner.costs.serve.whole_step import (
    attention_s,
    decode_layers_s,
    prompt_step_s,
    step_s,
    through_s,
)
from tuner.prices.serve.curves import Floats
from tuner.search.serve.demand import Demand
from tuner.simulate.serving.lockstep import prompt_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTime:
    """A single prompt on its rank."""

    latency_s: float
    busy_s: float
    """Seconds until the next prompt may begin: less than its latency where stages follow each
    other."""


def lasting_running(iteration: Iteration, demand: Demand, *, step_tokens: int) -> float:
    """Return how many sequences of a rank run at once, where prompts use up the step budget.

    Infinite for engines that read prompts in steps of their own. Fewer than 1 where a sequence
    takes less steps than its prompt: rates and latencies are those of reading prompts.
    """
    if iteration.traits.batching is Batching.PREFILL_FIRST:
        return math.inf
    read_tokens = iteration.tokens_per_step * demand.computed_tokens / demand.output_tokens
    checked = iteration.checked_tokens
    one_left = max(step_tokens - checked, 1.0) / read_tokens
    return min(one_left, step_tokens / (read_tokens + checked / iteration.degrees.pipeline))


def token_seconds(
    iteration: Iteration,
    running_N: Floats,
    demand: Demand,
    *,
    step_tokens: int,
    decode_s_N: Floats | None = None,
) -> Floats:
    """Seconds between two tokens of a sequence beside prompts; of those that run, if not all can.

    Args:
        iteration: the instance.
        running_N: sequences of a rank.
        demand: the traffic.
        step_tokens: budget of a step with prompts.
        decode_s_N: seconds of a step without any, where they are known.
    """
    wanted_N, most_running = running_N, lasting_running(iteration, demand, step_tokens=step_tokens)
    running_N = np.minimum(wanted_N, most_running)
    if decode_s_N is None:
        counted_N = np.maximum(running_N, 1.0)
        decode_s_N = step_s(iteration, counted_N, np.full_like(counted_N, demand.past_tokens))
    else:
        decode_s_N = np.interp(running_N, wanted_N, decode_s_N)
    traits = iteration.traits
    stages = iteration.degrees.pipeline
    prompts_N = running_N * iteration.tokens_per_step / demand.output_tokens
    read_N = prompts_N * demand.computed_tokens
    unread_N = np.maximum(read_N, demand.computed_tokens)
    held_s_N = prompt_attention_s(iteration, demand) * prompts_N
    gap_s = iteration.prompt_scheduler_s
    if traits.batching is Batching.PREFILL_FIRST:
        chunk_N = np.minimum(unread_N, float(step_tokens))
        ratio_N = read_N / chunk_N
        layers_s_N = through_s(iteration, chunk_N, np.zeros_like(chunk_N)) + held_s_N / ratio_N
        isolated_s_N = np.maximum(layers_s_N, iteration.prompt_launch_s(chunk_N)) + gap_s
        head_s_N = iteration.head_s(np.maximum(prompts_N, 1.0)) * np.minimum(prompts_N, 1.0)
        own_s_N = iteration.slot_ratio * isolated_s_N + head_s_N / ratio_N
        share_N = ratio_N / (1.0 + ratio_N)
        more_s_N = _reading_s(
            iteration, share_N, decode_s_N, own_s_N - decode_s_N, tokens_N=chunk_N
        )
        step_s_N = (1.0 + ratio_N) * (decode_s_N + more_s_N)
        return np.asarray(step_s_N / iteration.tokens_per_step)
    micro_N = np.maximum(running_N / stages, 1.0)
    checked_N = micro_N * iteration.checked_tokens
    chunk_N = np.minimum(unread_N, np.maximum(step_tokens - checked_N, 1.0))
    share_N = read_N / chunk_N
    seen_s_N = attention_s(iteration, micro_N, np.full_like(micro_N, demand.past_tokens))
    both_N = checked_N + chunk_N
    layers_s_N = through_s(iteration, both_N, seen_s_N) + held_s_N / share_N
    more_s_N = np.maximum(layers_s_N, iteration.prompt_launch_s(both_N))
    more_s_N = more_s_N - decode_layers_s(iteration, micro_N, seen_s_N)
    more_s_N = iteration.slot_ratio * more_s_N + gap_s - iteration.scheduler_s
    reading_s_N = _reading_s(iteration, share_N, decode_s_N, more_s_N, tokens_N=both_N)
    return np.asarray((decode_s_N + reading_s_N) / iteration.tokens_per_step)


def _reading_s(
    iteration: Iteration,
    share_N: Floats,
    decode_s_N: Floats,
    more_s_N: Floats,
    *,
    tokens_N: Floats,
) -> Floats:
    """Seconds that prompts add to a step on average, those that it waits for included.

    Args:
        iteration: the instance.
        share_N: steps of a rank that read prompts.
        decode_s_N: seconds of a step without any.
        more_s_N: seconds of such a step beyond one without, if every rank reads at once.
        tokens_N: of such a step.
    """
    if not iteration.waits_for_ranks:
        return share_N * more_s_N
    saved_s_N = np.zeros_like(share_N)
    if not iteration.two_batch_overlap:
        isolated = replace(iteration, busy_ratio=0.0)
        least_s_N = np.maximum(isolated.linear_s(tokens_N), iteration.prompt_launch_s(tokens_N))
        saved_s_N = np.maximum(iteration.linear_s(tokens_N) - least_s_N, 0.0)
    shared = prompt_steps(
        share_N,
        ranks=iteration.degrees.attention_data,
        least_s=decode_s_N + np.maximum(more_s_N - saved_s_N, 0.0),
        full_s=decode_s_N + np.maximum(more_s_N, 0.0),
    )
    return np.asarray(shared.ratio * (shared.seconds - decode_s_N))


def prompt_attention_s(iteration: Iteration, demand: Demand) -> float:
    """Attention of one prompt; prefix hits are attended to, not computed."""
    cached = max(demand.input_tokens - demand.computed_tokens, 0.0)
    whole_s_P = iteration.prompt_s(np.array([max(demand.input_tokens, 1.0), max(cached, 1.0)]))
    return float(whole_s_P[0] - (whole_s_P[1] if cached > 0.0 else 0.0))


def prompt_time(iteration: Iteration, demand: Demand, *, step_tokens: int) -> PromptTime:
    """Price a single prompt, in steps of a budget."""
    cached = max(demand.input_tokens - demand.computed_tokens, 0.0)
    before_P = np.arange(0.0, max(demand.computed_tokens, 1.0), float(step_tokens))
    chunk_P = np.minimum(demand.computed_tokens - before_P, float(step_tokens))
    seconds_P = prompt_step_s(iteration, np.maximum(chunk_P, 1.0), cached + before_P)
    busy_s = iteration.slot_ratio * float(seconds_P.sum())
    latency_s = busy_s + (1.0 - iteration.slot_ratio) * float(seconds_P[-1])
    return PromptTime(latency_s=latency_s, busy_s=busy_s)


def split_iteration(
    whole: Iteration, ratio: float, demand: Demand, *, step_tokens: int
) -> tuple[Iteration, Iteration]:
    """Return prefill on its share, and decode on what is left beside it."""
    reading = on_share(whole, DeviceShare(compute_ratio=ratio))
    prompt_s = prompt_time(reading, demand, step_tokens=step_tokens).latency_s
    drawn = drawn_ratio(whole, tokens=demand.computed_tokens, seconds=prompt_s)
    return reading, on_share(
        whole, DeviceShare(compute_ratio=1.0 - ratio, bandwidth_ratio=1.0 - drawn)
    )
