"""Limits that are moved in the question of a plan."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import present
from tests.rows import each_row
from tuner.errors import TunerError
from tuner.explain.changes import apply_change
from tuner.goals.goal import PlannedSpec
from tuner.goals.registry import load_goal
from tuner.plans.what_if import KEYS, LimitChange, moved, parse_changes
from tuner.spec.cluster import Cluster
from tuner.spec.fields import SpecFolder

POOLS: list[dict[str, Any]] = [
    {"name": "a", "device": "h100-sxm", "nodes": 4, "devices_per_node": 8, "nic": "400Gbit/s"},
    {"name": "b", "device": "a100-80gb", "nodes": 2, "devices_per_node": 8},
]
LINKS = [{"between": ["a", "b"], "bandwidth": "100Gbit/s", "latency": "50us"}]
TRAIN = {"kind": "train", "sequence_length": 4096, "global_batch_size": 256}
SERVE = {
    "kind": "serve",
    "traffic": {
        "rate": "20/s",
        "input_tokens": {"kind": "lognormal", "mean": 2000, "cv": 1.0},
        "output_tokens": 400,
    },
    "slo": {"ttft": {"p90": "1s", "p99": "3s"}},
}
PLACE = {"kind": "place", "ranks": 8, "ranks_per_node": 4, "slots_per_rank": 5}


def stored_spec(goal: dict[str, Any], *, is_reference: bool = False) -> PlannedSpec:
    keys = {
        "schema_version": 1,
        "cluster": {"pools": POOLS, "links": LINKS},
        "goal": goal,
    }
    return PlannedSpec(
        keys=yaml.safe_load(yaml.safe_dump(keys)),
        cluster=Cluster.model_validate(keys["cluster"], context=SpecFolder(folder=Path())),
        is_reference=is_reference,
        memory_bytes={},
    )


def after(goal: dict[str, Any], text: str) -> tuple[dict[str, Any], str]:
    (change,) = parse_changes(text)
    return apply_change(stored_spec(goal), change, able=load_goal(goal["kind"]).changes)


def test_nodes_change_in_every_pool_or_in_the_one_named() -> None:
    keys, says = after(TRAIN, "nodes=+1")
    assert [pool["nodes"] for pool in keys["cluster"]["pools"]] == [5, 3]
    assert says == "5 nodes of a instead of 4; 3 nodes of b instead of 2"
    keys, says = after(TRAIN, "nodes@b=x2")
    assert [pool["nodes"] for pool in keys["cluster"]["pools"]] == [4, 4]
    assert says == "4 nodes of b instead of 2"


def test_memory_starts_from_the_datasheet_where_the_spec_is_silent() -> None:
    keys, says = after(TRAIN, "memory@a=-20%")
    assert keys["cluster"]["pools"][0]["memory_per_device"] == f"{round(0.8 * 80 * 2**30)}B"
    assert says == "64.0 GiB a device of a instead of 80.0 GiB"
    assert after(TRAIN, "memory@b=60GiB")[1].startswith("60.0 GiB a device of b")


def test_bandwidth_moves_cards_and_links_between_pools() -> None:
    # 400 Gbit/s is 50 GB/s; the usual card of an A100 server is 25 GB/s.
    keys, _ = after(TRAIN, "bandwidth=x2")
    first, second = keys["cluster"]["pools"]
    assert first["nic"] == "100000000000.0B/s"
    assert second["nic"] == "50000000000.0B/s"
    assert keys["cluster"]["links"][0]["bandwidth"] == "25000000000.0B/s"
    keys, _ = after(TRAIN, "bandwidth@a=x2")
    assert keys["cluster"]["links"][0]["bandwidth"] == "100Gbit/s"


def test_traffic_lengths_and_targets_move() -> None:
    assert after(SERVE, "rate=+50%")[0]["goal"]["traffic"]["rate"] == "30.0/s"
    assert after(SERVE, "input-tokens=/2")[0]["goal"]["traffic"]["input_tokens"]["mean"] == 1000
    assert after(SERVE, "output-tokens=800")[0]["goal"]["traffic"]["output_tokens"] == 800
    keys, says = after(SERVE, "ttft=/2")
    assert keys["goal"]["slo"]["ttft"] == {"p90": "0.5s", "p99": "1.5s"}
    assert says == "ttft p90 of 500 ms instead of 1.00 s; ttft p99 of 1.50 s instead of 3.00 s"


def test_the_rate_of_every_kind_of_traffic_moves(tmp_path: Path) -> None:
    # 5 requests in 8 s are 4 gaps in 8 s: 0.5 requests/s.
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{second},100,10\n" for second in (0, 1, 2, 3, 8))
    trace.write_text(f"Timestamp,Request tokens,Response tokens\n{rows}")
    recorded = {"kind": "serve", "traffic": {"trace": str(trace)}}
    keys, says = after(recorded, "rate=x2")
    assert keys["goal"]["traffic"] == {"trace": str(trace), "rate": "1.0/s"}
    assert says == "1 requests/s instead of 0.5, the trace's time compressed"
    keys, says = after(recorded, "rate=0.25/s")
    assert keys["goal"]["traffic"]["rate"] == "0.25/s"
    assert says.endswith("stretched")
    at_rate = {"kind": "serve", "traffic": {"trace": str(trace), "rate": "4/s"}}
    assert after(at_rate, "rate=/2")[0]["goal"]["traffic"]["rate"] == "2.0/s"
    loop = {"kind": "serve", "traffic": {"concurrency": 64, "input_tokens": 9, "output_tokens": 9}}
    for text, expected in (
        ("rate=x2", 128),
        ("rate=/2", 32),
        ("rate=-25%", 48),
        ("rate=x3.3", 211),
    ):
        assert after(loop, text)[0]["goal"]["traffic"]["concurrency"] == expected
    for text in ("rate=20/s", "rate=+5"):
        with pytest.raises(TunerError, match="a closed loop states no rate"):
            after(loop, text)
    trace.write_text("Timestamp,Request tokens,Response tokens\n1,9,9\n1,9,9\n")
    with pytest.raises(TunerError, match="at once"):
        after(recorded, "rate=x2")
    lengths = {"input_tokens": 9, "output_tokens": 9}
    for stated in ({}, {"rate": "3/s"}):
        most = {"kind": "serve", "objective": "rate", "traffic": lengths | stated}
        with pytest.raises(TunerError, match="what the devices serve at most"):
            after(most, "rate=x2")


def test_a_node_of_a_placement_brings_its_ranks() -> None:
    keys, says = after(PLACE, "nodes=+1")
    assert (keys["goal"]["ranks"], keys["goal"]["ranks_per_node"]) == (12, 4)
    assert says == "3 nodes (12 ranks) instead of 2"
    assert after(PLACE, "slots=-1")[0]["goal"]["slots_per_rank"] == 4


@each_row(
    ("goal", "text", "said"),
    [
        (TRAIN, "rate=x2", "rate is no part of this goal; nodes, memory"),
        (SERVE, "batch=x2", "batch is no part of this goal"),
        (PLACE, "memory=-20%", "memory is no part of this goal"),
        (TRAIN, "batch@a=x2", "batch is not of a pool"),
        (TRAIN, "nodes@c=+1", "no pool is named 'c'; pools: a, b"),
        (TRAIN, "nodes=-4", "makes 0 of 4"),
        (TRAIN, "nodes=some", "'some' is not a whole number"),
        (TRAIN, "memory=60", "'60' has no unit"),
        (TRAIN, "batch=+half", "'half' is not a number"),
        (SERVE, "tpot=-10%", "the spec sets no target of tpot"),
        (SERVE, "concurrency=x2", "the traffic is an open load"),
    ],
)
def test_a_change_that_says_nothing_here_is_refused(
    goal: dict[str, Any], text: str, said: str
) -> None:
    with pytest.raises(TunerError, match=said.replace("(", r"\(")):
        after(goal, text)


def test_measured_links_are_not_moved() -> None:
    (change,) = parse_changes("bandwidth=x2")
    with pytest.raises(TunerError, match="measured with the profile"):
        apply_change(stored_spec(TRAIN, is_reference=True), change, able=KEYS)


def test_the_planned_spec_is_not_changed() -> None:
    changed_spec = stored_spec(TRAIN)
    for change in parse_changes("nodes=+1,memory=-20%,bandwidth=x2,batch=x2"):
        apply_change(changed_spec, change, able=KEYS)
    assert changed_spec.keys == stored_spec(TRAIN).keys


@settings(max_examples=50, deadline=None)
@given(st.floats(1.0, 1e12), st.floats(0.01, 100.0))
def test_multiplying_and_dividing_undo_each_other(current: float, factor: float) -> None:
    more = moved(LimitChange(key="memory", value=f"x{factor!r}"), current)
    assert moved(LimitChange(key="memory", value=f"/{factor!r}"), present(more)) == pytest.approx(
        current
    )
