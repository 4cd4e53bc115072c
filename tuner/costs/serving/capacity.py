"""What one device of an instance holds: weights, the drafter's, spare copies of experts, caches."""

from dataclasses import replace

from tuner.costs.serving.decoder import BYTES
from tuner.costs.serving.engine import EngineTraits
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.memory import kv_bytes_per_token, kv_tokens, weight_bytes


def held_weight_bytes(iteration: Iteration) -> float:
    """Of one device, the drafter and spare copies of experts included."""
    return weight_bytes(
        iteration.decoder, iteration.formats, iteration.degrees
    ) + added_weight_bytes(iteration)


def added_weight_bytes(iteration: Iteration) -> float:
    """Beyond the model's own weights: what drafts, and spare copies of experts."""
    total = 0.0
    decoder, formats, degrees = iteration.decoder, iteration.formats, iteration.degrees
    if iteration.drafter is not None:
        one = replace(iteration.drafter.decoder, vocab=0)
        total += weight_bytes(one, formats, replace(degrees, pipeline=1))
        total += 2.0 * decoder.hidden**2 * BYTES[formats.attention]
    if iteration.loads is not None and decoder.experts is not None:
        own = decoder.experts
        spare = max(iteration.loads.num_slots - own.num, 0)
        each = 3.0 * decoder.hidden * own.ffn * BYTES[formats.experts]
        shards = degrees.moe_tensor * degrees.expert * degrees.pipeline
        total += spare * each * iteration.moe_layers / shards
    return total


def held_kv_bytes_per_token(iteration: Iteration) -> float:
    """Of one device, the drafter's cache included."""
    decoder, formats, degrees = iteration.decoder, iteration.formats, iteration.degrees
    total = kv_bytes_per_token(decoder, formats, degrees)
    if iteration.drafter is not None:
        total += kv_bytes_per_token(
            iteration.drafter.decoder, formats, replace(degrees, pipeline=1)
        )
    return total


def cache_tokens(
    iteration: Iteration,
    *,
    memory_bytes: float,
    step_tokens: int,
    running: int,
    traits: EngineTraits | None = None,
    least: float = 0.0,
) -> float:
    """Tokens that one attention-data rank can hold; not above 0 where the weights do not fit.

    Args:
        iteration: the instance.
        memory_bytes: of one device.
        step_tokens: of a step of one rank at most.
        running: sequences of one rank at most.
        traits: of the engine, where a launch sets others than usual.
        least: tokens that a launch that runs at all must have had room for.
    """
    each = held_kv_bytes_per_token(iteration)
    plain = kv_bytes_per_token(iteration.decoder, iteration.formats, iteration.degrees)
    own = traits or iteration.traits
    taken = added_weight_bytes(iteration) * own.cache_ratio
    usual = kv_tokens(
        iteration.decoder,
        iteration.formats,
        iteration.degrees,
        traits=own,
        memory_bytes=memory_bytes,
        least=least,
    )
    return usual * plain / max(each, 1e-9) - taken / max(each, 1e-9)
