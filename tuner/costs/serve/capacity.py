"""Memory of one device of an instance: weights, the drafter, redundant experts, KV cache."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final

from tuner.catalog.serve_rules.traits import MemoryRule
from tuner.costs.serve.all_to_all import ELEMENT_BYTES
from tuner.costs.serve.cache_capacity import room_of
from tuner.costs.serve.cache_groups import BlockPool, block_pool
from tuner.costs.serve.decoder import Decoder
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.memory import (
    expert_bytes,
    kv_bytes_per_token,
    layer_kv_bytes,
    stage_ratio,
    state_bytes_per_request,
    weight_bytes,
)
from tuner.costs.serve.reserve import is_dispatched, step_reserve
from tuner.prices.serve.work import STATE_BYTES

FULL_RATIO: Final = 0.95
"""The most that recipes give an engine (InferenceX, `--mem-fraction-static 0.95`)."""


def instance_weight_bytes(iteration: Iteration) -> float:
    """Return the bytes of one device's weights, drafter and spare copies of experts included."""
    degrees, shares = iteration.degrees, iteration.traits.shares_networks
    ranks = degrees.attention_tensor
    if shares and not is_dispatched(iteration):
        ranks *= degrees.attention_data
    model_bytes = weight_bytes(iteration.decoder, iteration.formats, degrees, network_ranks=ranks)
    return model_bytes + added_weight_bytes(iteration)


def added_weight_bytes(iteration: Iteration) -> float:
    """Beyond the model's own weights: what drafts, spare copies of experts, angles of positions."""
    decoder, formats, degrees = iteration.decoder, iteration.formats, iteration.degrees
    total = rotary_bytes(iteration)
    if iteration.drafter is not None:
        drafter = replace(iteration.drafter.decoder, vocab=0)
        total += weight_bytes(drafter, formats, replace(degrees, pipeline=1))
        total += 2.0 * decoder.hidden**2 * formats.stored_bytes(formats.attention)
    if decoder.experts is not None:
        spare = iteration.spare_experts
        bytes_per_expert = expert_bytes(decoder, formats)
        shards = degrees.moe_tensor * degrees.expert * degrees.pipeline
        padded = iteration.num_slots * (padding_factor(iteration) - 1.0)
        total += (spare + padded) * bytes_per_expert * iteration.moe_layers / shards
    return total


def rotary_bytes(iteration: Iteration) -> float:
    """Return the bytes of the sine and cosine of every position, whole on each rank.

    Layers share them.

    Model:   P r b, for P positions of r angles in bf16; P (1 + f) r b in fp32 where an engine
             scales the rows by the factor f as well
    Source:  vLLM 0.32.0, model_executor/layers/rotary_embedding; 4.25 GiB of DeepSeek-V4
    """
    decoder = iteration.decoder
    widths = [group.attention.rope_dim or group.attention.head_dim for group in decoder.layers]
    table = float(decoder.positions) * max(widths)
    if decoder.architecture in iteration.traits.scaled_rotary:
        return table * (1.0 + decoder.rope_factor) * STATE_BYTES
    return table * ELEMENT_BYTES


def padding_factor(iteration: Iteration) -> float:
    """Bytes of an expert as its kernels store it, over those of the checkpoint."""
    experts, rule = iteration.decoder.experts, iteration.memory_rule
    generation = iteration.machine.sheet.generation
    align = rule.mxfp4_multiples.get(generation, iteration.traits.mxfp4_multiples)
    if experts is None or align is None or iteration.formats.experts != "mxfp4":
        return 1.0
    hidden, ffn = float(iteration.decoder.expert_hidden), experts.ffn / iteration.degrees.moe_tensor
    padded = math.ceil(hidden / align[0]) * align[0] * math.ceil(ffn / align[1]) * align[1]
    return padded / (hidden * ffn)


def instance_block_pool(iteration: Iteration) -> BlockPool | None:
    """Return the blocks of one device; None where every layer has a pool, or keeps the same."""
    rule = iteration.memory_rule
    if rule.blocks is None:
        return None
    decoder, degrees, drafter = iteration.decoder, iteration.degrees, iteration.drafter
    layers = decoder.layers if drafter is None else decoder.layers + drafter.decoder.layers
    ranks = degrees.attention_tensor
    pool = block_pool(
        layers,
        token_bytes=[
            layer_kv_bytes(group.attention, iteration.cache_formats, ranks) for group in layers
        ],
        ranks=ranks,
        state_bytes=rule.states.element_bytes(decoder.architecture),
        states=rule.states.per_request + iteration.checked_tokens - 1,
        drafts=iteration.checked_tokens - 1,
    )
    if pool is None:
        return None
    return pool.sharing(degrees.context, block_ratio=stage_ratio(decoder, degrees))


def admission_bytes(iteration: Iteration, *, tokens: float, step_tokens: int) -> float:
    """Bytes of one device that a request of so many tokens may take while its prompt is computed.

    Where layers share blocks windows keep what is in flight, too.
    """
    pool, rule = instance_block_pool(iteration), iteration.memory_rule
    if pool is None or rule.blocks is None:
        return tokens * instance_kv_bytes_per_token(iteration, request_tokens=tokens)
    stages = iteration.degrees.pipeline
    flight = rule.blocks.in_flight_tokens(step_tokens, stages=stages)
    return pool.request_bytes(tokens, in_flight=float(flight))


