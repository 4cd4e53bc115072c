"""A decode step of AFD (attention-FFN disaggregation), as vLLM's plugin runs it.

    A attention ranks of m tokens each, F ranks of the FFN server, r = A / F, h hidden size
    own(m)        projections, attention, two norms a layer, head, scheduler
    remote(m)     the FFN block of every layer on a server of F data ranks with r m tokens each:
                  dense network or router, experts, shared experts, and the server's own all-to-all
    passed(m)     2 k (a + 2 m h / W): k messages one after the other, to the FFN rank and back;
                  k = r where r >= 1; where r < 1, 1 / r messages of r m tokens

    one batch     T = own(m) + remote(m) + passed(m), added up: the connector is synchronous
    two halves    T = own + f + max(0, 2 f L - f - own) of halves, f = remote + passed of one layer
                  and half, L layers: while one half is away the other's attention runs

The plugin sends the hidden states of every layer, layers with dense networks too, to one FFN rank;
that rank's server finds the experts by its own all-gather and reduce-scatter. So tokens travel
twice, unlike in Janus (arXiv:2512.13525), whose shared experts besides run on attention devices
while tokens travel; here they are part of the FFN block and nothing but the other half hides it.

Source: vllm-project/afd-plugin at 1de1a99, read at the stored commits nearest to it:
afd_plugin/connectors/gpu/p2p.py (`recv_attn_output` receives from its peers in order and
concatenates, `send_ffn_output` splits), v1/worker/ffn_model_runner.py (`_ffn_forward`: all layers,
all halves in turn), model_executor/remote_moe.py (`remote_ffn_forward`: send, yield, receive),
model_executor/models/{deepseek_v2,qwen3_moe}.py (weights by role). Messages are Hockney's latency
and bandwidth, as between pipeline stages (`Iteration.passed_s`); the FFN block is that of an
instance that has attention too (iteration.py), so that modes are comparable.

Valid: decode steps that CUDA graphs of both roles hold. No run of the plugin was compared. Letters:
Q query points. Not covered: the control message before each step and the synchronisation of the FFN
worker behind it; steps without graphs; FFN ranks that get unequal numbers of peers.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.costs.serve.all_to_all import ELEMENT_BYTES
from tuner.costs.serve.cache_capacity import room_of
from tuner.costs.serve.capacity import added_weight_bytes
from tuner.costs.serve.decoder import Decoder, Experts
from tuner.costs.serve.iteration import Iteration, TokenSeconds, sustained_factor
from tuner.costs.serve.memory import attention_weight_bytes, weight_bytes
from tuner.costs.serve.reserve import step_reserve
from tuner.prices.peer_link import PeerLink
from tuner.prices.serve.curves import Floats

NORMS: Final = 2
"""Small kernels of a layer that stay with attention. As many that concatenate and split tokens join
those of the FFN block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteFfnIteration(Iteration):
    """An attention server beside its FFN server; its decoder is `attention_only`."""

    ffn: Iteration
    """The server of the networks, with its degrees; its decoder is the whole model."""
    link: PeerLink

    @property
    def nccl_ranks(self) -> int:
        """Ranks of both servers, whose messages NCCL passes inside the CUDA graphs of a step."""
        return self.degrees.devices + self.ffn.degrees.devices

    @property
    def peers(self) -> float:
        """Attention ranks of an FFN rank; below 1 where there are more FFN ranks."""
        return self.degrees.devices / self.ffn.degrees.devices

    def linear_parts(self, m_Q: Floats) -> dict[str, Floats]:
        """Seconds of everything that depends on the tokens of the step alone, by part."""
        parts, remote = self._own_parts(m_Q), self._remote_parts(m_Q)
        parts["small"] = parts["small"] + remote.pop("small")
        return parts | remote

    def linear_s(self, m_Q: Floats) -> Floats:
        """Return the seconds of all parts, at the clocks that the devices of each role keep."""
        split = self.linear_split(m_Q)
        return np.asarray(split.compute_Q + split.all_to_all_Q)

    def linear_split(self, m_Q: Floats) -> TokenSeconds:
        """Split the seconds of attention devices from those of the FFN block and its messages."""
        own_Q = np.sum(list(self._own_parts(m_Q).values()), axis=0) * sustained_factor(m_Q)
        at_ffn_Q = self._ffn_tokens(m_Q)
        remote_Q = np.sum(list(self._remote_parts(m_Q).values()), axis=0)
        return TokenSeconds(
            dense_Q=np.zeros_like(m_Q),
            compute_Q=np.asarray(own_Q),
            all_to_all_Q=np.asarray(remote_Q * sustained_factor(at_ffn_Q)),
        )

    def _ffn_tokens(self, m_Q: Floats) -> Floats:
        """Tokens of one data rank of the FFN server: its tensor ranks get the same ones."""
        return np.asarray(m_Q * self.peers)

    def _own_parts(self, m_Q: Floats) -> dict[str, Floats]:
        layers = self.decoder.num_layers
        projections_Q = np.zeros_like(m_Q)
        for count, layer in self.attention_layers:
            projections_Q = projections_Q + count * layer.projections_s(m_Q)
        return {"projections": projections_Q, "small": layers * self._small_s(m_Q, NORMS)}

    def _remote_parts(self, m_Q: Floats) -> dict[str, Floats]:
        whole = self.ffn.linear_parts(self._ffn_tokens(m_Q))
        whole.pop("projections")
        passed_Q = self.decoder.network_layers * self._passed_layer_s(m_Q)
        return whole | {"exchange": whole["exchange"] + passed_Q}

    def _passed_layer_s(self, m_Q: Floats) -> Floats:
        """One layer's messages, to the FFN ranks and back."""
        messages = max(self.peers, 1.0 / self.peers)
        each_Q = ELEMENT_BYTES * m_Q * self.decoder.hidden * min(self.peers, 1.0)
        return 2.0 * messages * self.link.seconds(each_Q)


def attention_only(decoder: Decoder) -> Decoder:
    """Return the model as an attention server holds it: every network is away."""
    return replace(
        decoder,
        layers=tuple(replace(group, dense_ffn=0) for group in decoder.layers),
        experts=Experts(num=0, top_k=0, ffn=1),
    )


def ffn_weight_bytes(ffn: Iteration) -> float:
    """Return the bytes of weights on one device of the FFN server.

    These are networks, embedding and head, but no attention.

    Both roles load embedding and head (`_checkpoint_weight_roles` of the wrappers).
    """
    whole = weight_bytes(ffn.decoder, ffn.formats, ffn.degrees) + added_weight_bytes(ffn)
    return whole - attention_weight_bytes(ffn.decoder, ffn.formats, ffn.degrees)


def ffn_bytes(ffn: Iteration, *, step_tokens: int, running: int) -> float:
    """Return the bytes that a device of the FFN server takes, without context and communicators.

    Args:
        ffn: the server.
        step_tokens: largest step of one of its data ranks: the tokens of all its peers.
        running: most running sequences of one data rank, likewise.
    """
    reserve = step_reserve(ffn, step_tokens=step_tokens, running=running)
    return ffn_weight_bytes(ffn) + reserve.steps


def ffn_fits(ffn: Iteration, *, memory_bytes: float, step_tokens: int, running: int) -> bool:
    """Return whether an FFN server's device holds its weights beside its steps; it has no cache."""
    reserve = step_reserve(ffn, step_tokens=step_tokens, running=running)
    weights = ffn_weight_bytes(ffn)
    room = room_of(ffn.memory_rule, weights=weights, reserve=reserve, memory_bytes=memory_bytes)
    return room.left_bytes >= 0.0
