"""One decode step of AFD (attention-FFN disaggregation).

    T(B) = head(b) + scheduler + sum over layers [ attention(b) + small(b) ]
         + sum over layers with experts [ max(shared(b), all_to_all(B)) + router(B) + experts(B) ]
    experts(B) = max(measured or rated kernel(B), a(n_e, B) w / (0.8 W) + launch)

B requests run on n_a attention devices, b = B / n_a on each, and n_e devices hold the experts. In
decode an expert device is bound by memory: it reads the w bytes of each of the a distinct experts
that the most-loaded device needs. Shared experts run on attention devices while activations
travel.

Source: Janus (arXiv:2512.13525), its performance model, TPOT = sum over layers of attention,
experts and communication; the operations are those of tuner/costs/serve/iteration.py. An
attention device has all heads; nothing is split over tensor ranks.

Memory: an attention device holds everything but routed experts, and the cache of its requests; an
expert device holds C experts of every layer, C = floor((0.95 M - reserve) / (layers w)).

Letters: Q query points. Not covered: two half batches that take turns (MegaScale-Infer), replicas
of experts, which lower the most-loaded device's load.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tuner.costs.ops import BF16, gemm
from tuner.costs.serve.afd import most_loaded_activated
from tuner.costs.serve.all_to_all import ELEMENT_BYTES
from tuner.costs.serve.capacity import FULL_RATIO
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import Decoder, Experts, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration, sustained_factor
from tuner.costs.serve.machine import LAUNCH_S, LOAD, STREAM_RATIO, ServingMachine
from tuner.costs.serve.memory import RESERVE_BYTES, expert_bytes, kv_tokens
from tuner.costs.serve.ops import routed_experts

Activated = Callable[[Experts, Floats, int], Floats]
"""Distinct experts that the most-loaded of so many devices reads, for tokens of one layer."""


def uniform_activated(experts: Experts, tokens_Q: Floats, devices: int) -> Floats:
    """Under uniform routing, experts distributed evenly."""
    return most_loaded_activated(
        slots=-(-experts.num // devices),
        experts=experts.num,
        top_k=experts.computed_top_k,
        tokens_Q=tokens_Q,
        devices=devices,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSeconds:
    """What attention devices take, for requests of one device."""

    plain_Q: Floats
    """Of the whole step, but for shared experts."""
    shared_Q: Floats
    """Of the shared experts of all layers."""


def attention_seconds(iteration: Iteration, b_Q: Floats, *, past_tokens: float) -> AttentionSeconds:
    """Price attention devices; the iteration is one of a single device."""
    parts = iteration.linear_parts(b_Q)
    plain_Q = parts["projections"] + parts["dense"] + parts["small"]
    factor_Q = sustained_factor(b_Q)
    rest_Q = iteration.decode_s(b_Q, np.full_like(b_Q, past_tokens)) + iteration.head_s(b_Q)
    return AttentionSeconds(
        plain_Q=plain_Q * factor_Q + rest_Q + iteration.scheduler_s,
        shared_Q=parts["shared"] * factor_Q,
    )


def expert_seconds(
    decoder: Decoder,
    formats: Formats,
    tokens_Q: Floats,
    *,
    devices: int,
    machine: ServingMachine,
    engine: str,
    activated: Activated = uniform_activated,
) -> Floats:
    """Price router and routed experts of all layers on the most-loaded expert device."""
    own, software = experts_of(decoder), engine
    routed = routed_experts(
        decoder, formats, tokens_Q, tensor=1, expert=devices, software=software, load=LOAD
    )
    kernel_Q = machine.seconds(routed)
    rate = STREAM_RATIO * machine.sheet.memory_bytes_per_s
    read_Q = activated(own, tokens_Q, devices) * expert_bytes(decoder, formats) / rate + LAUNCH_S
    router = gemm(tokens_Q, own.router_outputs, decoder.hidden, dtype=BF16)
    router_Q = machine.seconds(replace(router, software=software))
    each_Q = (router_Q + np.maximum(kernel_Q, read_Q)) * sustained_factor(tokens_Q / devices)
    return np.asarray(decoder.moe_layers * each_Q)


def step_seconds(
    attention: AttentionSeconds, experts_Q: Floats, all_to_all_Q: Floats, *, layers: int
) -> Floats:
    """Add up a step; `all_to_all_Q` is of one layer, the rest of all."""
    return attention.plain_Q + np.maximum(attention.shared_Q, layers * all_to_all_Q) + experts_Q


def attention_cache_tokens(iteration: Iteration, *, memory_bytes: float) -> float:
    """Tokens that one attention device holds; not above 0 where its weights do not fit."""
    own = experts_of(iteration.decoder)
    return kv_tokens(
        replace(iteration.decoder, experts=replace(own, num=0)),
        iteration.formats,
        InstanceDegrees(),
        memory_bytes=memory_bytes,
    )


def least_expert_devices(decoder: Decoder, formats: Formats, *, memory_bytes: float) -> int | None:
    """Expert devices that hold every expert once; None where a device holds not one of a layer."""
    slots = expert_slots(decoder, formats, memory_bytes=memory_bytes)
    return -(-experts_of(decoder).num // slots) if slots > 0 else None


def expert_slots(decoder: Decoder, formats: Formats, *, memory_bytes: float) -> int:
    """Experts of every layer that an expert device holds."""
    room = FULL_RATIO * memory_bytes - RESERVE_BYTES
    return max(int(room // (decoder.moe_layers * expert_bytes(decoder, formats))), 0)


def activation_bytes(decoder: Decoder) -> float:
    """Of one token's activations."""
    return ELEMENT_BYTES * decoder.hidden


def experts_of(decoder: Decoder) -> Experts:
    """Return the experts of a model that has some.

    Raises:
        ValueError: it is dense.
    """
    if decoder.experts is None:
        raise ValueError(f"{decoder.name}: a dense model has no experts to disaggregate")
    return decoder.experts
