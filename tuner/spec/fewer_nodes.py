"""The spec of a plan's layout for one node less: as a value, and as the file that makes it.

All nodes that are left are the pool's, and those that the layout has no use for its spares. Which
node is missing is not known beforehand, so that measured links between nodes do not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tuner.spec.goal import ONE_LEVEL
from tuner.spec.node_numbers import NodeNumbers, node_numbers_keys, with_node_numbers
from tuner.spec.spec import Spec

_OF_HOSTS: Final = ("host_interval", "replicas", "host_memory")
"""Keys of `checkpoint` that need a level on hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerNodesSpec(NodeNumbers):
    """Changes to a spec for running on one node less."""

    limits: Mapping[str, tuple[int, ...]]
    """Allowed values by decision of the search: what must stay so that a checkpoint can be
    restored."""
    is_shared_only: bool = False
    """Checkpoints are kept on shared storage alone, as those of all nodes."""


def with_fewer_nodes(spec: Spec, fewer: FewerNodesSpec) -> Spec:
    """Return the spec on fewer nodes of its only pool; a job that waits for repairs."""
    if fewer.is_shared_only:
        spec = with_levels(spec, ONE_LEVEL)
    spec = with_node_numbers(spec, fewer)
    smaller = spec.cluster.pools[0].model_copy(update={"link_matrix": None})
    stated = spec.goal.reliability
    assert stated is not None
    reliability = stated.model_copy(update={"without_spare": "wait"})
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"pools": (smaller,)}),
            "goal": spec.goal.model_copy(update={"reliability": reliability}),
            "search": spec.search.model_copy(update=dict(fewer.limits)),
        }
    )


def with_levels(spec: Spec, levels: tuple[str, ...]) -> Spec:
    """Return the spec with checkpoints on these levels."""
    stated = spec.goal.reliability
    assert stated is not None
    update: dict[str, Any] = {"levels": levels}
    if levels == ONE_LEVEL:
        update |= {**dict.fromkeys(_OF_HOSTS), "replicas": "auto"}
    checkpoint = stated.checkpoint.model_copy(update=update)
    reliability = stated.model_copy(update={"checkpoint": checkpoint})
    return spec.model_copy(
        update={"goal": spec.goal.model_copy(update={"reliability": reliability})}
    )


def fewer_nodes_yaml(spec: Spec, fewer: FewerNodesSpec) -> bytes:
    """Return the file of that spec: the keys of the one it was made from, changed.

    Raises:
        SpecError: that file can no longer be read.
    """
    keys = node_numbers_keys(spec, fewer)
    keys["cluster"]["pools"][0].pop("link_matrix", None)
    stated = keys["goal"]["reliability"]
    stated.pop("without_spare", None)
    if fewer.is_shared_only:
        for name in ("levels", *_OF_HOSTS):
            stated.get("checkpoint", {}).pop(name, None)
    if fewer.limits:
        limits = {name: list(values) for name, values in fewer.limits.items()}
        keys["search"] = (keys.get("search") or {}) | limits
    return yaml.safe_dump(keys, sort_keys=False).encode()
