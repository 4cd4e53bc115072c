"""What one device of an instance holds: weights, the drafter's, spare copies of experts, caches."""

from dataclasses import replace

from tuner.costs.serving.decoder import BYTES
from tuner.costs.serving.engine import EngineTraits
from tuner.costs.serving.iteration import Iteration
from tuner.costs.serving.memory import kv_bytes_per_token, tokens_of, weight_bytes
from tuner.costs.serving.reserve import reserve_of


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


def held_kv_bytes_per_token(iteration: Iteration, *, request_tokens: float | None = None) -> float:
    """Of one device, the drafter's cache included; windows count for requests of that length."""
    decoder, formats, degrees = iteration.decoder, iteration.formats, iteration.degrees
    total = kv_bytes_per_token(decoder, formats, degrees, request_tokens=request_tokens)
    if iteration.drafter is not None:
        own, alone = iteration.drafter.decoder, iteration.drafter.degrees
        total += kv_bytes_per_token(own, formats, alone, request_tokens=request_tokens)
    return total


def cache_tokens(
    iteration: Iteration,
    *,
    memory_bytes: float,
    step_tokens: int,
    running: int,
    traits: EngineTraits | None = None,
    request_tokens: float | None = None,
    least: float = 0.0,
) -> float:
    """Tokens that one attention-data rank can hold; not above 0 where the weights do not fit.

    Args:
        iteration: the instance.
        memory_bytes: of one device.
        step_tokens: of a step of one rank at most.
        running: sequences of one rank at most.
        traits: of the engine, where a launch sets others than usual.
        request_tokens: length of requests, for layers that do not keep all of them; None: they do.
        least: tokens that a launch that runs at all must have had room for.
    """
    reserve = reserve_of(iteration, step_tokens=step_tokens, running=running)
    return tokens_of(
        weights=held_weight_bytes(iteration),
        each=held_kv_bytes_per_token(iteration, request_tokens=request_tokens),
        traits=traits or iteration.traits,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve.total,
        least=least,
    )
