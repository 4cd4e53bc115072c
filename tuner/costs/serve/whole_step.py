"""A whole step of an engine: its operations, drafting, two half steps, stages of a pipeline.

    n running sequences of a rank, m tokens of a step, k drafts, p stages, L layers

    drafting    m = n (k + 1); beside the step the drafter passes those m tokens once and n tokens
                k - 1 times, each pass with the head
    halves      two of m / 2 tokens: T = c + a + e_1 + max(0, e - c - a, s e)
                c GEMMs, a attention, e all-to-all of both halves over the layers with experts,
                e_1 the first all-to-all, which nothing hides; layers without experts run whole
    stages      p micro-batches of n / p sequences are under way, so that a round takes
                max(all stages, p times the slowest), and gives each sequence one step's tokens

The order of halves follows SGLang's `--enable-two-batch-overlap` and vLLM's `--enable-dbo`: while
one half is in the all-to-all the other computes. s is the share of multiprocessors that normal
DeepEP kernels hold meanwhile, 20 of a device's (deep_ep/buffer.py, `Buffer.num_sms`); low-latency
ones hold none (DeepEP's README, receive hooks). Two halves are less efficient than one whole: the
sum may be longer, and nothing here chooses. The overlap is ideal: SGLang reports up to 35 % more
tokens from halves on 32 and 72 H100 (lmsys.org, 2025-05-05, large-scale EP), where this gives 60 %.

Passes of a drafter: the first reads what the step has checked, the others what they wrote (vLLM,
`vllm/v1/spec_decode/eagle.py`). Stages are as in Megatron's even split; the head, and the drafter,
are on the last stage. The bound of a round is that of a permutation flow shop of equal jobs.

Letters: Q query points. Not covered: host work between the passes of a drafter, bubbles of prompts
of different lengths in a pipeline, a gathering of logits over the drafter's smaller vocabulary.
"""

from typing import Final

import numpy as np

from tuner.catalog.serve_rules.manifest import LARGEST_DISPATCH_TOKENS
from tuner.costs.serve.engine import A2aBackend
from tuner.costs.serve.iteration import Iteration
from tuner.prices.serve.curves import Floats

HELD_UNITS: Final = 20
"""Multiprocessors of normal DeepEP kernels, by default."""


def step_s(iteration: Iteration, n_Q: Floats, past_Q: Floats) -> Floats:
    """Seconds of a decode step of n running sequences of a rank with that past.

    Each of them gets `iteration.tokens_per_step` tokens from it.
    """
    stages = iteration.degrees.pipeline
    micro_Q = np.maximum(n_Q / stages, 1.0)
    tokens_Q = micro_Q * iteration.checked_tokens
    layers_Q = decode_layers_s(iteration, micro_Q, attention_s(iteration, micro_Q, past_Q))
    last_Q = iteration.head_s(micro_Q) + draft_s(iteration, micro_Q, past_Q)
    busy_Q = np.minimum(n_Q, stages)
    step_Q = round_s(iteration, layers_Q, last_Q, busy_Q) + iteration.passed_s(tokens_Q)
    return np.maximum(step_Q, n_Q * iteration.tokens_per_step * iteration.stream_s)


def prompt_step_s(iteration: Iteration, m_Q: Floats, before_Q: Floats) -> Floats:
    """Seconds of a step that reads m tokens of one prompt, behind so many read before.

    With a pipeline from the first stage to the end of the last; the next step may begin after
    `iteration.slot_ratio` of it.
    """
    layers_Q = through_s(iteration, m_Q, _part_s(iteration, m_Q, before_Q))
    total_Q = np.maximum(layers_Q, iteration.prompt_launch_s(m_Q))
    total_Q = total_Q + iteration.passed_s(m_Q) + iteration.head_s(np.ones_like(m_Q))
    total_Q = total_Q + iteration.context_prompt_s(m_Q, before_Q)
    if iteration.drafter is not None:
        drafter = iteration.drafter
        layers_Q = drafter.linear_s(m_Q) + _part_s(drafter, m_Q, before_Q)
        total_Q = (
            total_Q + np.maximum(layers_Q, drafter.prompt_launch_s(m_Q)) + drafter.joined_s(m_Q)
        )
    return np.asarray(total_Q + iteration.prompt_scheduler_s)


def _part_s(iteration: Iteration, m_Q: Floats, before_Q: Floats) -> Floats:
    """Attention of m tokens of a prompt behind those read before."""
    known_Q = np.where(before_Q > 0.0, iteration.prompt_s(np.maximum(before_Q, 1.0)), 0.0)
    return np.asarray(iteration.prompt_s(before_Q + m_Q) - known_Q)


def attention_s(iteration: Iteration, n_Q: Floats, past_Q: Floats) -> Floats:
    """Attention of a decode step, in halves where a step is."""
    if not iteration.two_batch_overlap:
        return iteration.decode_s(n_Q, past_Q)
    halves_Q = 2.0 * iteration.decode_s(np.maximum(0.5 * n_Q, 1.0), past_Q)
    return np.where(n_Q < 2.0, iteration.decode_s(n_Q, past_Q), halves_Q)


