"""Attention-FFN disaggregation (AFD): what a plugin launches, and its rules.

An AFD unit is an instance of the role `attention` with the instance of the role `expert` that
serves it: groups of the two roles pair up in the order of the decision, instance by instance. Ranks
are devices: A of the attention instance, F of the FFN server, which has the experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tuner.config.serve import Instances
from tuner.devices.datasheet import Generation, Vendor
from tuner.spec.model import ModelSpec
from tuner.spec.serving.goal import ServeGoal

_ROLES: Final = ("attention", "expert")


@dataclass(frozen=True, slots=True, kw_only=True)
class AfdConnector:
    """A plugin's connector for hidden states between attention and FFN ranks."""

    name: str
    """Name in the configuration."""
    platform: str
    """`cuda`, or the accelerator that it is built for."""
    stage: str
    """Phases that it is for, by the plugin's documents."""
    graphs: str
    """CUDA graph mode; empty: eager."""
    least_attention_per_ffn: int = 0
    """Least attention ranks per FFN rank; 0: any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfdCapabilities:
    """Attention-FFN disaggregation that one commit of a plugin launches."""

    plugin: str
    """Repository on GitHub."""
    commit: str
    connectors: tuple[AfdConnector, ...]
    architectures: frozenset[str]
    """Models that have a wrapper for both roles."""
    plain_experts: frozenset[str]
    """Models without sequence-parallel experts, which vLLM uses with both tensor and data ranks."""

    def connector(self, generation: Generation | None) -> AfdConnector | None:
        """Return the connector of such devices, or None.

        A device of unknown generation counts as NVIDIA's.
        """
        is_nvidia = generation is None or generation.vendor is Vendor.NVIDIA
        platform = "cuda" if is_nvidia else ""
        return next(
            (connector for connector in self.connectors if connector.platform == platform), None
        )


def side_refusals(
    afd: AfdCapabilities,
    group: Instances,
    *,
    model: ModelSpec,
    goal: ServeGoal,
    generation: Generation | None,
) -> Iterator[str]:
    """Yield why the plugin cannot run one server of a unit."""
    if afd.connector(generation) is None:
        names = ", ".join(
            f"{connector.name} ({connector.platform})" for connector in afd.connectors
        )
        yield f"no connector runs on {generation} devices; there are {names}"
    if model.architecture not in afd.architectures:
        known = ", ".join(sorted(afd.architectures))
        yield f"no wrapper splits {model.architecture}; there are wrappers for {known}"
    if group.pp > 1:
        yield f"pp {group.pp} must be 1: ranks are counted by data and tensor ranks only"
    if group.draft_tokens:
        yield f"draft_tokens {group.draft_tokens} must be 0: no draft layer has a wrapper"
    if goal.placement is not None:
        yield "a placement of experts needs EPLB, which the plugin refuses; plan without"
    spreads = group.attention_tp > 1 and group.attention_dp > 1
    if spreads and model.architecture in afd.plain_experts:
        yield (
            f"attention_tp {group.attention_tp} or attention_dp {group.attention_dp} must be 1:"
            f" {model.architecture} runs without sequence-parallel experts"
        )
    if group.role == "expert" and group.a2a_backend not in ("none", "allgather"):
        yield f"a2a_backend {group.a2a_backend} of the FFN server: no recipe runs it; use allgather"


def afd_pairs(
    groups: Sequence[Instances],
) -> tuple[tuple[Instances, Instances], ...]:
    """Return the groups of attention instances with those of their FFN servers, in order."""
    attention, expert = ([group for group in groups if group.role == role] for role in _ROLES)
    return tuple(zip(attention, expert, strict=False))


def afd_refusals(
    afd: AfdCapabilities, groups: Sequence[Instances], *, generations: Mapping[str, Generation]
) -> Iterator[str]:
    """Yield why the plugin cannot connect the servers of a decision.

    Args:
        afd: the plugin.
        groups: of all roles.
        generations: of the devices, by pool.
    """
    attention, expert = ([group.count for group in groups if group.role == role] for role in _ROLES)
    if attention != expert:
        yield (
            "every attention instance has one FFN server: groups of"
            f" {attention} attention and {expert} expert instances do not pair up"
        )
    for pair in afd_pairs(groups):
        yield from pair_refusals(afd, *pair, generations=generations)


def pair_refusals(
    afd: AfdCapabilities,
    attention: Instances,
    expert: Instances,
    *,
    generations: Mapping[str, Generation],
) -> Iterator[str]:
    """Yield why the plugin cannot run one unit, in addition to its servers' rules."""
    ranks = f"{attention.devices} attention and {expert.devices} expert devices"
    if attention.pool != expert.pool:
        yield f"AFD units over two pools ({attention.pool}, {expert.pool}): no recipe runs one"
    connector = afd.connector(generations.get(attention.pool))
    least = 0 if connector is None else connector.least_attention_per_ffn
    if connector is not None and attention.devices < least * expert.devices:
        yield (f"{connector.name} needs num_attention_ranks to be at least num_ffn_ranks: {ranks}")
    if max(attention.attention_tp, expert.attention_tp) > 1 and (
        attention.attention_tp != expert.attention_tp or attention.devices != expert.devices
    ):
        yield (
            f"{ranks}, tensor degrees {attention.attention_tp} and {expert.attention_tp}: tensor"
            " ranks of an FFN server must get the same tokens, so both sides must be identical"
        )
    if attention.two_batch_overlap != expert.two_batch_overlap:
        yield "both servers of an AFD unit use two_batch_overlap, or neither does"
