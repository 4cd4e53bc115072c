"""A spec with other numbers of nodes in its only pool: as a value, and as the file that says it."""

from dataclasses import dataclass
from typing import Any

import yaml

from tuner.spec.goal import GOODPUT
from tuner.spec.spec import Spec
from tuner.spec.spec_file import read_spec_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNumbers:
    """The nodes of a pool."""

    nodes: int
    """All nodes of the pool."""
    spare_nodes: int
    """Nodes of the pool that no layout uses, counted in `nodes`."""


def with_node_numbers(spec: Spec, numbers: NodeNumbers) -> Spec:
    """Return the spec on so many nodes, whose spares are stated."""
    (pool,) = spec.cluster.pools
    stated = spec.goal.reliability
    assert stated is not None
    reliability = stated.model_copy(
        update={"spare_nodes": numbers.spare_nodes, "objective": GOODPUT}
    )
    pools = (pool.model_copy(update={"nodes": numbers.nodes}),)
    return spec.model_copy(
        update={
            "cluster": spec.cluster.model_copy(update={"pools": pools}),
            "goal": spec.goal.model_copy(update={"reliability": reliability}),
        }
    )


def node_numbers_keys(spec: Spec, numbers: NodeNumbers) -> dict[str, Any]:
    """Return the keys of the file that the spec was read from, with these numbers.

    Raises:
        SpecError: that file can no longer be read.
    """
    keys: dict[str, Any] = read_spec_keys(spec.path)
    (pool,) = keys["cluster"]["pools"]
    pool["nodes"] = numbers.nodes
    stated = keys["goal"]["reliability"]
    stated["spare_nodes"] = numbers.spare_nodes
    stated.pop("objective", None)
    return keys


def node_numbers_yaml(spec: Spec, numbers: NodeNumbers) -> bytes:
    """Return that file.

    Raises:
        SpecError: the spec's own can no longer be read.
    """
    return yaml.safe_dump(node_numbers_keys(spec, numbers), sort_keys=False).encode()