def draft_s(iteration: Iteration, n_Q: Floats, past_Q: Floats) -> Floats:
    """Seconds of all passes of the drafter; zero without one."""
    drafter, drafting = iteration.drafter, iteration.drafting
    if drafter is None or drafting is None:
        return np.zeros_like(n_Q)
    tokens_Q = n_Q * drafting.checked_tokens
    least_Q = drafter.decode_launch_s(n_Q)
    layers_Q = drafter.linear_s(tokens_Q) + iteration.draft_attention_s(n_Q, past_Q)
    first_Q = np.maximum(layers_Q, least_Q) + drafter.joined_s(tokens_Q) + drafter.head_s(n_Q)
    if drafting.draft_tokens == 1:
        return first_Q
    layers_Q = drafter.linear_s(n_Q) + drafter.decode_s(n_Q, past_Q)
    further_Q = np.maximum(layers_Q, least_Q) + drafter.joined_s(n_Q) + drafter.head_s(n_Q)
    return np.asarray(first_Q + (drafting.draft_tokens - 1) * further_Q)


def through_s(iteration: Iteration, m_Q: Floats, attention_Q: Floats) -> Floats:
    """All layers for a step of m tokens, in two halves where the engine makes them."""
    if not iteration.two_batch_overlap:
        return iteration.linear_s(m_Q) + attention_Q
    halves = halves_s(iteration, m_Q)
    covered_Q = halves["cover"] + halves_share(iteration) * attention_Q
    exposed_Q = np.maximum(halves["hidden"] - covered_Q, halves["held"])
    return np.asarray(halves["open"] + attention_Q + exposed_Q)


def decode_layers_s(iteration: Iteration, n_Q: Floats, attention_Q: Floats) -> Floats:
    """All layers for a step of n sequences without prompts, launched or replayed."""
    layers_Q = through_s(iteration, n_Q * iteration.checked_tokens, attention_Q)
    return np.maximum(layers_Q, iteration.decode_launch_s(n_Q))


def halves_share(iteration: Iteration) -> float:
    """Share of the layers whose all-to-all may be hidden."""
    return iteration.moe_layers / iteration.decoder.num_layers


def halves_s(iteration: Iteration, m_Q: Floats) -> dict[str, Floats]:
    """Seconds of two half steps of m tokens together, without attention.

    `open` is paid in any case, `hidden` is all-to-all that `cover` and attention may hide, `held`
    the least that it costs where it does. A step that cannot be halved has nothing to hide.
    """
    whole, half = iteration.linear_split(m_Q), iteration.linear_split(np.maximum(0.5 * m_Q, 1.0))
    layers = max(iteration.moe_layers, 1)
    first_Q = half.all_to_all_Q / layers
    hidden_Q = 2.0 * half.all_to_all_Q - first_Q
    held_Q = hidden_Q * HELD_UNITS / iteration.machine.sheet.compute_units
    if iteration.a2a_backend is not A2aBackend.NORMAL:
        held_Q = np.where(m_Q > 2.0 * LARGEST_DISPATCH_TOKENS, held_Q, 0.0)
    can_halve_Q = (m_Q >= 2.0) & (iteration.degrees.attention_data > 1)
    plain_Q = whole.dense_Q + whole.compute_Q + whole.all_to_all_Q
    split_Q = whole.dense_Q + 2.0 * half.compute_Q + first_Q
    none_Q = np.zeros_like(m_Q)
    return {
        "open": np.where(can_halve_Q, split_Q, plain_Q),
        "cover": np.where(can_halve_Q, 2.0 * half.compute_Q, none_Q),
        "hidden": np.where(can_halve_Q, hidden_Q, none_Q),
        "held": np.where(can_halve_Q, held_Q, none_Q),
    }


def round_s(iteration: Iteration, layers_Q: Floats, last_Q: Floats, busy_Q: Floats) -> Floats:
    """Seconds of a round of so many micro-batches through all stages.

    Args:
        iteration: with its pipeline.
        layers_Q: all layers for one micro-batch.
        last_Q: what only the last stage does for it.
        busy_Q: micro-batches under way.
    """
    stages, layers = iteration.degrees.pipeline, iteration.decoder.most_stages
    if stages == 1:
        return np.asarray(layers_Q + last_Q + iteration.scheduler_s)
    behind = layers // stages / layers
    slowest_Q = np.maximum(iteration.slot_ratio * layers_Q, behind * layers_Q + last_Q)
    slowest_Q = np.maximum(slowest_Q, iteration.scheduler_s)
    whole_Q = layers_Q + last_Q + iteration.scheduler_s
    return np.asarray(np.maximum(whole_Q, busy_Q * slowest_Q))
