"""A spec with one limit changed: its keys after the change, and the change in words.

Numbers that the spec leaves to the datasheet (memory of a device, its NIC) start from there. A
change of pools applies to every pool unless it names one.

Not covered: links inside a node, which no spec states; link matrices, which are for one number of
nodes and are refused with another.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from tuner.devices.datasheet import Datasheet
from tuner.errors import TunerError
from tuner.goals.goal import PlannedSpec
from tuner.plans.what_if import KEYS, LimitChange, moved
from tuner.spec.cluster import Pool
from tuner.spec.files import shown_path
from tuner.spec.serving.trace_summary import summarise_trace
from tuner.spec.spec_file import Keys
from tuner.units import (
    format_bytes,
    format_bytes_per_s,
    format_s,
    parse_bytes,
    parse_bytes_per_s,
    parse_per_s,
    parse_seconds,
    parse_whole,
)

Notes = list[str]
"""The changes made, in words."""


def apply_change(
    spec: PlannedSpec, change: LimitChange, *, able: Collection[str]
) -> tuple[Keys, str]:
    """Return the keys of the changed spec, and the change in words.

    Args:
        spec: as planned.
        change: of one limit.
        able: the limits that specs of this goal have (`Goal.changes`).

    Raises:
        TunerError: the spec has no such limit, or the change makes it zero or infinite.
    """
    keys: Keys = copy.deepcopy(dict(spec.keys))
    if change.key not in able:
        known = ", ".join(key for key in KEYS if key in able)
        raise TunerError(f"{change.key} is no part of this goal; {known} are")
    if change.pool is not None and change.key not in POOL_KEYS:
        raise TunerError(f"{change.key} is not of a pool; leave out @{change.pool}")
    notes: Notes = []
    _CHANGES[change.key](spec, change, keys, notes)
    return keys, "; ".join(notes)


def _nodes(spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    if "ranks" in keys["goal"]:
        _more_ranks(spec, change, keys, notes)
        return
    for pool, written in _named_pools(spec, change, keys):
        nodes = _whole(change, pool.nodes)
        written["nodes"] = nodes
        notes.append(f"{nodes} nodes of {pool.name} instead of {pool.nodes}")


def _more_ranks(spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    """Add or remove expert-parallel ranks with their nodes; keep the slots per rank."""
    goal = keys["goal"]
    ranks_per_node = goal.get("ranks_per_node") or goal["ranks"]
    if spec.cluster is not None and goal.get("ranks_per_node") is None:
        ranks_per_node = min(goal["ranks"], spec.cluster.pools[0].devices_per_node)
    before = goal["ranks"] // ranks_per_node
    after = _whole(change, before)
    goal |= {"ranks": after * ranks_per_node, "ranks_per_node": ranks_per_node}
    if spec.cluster is not None:
        first = keys["cluster"]["pools"][0]
        first["nodes"] = max(first.get("nodes", 1), after)
    notes.append(f"{after} nodes ({after * ranks_per_node} ranks) instead of {before}")


def _memory(spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    for pool, written in _named_pools(spec, change, keys):
        stated = pool.memory_per_device or spec.memory_bytes.get(pool.name)
        before = stated or _sheet(pool, change).memory_bytes
        after = _quantity(change, before, parse_bytes)
        written["memory_per_device"] = f"{round(after)}B"
        notes.append(
            f"{format_bytes(after)} a device of {pool.name} instead of {format_bytes(before)}"
        )


def _bandwidth(spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    if spec.is_reference:
        raise TunerError("the links were measured with the profile; the spec does not state them")
    for pool, written in _named_pools(spec, change, keys):
        before = pool.nic or _sheet(pool, change).scale_out_bytes_per_s
        after = _quantity(change, before, parse_bytes_per_s)
        written["nic"] = _rate(after)
        notes.append(
            f"{format_bytes_per_s(after)} per NIC of {pool.name} instead of"
            f" {format_bytes_per_s(before)}"
        )
    cluster = spec.cluster
    for link, written in zip(
        () if cluster is None or change.pool else cluster.links,
        keys.get("cluster", {}).get("links", []),
        strict=False,
    ):
        after = _quantity(change, link.bandwidth, parse_bytes_per_s)
        written["bandwidth"] = _rate(after)
        notes.append(f"{format_bytes_per_s(after)} between {' and '.join(link.between)}")


def _rate(value_bytes_per_s: float) -> str:
    """Format a bandwidth so that it parses to the same number."""
    return f"{value_bytes_per_s!r}B/s"


def _of_goal(
    _spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes, *, name: str, words: str
) -> None:
    of = keys["goal"]
    if isinstance(of[name], dict):
        # A batch in documents, rows or tokens.
        of, (name,) = of[name], of[name]
        words = f"{name} a step"
    _count(of, name, change, notes, words)


def _request_rate(_spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    goal = keys["goal"]
    traffic = goal["traffic"]
    if goal.get("objective") == "rate":
        raise TunerError(
            f"rate={change.value}: with goal.objective rate, the rate is what the devices serve at"
            " most; change nodes, lengths or targets, or write a spec of another objective"
        )
    if "concurrency" in traffic:
        _loop_concurrency(traffic, change, notes)
        return
    before = _stated_rate(traffic)
    after = _quantity(change, before, parse_per_s)
    traffic["rate"] = f"{after!r}/s"
    how = ""
    if "trace" in traffic and "arrival" not in traffic:
        how = f", the trace's time {'compressed' if after > before else 'stretched'}"
    notes.append(f"{after:.4g} requests/s instead of {before:.4g}{how}")


def _stated_rate(traffic: Mapping[str, Any]) -> float:
    """Return requests per second: as stated, else those of the recorded trace."""
    if "rate" in traffic:
        return parse_per_s(traffic["rate"])
    trace = Path(traffic["trace"])
    rate = summarise_trace(trace, rng=np.random.default_rng(0)).rate_per_s
    if rate == float("inf"):
        raise TunerError(f"{shown_path(trace)}: all requests come at once, which is no rate")
    return rate


def _loop_concurrency(traffic: Keys, change: LimitChange, notes: Notes) -> None:
    """Change the concurrency of a closed loop, which its rate is proportional to (Little's law)."""
    is_share = change.value[:1] in ("x", "/") or change.value.endswith("%")
    factor = moved(change, 1.0) if is_share else None
    if factor is None:
        raise TunerError(
            f"a closed loop states no rate that {change.value} could replace; x2, /2 and +20% move"
            " the requests under way, which its rate follows"
        )
    before = traffic["concurrency"]
    traffic["concurrency"] = max(1, round(before * factor))
    notes.append(
        f"{traffic['concurrency']} requests under way instead of {before}, which the rate of a"
        " closed loop follows"
    )


def _concurrency(_spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    traffic = keys["goal"]["traffic"]
    if "concurrency" not in traffic:
        raise TunerError("the traffic is an open load; change its rate")
    _count(traffic, "concurrency", change, notes, "requests under way")


def _length(
    _spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes, *, name: str, of: str
) -> None:
    traffic = keys["goal"]["traffic"]
    value = traffic.get(name)
    law, key = (value, "mean") if isinstance(value, dict) else (traffic, name)
    if not isinstance(law.get(key), int | float):
        raise TunerError(f"goal.traffic.{name} has no mean to change; write another spec")
    before = law[key]
    law[key] = _whole(change, before)
    notes.append(f"{law[key]} {of} instead of {before:g}{' (mean)' if law is value else ''}")


def _targets(
    _spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes, *, name: str
) -> None:
    targets = keys["goal"].get("slo", {}).get(name, {})
    if not targets:
        raise TunerError(f"the spec sets no target of {name}")
    for share, text in targets.items():
        before = parse_seconds(text)
        after = _quantity(change, before, parse_seconds)
        targets[share] = f"{after!r}s"
        notes.append(f"{name} {share} of {format_s(after)} instead of {format_s(before)}")


def _slots(_spec: PlannedSpec, change: LimitChange, keys: Keys, notes: Notes) -> None:
    goal = keys["goal"]
    slots = goal.get("slots_per_rank")
    if not isinstance(slots, int):
        raise TunerError("slots of a rank can be changed where slots_per_rank is one number")
    _count(goal, "slots_per_rank", change, notes, "slots a rank")


def _count(of: Keys, name: str, change: LimitChange, notes: Notes, words: str) -> None:
    before = of[name]
    of[name] = _whole(change, before)
    notes.append(f"{of[name]} {words} instead of {before}")


def _whole(change: LimitChange, before: float) -> int:
    """Return the changed value as a whole number; at least 1.

    Raises:
        TunerError: the change states no whole number.
    """
    after = moved(change, before)
    if after is not None:
        return max(1, round(after))
    number = parse_whole(change.value)
    if not number:
        raise TunerError(f"{change.value[:40]!r} is not a whole number")
    return number


def _quantity(change: LimitChange, before: float, parse: Callable[[str], float]) -> float:
    after = moved(change, before)
    if after is not None:
        return after
    try:
        return parse(change.value)
    except ValueError as error:
        raise TunerError(str(error)) from error


def _named_pools(spec: PlannedSpec, change: LimitChange, keys: Keys) -> Iterator[tuple[Pool, Keys]]:
    """Yield the pools that a change applies to, each with its keys in the spec.

    Raises:
        TunerError: there are none, or none of that name.
    """
    if spec.cluster is None:
        raise TunerError("the spec names no machines (cluster)")
    pools = spec.cluster.pools
    names = [pool.name for pool in pools]
    if change.pool is not None and change.pool not in names:
        raise TunerError(f"no pool is named {change.pool!r}; pools: {', '.join(names)}")
    for pool, written in zip(pools, keys["cluster"]["pools"], strict=True):
        if change.pool in (None, pool.name):
            yield pool, written


def _sheet(pool: Pool, change: LimitChange) -> Datasheet:
    if pool.device is None:
        raise TunerError(
            f"pool {pool.name!r} states neither its {change.key} nor a 'device' that would"
        )
    return pool.sheet


POOL_KEYS: Final = ("nodes", "memory", "bandwidth")
_CHANGES: Final[Mapping[str, Callable[[PlannedSpec, LimitChange, Keys, Notes], None]]] = {
    "nodes": _nodes,
    "memory": _memory,
    "bandwidth": _bandwidth,
    "batch": partial(_of_goal, name="global_batch_size", words="sequences a step"),
    "sequence-length": partial(_of_goal, name="sequence_length", words="tokens a sequence"),
    "rate": _request_rate,
    "concurrency": _concurrency,
    "input-tokens": partial(_length, name="input_tokens", of="tokens a prompt"),
    "output-tokens": partial(_length, name="output_tokens", of="tokens an answer"),
    "ttft": partial(_targets, name="ttft"),
    "tpot": partial(_targets, name="tpot"),
    "slots": _slots,
}
