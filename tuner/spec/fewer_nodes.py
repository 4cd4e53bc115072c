"""The spec of a plan's layout for one node less: as a value, and as the file that makes it.

All nodes that are left are the pool's, and those that the layout has no use for its spares. Which
node is missing is not known beforehand, so that measured links between nodes do not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tuner.spec.goal import ONE_LEVEL
from tuner.spec.spec import Spec
from tuner.spec.spec_file import read_spec_keys

_OF_HOSTS: Final = ("host_interval", "replicas", "host_memory")
"""Keys of `checkpoint` that need a level on hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerNodesSpec:
    """What the spec of fewer nodes changes."""

    nodes: int
    """Of the pool."""
    spare_nodes: int
    limits: Mapping[str, tuple[int, ...]]
    """Of the search, by decision: what must stay for a checkpoint to be restored."""
    is_shared_only: bool = False
    """Checkpoints are kept on shared storage alone, as those of all nodes."""


def with_fewer_nodes(spec: Spec, fewer: FewerNodesSpec) -> Spec:
    """Return the spec on fewer nodes of its only pool; a job that waits for repairs."""
    (pool,) = spec.cluster.pools
    smaller = pool.model_copy(update={"nodes": fewer.nodes, "link_matrix": None})
    stated = spec.goal.reliability
    assert stated is not None
    update: dict[str, Any] = {"spare_nodes": fewer.spare_nodes, "without_spare": "wait"}
    if fewer.is_shared_only:
        shared_only = {"levels": ONE_LEVEL, **dict.fromkeys(_OF_HOSTS), "replicas": "auto"}
        update["checkpoint"] = stated.checkpoint.model_copy(update=shared_only)
    own = stated.model_copy(update=update)
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"pools": (smaller,)}),
            "goal": spec.goal.model_copy(update={"reliability": own}),
            "search": spec.search.model_copy(update=dict(fewer.limits)),
        }
    )


def fewer_nodes_yaml(spec: Spec, fewer: FewerNodesSpec) -> bytes:
    """Return the file of that spec: the keys of the one it was made from, changed.

    Raises:
        SpecError: that file can no longer be read.
    """
    keys: dict[str, Any] = read_spec_keys(spec.path)
    (pool,) = keys["cluster"]["pools"]
    pool["nodes"] = fewer.nodes
    pool.pop("link_matrix", None)
    stated = keys["goal"]["reliability"]
    stated["spare_nodes"] = fewer.spare_nodes
    stated.pop("without_spare", None)
    if fewer.is_shared_only:
        for name in ("levels", *_OF_HOSTS):
            stated.get("checkpoint", {}).pop(name, None)
    if fewer.limits:
        limits = {name: list(values) for name, values in fewer.limits.items()}
        keys["search"] = (keys.get("search") or {}) | limits
    return yaml.safe_dump(keys, sort_keys=False).encode()
