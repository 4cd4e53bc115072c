"""Groups of a deployment on machines, and the names of their files.

A group's name is its role, with its pool where several pools have that role and with a number where
that is ambiguous: `prefill`, `decode-h100`, `decode-h100-2`. It serves as a file's name, a
Kubernetes name and a label.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.rules import nodes_needed
from tuner.catalog.serve_rules.steps import cache_kind
from tuner.catalog.serve_rules.vendor_pairs import portable_backend
from tuner.catalog.serve_rules.vendors import TRAITS, VendorTraits
from tuner.config.serve import Instances, PlannedKvTransfer, Role
from tuner.devices.datasheet import Vendor
from tuner.engines.serving.releases import pool_vendor, release_on
from tuner.plans.serve import VerifiedServing
from tuner.spec.cluster import Pool

MACHINE: Final = "machine"
"""Name of what starts all instances on the machines that they share, with their router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Equal instances and the machines of each."""

    name: str
    group: Instances
    nodes: int
    """Machines of one instance."""
    first: int
    """Instances of the groups before it."""

    @property
    def devices_per_node(self) -> int:
        """Devices of one instance on each of its machines."""
        return self.group.devices // self.nodes


def group_shapes(verified: VerifiedServing) -> tuple[GroupShape, ...]:
    """Return the groups of the decision in its order."""
    groups = verified.decision.instances
    sizes = {pool.name: pool.devices_per_node for pool in verified.plan.cluster.pools}
    shapes, first = [], 0
    for group, name in zip(groups, _names(groups), strict=True):
        fewest = nodes_needed(group.devices, devices_per_node=sizes[group.pool])
        nodes = group.stage_machines if group.stage_machines > 1 else fewest
        shapes.append(GroupShape(name=name, group=group, nodes=nodes, first=first))
        first += group.count
    return tuple(shapes)


def group_release(verified: VerifiedServing, group: Instances) -> ServingCapabilities:
    """Return the engine's release on a group's devices."""
    return release_on(verified.plan.goal, _pool(verified, group.pool))


def vendor_traits(verified: VerifiedServing, group: Instances) -> VendorTraits:
    """Return the vendor's settings for launchers."""
    return TRAITS[pool_vendor(_pool(verified, group.pool))]


def vendors(verified: VerifiedServing) -> tuple[Vendor, ...]:
    """Return the vendors of the devices, in the order of the decision."""
    per_group = (pool_vendor(_pool(verified, group.pool)) for group in verified.decision.instances)
    return tuple(dict.fromkeys(per_group))


def portable(verified: VerifiedServing, kv_transfer: PlannedKvTransfer) -> str | None:
    """Return the attention backend that both sides must run, where their vendors differ."""
    named = (kv_transfer.from_pool, kv_transfer.to_pool)
    known = {pool.name: pool for pool in verified.plan.cluster.pools}
    releases = [release_on(verified.plan.goal, known[name]) for name in named if name in known]
    if len({end.vendor for end in releases}) < 2:
        return None
    return portable_backend(releases[0], releases[1], cache=cache_kind(verified.plan.model))


def _pool(verified: VerifiedServing, name: str) -> Pool:
    return next(pool for pool in verified.plan.cluster.pools if pool.name == name)


def url_list(role: Role) -> str | None:
    """Return the router's list for a role; None where the router sends no requests.

    With AFD, attention servers decode and FFN servers take no requests.
    """
    if role is Role.EXPERT:
        return None
    return {Role.AGGREGATED: "WORKER", Role.ATTENTION: "DECODE"}.get(role, role.name)


def transfer(verified: VerifiedServing) -> PlannedKvTransfer | None:
    """Return the KV transfer from prefill to decode; all of a decision have the same form."""
    return next(iter(verified.decision.handovers), None)


def one_machine(verified: VerifiedServing) -> GroupShape | None:
    """Return all instances as one, where KV caches take the links inside a machine; else None.

    Processes copy between devices where they share a container, with all of the devices. Instances
    whose stages are spread share several machines, each of them as the others.
    """
    if all(kv_transfer.link == "network" for kv_transfer in verified.decision.handovers):
        return None
    first = group_shapes(verified)[0]
    whole = {"role": Role.AGGREGATED, "devices": verified.decision.num_devices, "count": 1}
    return replace(first, name=MACHINE, group=first.group.model_copy(update=whole))


def link_environment(verified: VerifiedServing, group: Instances) -> Mapping[str, str]:
    """Return the variables with which a group's connector takes the links inside a machine."""
    kv_transfer = transfer(verified)
    if kv_transfer is None or kv_transfer.link == "network" or group.role is Role.EXPERT:
        return {}
    link = group_release(verified, group).node_links.get(kv_transfer.connector)
    return {} if link is None else link.environment


def is_disaggregated(verified: VerifiedServing) -> bool:
    """Say whether prefill and decode run on separate instances."""
    return any(group.role is Role.PREFILL for group in verified.decision.instances)


def are_heterogeneous(verified: VerifiedServing) -> bool:
    """Say whether some role has instances of several kinds."""
    kinds = {
        (group.role, group.model_copy(update={"count": 1})) for group in verified.decision.instances
    }
    return len(kinds) > len({role for role, _ in kinds})


def draft_tokens_for(verified: VerifiedServing, group: Instances) -> int:
    """Return the draft tokens of an instance.

    A prefill instance drafts nothing, but fills and transfers the draft layer's KV cache.
    """
    if group.role is not Role.PREFILL:
        return group.draft_tokens
    return max(peer.draft_tokens for peer in verified.decision.instances)


def needs_draft_model(verified: VerifiedServing) -> bool:
    """Say whether the weights of the draft layer are a separate checkpoint."""
    speculative = verified.plan.goal.speculative
    drafts = any(group.draft_tokens for group in verified.decision.instances)
    return drafts and speculative is not None and speculative.method == "eagle"


def dns_label(text: str, *, longest: int = 40) -> str:
    """Return the text as a Kubernetes name: lower-case letters, digits and dashes (RFC 1123)."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:longest].strip("-") or "model"


def pool_labels(verified: VerifiedServing) -> dict[str, str]:
    """Return a unique label for each pool in use."""
    labels: dict[str, str] = {}
    for pool in sorted({group.pool for group in verified.decision.instances}):
        labels[pool] = _unique_name(dns_label(pool), taken=labels.values())
    return labels


def _unique_name(name: str, *, taken: Collection[str]) -> str:
    numbered = (name, *(f"{name}-{number}" for number in range(2, len(taken) + 3)))
    return next(candidate for candidate in numbered if candidate not in taken)


def _names(groups: tuple[Instances, ...]) -> tuple[str, ...]:
    roles = [group.role.value for group in groups]
    pooled = [
        role if roles.count(role) == 1 else f"{role}-{dns_label(group.pool, longest=12)}"
        for role, group in zip(roles, groups, strict=True)
    ]
    names: list[str] = []
    for name in pooled:
        names.append(_unique_name(name, taken=names))
    return tuple(names)
