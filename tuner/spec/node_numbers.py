"""A spec with other numbers of nodes in its only pool: as a value, and as the file that says it.

Both are the spec with values at paths changed. For a plan's layout of one node less, all nodes that
are left are the pool's, and those that the layout has no use for its spares. Which node is missing
is not known beforehand, so that measured links between nodes do not apply.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from tuner.spec.spec import Spec
from tuner.spec.spec_file import read_spec_keys

Values = Mapping[str, Any]
"""Values by dotted path; the step into the only pool is 0."""

DEFAULT: Final = object()
"""Value of a field that the file leaves out."""

ON_SHARED_STORAGE: Final[Values] = {
    f"goal.reliability.checkpoint.{name}": DEFAULT
    for name in ("levels", "host_interval", "replicas", "host_memory")
}
"""Values for checkpoints on shared storage alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNumbers:
    """The nodes of a pool."""

    nodes: int
    """All nodes of the pool."""
    spare_nodes: int
    """Nodes of the pool that no layout uses, counted in `nodes`."""
    others: Values = field(default_factory=dict)
    """Further values that the numbers need."""

    @property
    def values(self) -> Values:
        """Return everything that changes in the spec."""
        return {
            "cluster.pools.0.nodes": self.nodes,
            "goal.reliability.spare_nodes": self.spare_nodes,
            "goal.reliability.objective": DEFAULT,
            **self.others,
        }


def fewer_nodes(
    nodes: int, *, spare_nodes: int, limits: Mapping[str, tuple[int, ...]], is_shared_only: bool
) -> NodeNumbers:
    """Return the numbers for a job that waits for repairs, on one node less than before.

    Args:
        nodes: that are left.
        spare_nodes: nodes of them that no layout uses.
        limits: allowed values by decision of the search: what must stay so that a checkpoint can be
            restored.
        is_shared_only: checkpoints are kept on shared storage alone, as those of all nodes.
    """
    others = {
        **(ON_SHARED_STORAGE if is_shared_only else {}),
        "cluster.pools.0.link_matrix": DEFAULT,
        "goal.reliability.without_spare": DEFAULT,
        **{f"search.{name}": allowed for name, allowed in limits.items()},
    }
    return NodeNumbers(nodes=nodes, spare_nodes=spare_nodes, others=others)


def changed_spec(spec: Spec, values: Values) -> Spec:
    """Return the spec with these values."""
    for path, value in values.items():
        spec = _changed(spec, path.split("."), value)
    return spec


def _changed(record: Any, path: list[str], value: Any) -> Any:
    name, *inner = path
    if isinstance(record, tuple):
        (only,) = record
        return (_changed(only, inner, value),)
    if inner:
        value = _changed(getattr(record, name), inner, value)
    elif value is DEFAULT:
        value = type(record).model_fields[name].get_default(call_default_factory=True)
    return record.model_copy(update={name: value})


def changed_yaml(spec: Spec, values: Values) -> bytes:
    """Return the file that the spec was read from, with these values.

    Raises:
        SpecError: that file can no longer be read.
    """
    keys = read_spec_keys(spec.path)
    for path, value in values.items():
        _change_keys(keys, path.split("."), value)
    return yaml.safe_dump(keys, sort_keys=False).encode()


def _change_keys(keys: Any, path: list[str], value: Any) -> None:
    name, *inner = path
    if isinstance(keys, list):
        _change_keys(keys[0], inner, value)
    elif inner:
        mapping = keys.get(name) or {}
        _change_keys(mapping, inner, value)
        if mapping:
            keys[name] = mapping
    elif value is DEFAULT:
        keys.pop(name, None)
    else:
        keys[name] = list(value) if isinstance(value, tuple) else value