def instance_kv_bytes_per_token(
    iteration: Iteration, *, request_tokens: float | None = None
) -> float:
    """Return the KV cache bytes of one token on one device, the drafter's cache included.

    Windows and states count as a share of a request of `request_tokens`; None: windows keep all.
    """
    decoder, formats, degrees = iteration.decoder, iteration.cache_formats, iteration.degrees
    rule = iteration.memory_rule
    pool = None if request_tokens is None else instance_block_pool(iteration)
    if pool is not None and request_tokens is not None:
        return pool.request_bytes(request_tokens) / request_tokens
    total = kv_bytes_per_token(
        decoder,
        formats,
        degrees,
        request_tokens=request_tokens,
        window_pool_ratio=None if request_tokens is None else _window_pool_ratio(decoder, rule),
        states=rule.states,
        drafts=iteration.checked_tokens - 1,
    )
    if iteration.drafter is not None:
        drafter, isolated = iteration.drafter.decoder, iteration.drafter.degrees
        total += kv_bytes_per_token(drafter, formats, isolated, request_tokens=request_tokens)
    return total


def filled_ratio(iteration: Iteration) -> float:
    """Return the bytes of a token in the cache over those that the engine counts for its room."""
    decoder, degrees, formats = iteration.decoder, iteration.degrees, iteration.cache_formats
    if not iteration.memory_rule.sizes_plain_sparse:
        return 1.0
    plain = kv_bytes_per_token(decoder, replace(formats, packs_sparse=False), degrees)
    return kv_bytes_per_token(decoder, formats, degrees) / plain if plain else 1.0


def instance_state_bytes(iteration: Iteration) -> float:
    """Return the bytes of linear-attention states of one running request on one device."""
    decoder, rule = iteration.decoder, iteration.memory_rule
    if all(group.attention.linear is None for group in decoder.layers):
        return 0.0
    return state_bytes_per_request(
        decoder, iteration.degrees, states=rule.states, drafts=iteration.checked_tokens - 1
    )


def _window_pool_ratio(decoder: Decoder, rule: MemoryRule) -> float | None:
    has_entries = any(group.attention.compressor is not None for group in decoder.layers)
    return rule.entry_window_pool_ratio if has_entries else rule.window_pool_ratio


def cache_tokens(
    iteration: Iteration,
    *,
    memory_bytes: float,
    step_tokens: int,
    running: int,
    request_tokens: float | None = None,
    longest: int = 0,
    least: float = -math.inf,
    moves_cache: bool = False,
) -> float:
    """Tokens that one attention-data rank can hold; not above 0 where the weights do not fit.

    By the engine's rule, where a launch states no share of memory and its steps must fit beside the
    cache.

    Args:
        iteration: the instance.
        memory_bytes: of one device.
        step_tokens: of a step of one rank at most.
        running: sequences of one rank at most.
        request_tokens: length of requests, for layers that do not keep all of them; None: they do.
        longest: tokens of the longest request that the engine takes; 0: not known.
        least: tokens that a launch that ran must have had room for. Where the rule leaves no room
            for them it was given more: 0.95 of the memory and half the reserve.
        moves_cache: the server sends or receives caches.
    """
    reserve = step_reserve(
        iteration,
        step_tokens=step_tokens,
        running=running,
        longest=longest,
        moves_cache=moves_cache,
    )
    weights, token_bytes = _fixed_bytes(iteration, request_tokens)
    room = room_of(
        iteration.memory_rule, weights=weights, reserve=reserve, memory_bytes=memory_bytes
    )
    usual = room.safe_bytes / token_bytes
    if usual >= least:
        return usual
    return max(usual, (FULL_RATIO * memory_bytes - 0.5 * reserve.total - weights) / token_bytes)


@lru_cache(maxsize=64)
def _fixed_bytes(iteration: Iteration, request_tokens: float | None) -> tuple[float, float]:
    """Bytes of one device's weights and of a token's cache, whatever its steps hold."""
    weights = instance_weight_bytes(iteration)
    token_bytes = instance_kv_bytes_per_token(iteration, request_tokens=request_tokens)
    return weights, max(token_bytes, 1e-9)


def holds_whole(
    iteration: Iteration, *, memory_bytes: float, step_tokens: int, running: int, tokens: int
) -> bool:
    """Say whether one request of so many tokens has room, where the engine's release wants that."""
    rule = iteration.memory_rule
    if not rule.wants_whole_length:
        return True
    reserve = step_reserve(iteration, step_tokens=step_tokens, running=running, longest=tokens)
    weights = instance_weight_bytes(iteration)
    room = room_of(rule, weights=weights, reserve=reserve, memory_bytes=memory_bytes)
    needed = admission_bytes(iteration, tokens=float(tokens), step_tokens=step_tokens)
    return room.safe_bytes >= needed


def stated_ratio(
    iteration: Iteration, *, memory_bytes: float, step_tokens: int, running: int
) -> float | None:
    """The share of memory that a plan's launch must state for its cache; None: the engine's own."""
    rule = iteration.memory_rule
    if rule.ratio is not None:
        return None
    reserve = step_reserve(iteration, step_tokens=step_tokens, running=running)
    weights = instance_weight_bytes(iteration)
    return room_of(rule, weights=weights, reserve=reserve, memory_bytes=memory_bytes).ratio
