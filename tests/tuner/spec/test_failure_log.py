"""Failure logs of every format, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.expect import present, refused
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.spec.failure_log import FailureLog, StatedLog, read_failure_log

OBSERVED: dict[str, object] = {
    "devices": 1024,
    "devices_per_node": 8,
    "period": 54 * 86_400.0,
}

SACCT = """\
JobID|State|Start|End|NNodes|AllocTRES
10|COMPLETED|2026-03-01T00:00:00|2026-03-02T00:00:00|16|cpu=16,gres/gpu=128,node=16
10.batch|FAILED|2026-03-01T00:00:00|2026-03-02T00:00:00|1|cpu=16
11|NODE_FAIL|2026-03-01T12:00:00|2026-03-03T12:00:00|8|gres/gpu=64,gres/gpu:h100=64
12|FAILED|2026-03-02T00:00:00|2026-03-02T00:05:00|16|
13|FAILED|2026-03-02T01:00:00|2026-03-02T11:00:00|16|
14|CANCELLED by 1000|2026-03-03T00:00:00|2026-03-03T06:00:00|16|
15|RUNNING|2026-03-03T06:00:00|Unknown|16|
16|PENDING|Unknown|Unknown|16|
"""


def read(folder: Path, text: str, **stated: object) -> FailureLog:
    """Read a text as a log."""
    path = folder / "failures.log"
    path.write_text(text, encoding="utf-8")
    return read_failure_log(StatedLog.model_validate({"path": path, **stated}))


def test_counts_without_times_give_rates(tmp_path: Path) -> None:
    log = read(
        tmp_path, "component,count,cause\ndevice,6,HBM\ndevice,2,SRAM\nlink,4,\n", **OBSERVED
    )
    assert log.counts == {"device": 8, "node": 0, "link": 4, "software": 0}
    assert log.device_mtbf_s == 1024 * 54 * 86_400.0 / 8
    assert log.node_mtbf_s == 128 * 54 * 86_400.0 / 4
    machines = read(
        tmp_path,
        "component,count\ndevice,1\nnode,2\nsoftware,9\n",
        components=("device", "node"),
        **(OBSERVED | {"devices_per_node": 4}),
    )
    assert machines.node_mtbf_s == 256 * 54 * 86_400.0 / 2


def test_tables_of_times_say_how_long_was_observed(tmp_path: Path) -> None:
    lines = ["2026-01-01T00:00:00", "2026-01-01T01:00:00+00:00", "2026-01-01T06:00:00Z"]
    rows = list(zip(lines, ("device", "node", "node"), strict=True))
    table = "time,component\n" + "".join(f"{time}, {what}\n" for time, what in rows)
    one = read(tmp_path, table, devices=16, devices_per_node=8)
    # Three failures, whose mean gap is three hours.
    assert one.period_s == 3 * 3 * 3600.0
    assert one.node_mtbf_s == 2 * one.period_s / 2


def test_sacct_gives_failures_and_is_read_again_from_what_a_plan_keeps(tmp_path: Path) -> None:
    log = read(tmp_path, SACCT, devices_per_node=8)
    day = 86_400.0
    node_s = (16 + 2 * 8 + 16 * (300 / day + 10 / 24 + 6 / 24)) * day
    assert log.counts == {"device": 0, "node": 1, "link": 0, "software": 1}
    assert log.left_out == 1
    assert log.node_s == pytest.approx(node_s)
    assert log.device_s == pytest.approx(8 * node_s)
    assert log.period_s == pytest.approx(2.5 * day)
    assert "clock" not in log.model_dump_json()
    assert read(tmp_path, log.model_dump_json()) == log
    # Plans of older releases have the times of failures, too.
    older = log.model_dump() | {"clock_s": [3600.0, 7200.0]}
    assert read(tmp_path, json.dumps(older)).model_dump_json() == log.model_dump_json()


REFUSED: dict[str, tuple[str, dict[str, object], str]] = {
    "time goes back": (
        "time,component\n10,node\n5,node\n",
        {"devices": 8},
        "line 3: time '5' lies before that of the line above; sort the log by time",
    ),
    "unknown component": (
        "component\nfan\n",
        OBSERVED,
        "line 2: component: Input should be 'device', 'node', 'link' or 'software', not 'fan'",
    ),
    "no count": (
        "component,count\nnode,-1\n",
        OBSERVED,
        "line 2: count: Input should be greater than or equal to 1, not '-1'",
    ),
    "no date": (
        "time,component\nyesterday,node\n",
        OBSERVED,
        "line 2: time 'yesterday' is neither seconds nor a date like 2026-11-27T05:40:00",
    ),
    "infinite time": (
        "time,component\ninf,node\n",
        OBSERVED,
        "line 2: time 'inf' is not a number of seconds",
    ),
    "time beyond any number": (
        "time,component\n1" + "0" * 4000 + "x,node\n",
        OBSERVED,
        "is neither seconds nor a date like 2026-11-27T05:40:00",
    ),
    "a time is missing": (
        "time,component\n1,node\n,node\n",
        OBSERVED,
        "line 3: no time, though lines above have one; give every line its time, or none",
    ),
    "a time comes late": (
        "time,component\n,node\n,node\n5,node\n",
        OBSERVED,
        "line 4: a time, though lines above have none; give every line its time, or none",
    ),
    "machines of unknown size": (
        "component\nnode\n",
        {"devices": 8, "period": 3600.0},
        "goal.reliability.log.devices_per_node: state how many devices a machine of the log has",
    ),
    "jobs of unknown size": (
        SACCT,
        {},
        "line 5: goal.reliability.log.devices_per_node: state how many devices a machine",
    ),
    "how many": ("component\nnode\n", {}, "goal.reliability.log.devices: state how many devices"),
    "how long": ("component\nnode\n", {"devices": 8}, "log.period: state how long the devices"),
    "too short": (
        "time,component\n0,node\n7200,node\n",
        {"devices": 8, "period": 3600.0},
        "log.period: 3600 s are shorter than the log, whose times span 7200 s",
    ),
    "none": (
        "component\nnode\n",
        {**OBSERVED, "components": ("device",)},
        "no failure of device in it; leave the log out, or state device_mtbf or node_mtbf",
    ),
    "another file": (
        "hello\nworld\n",
        OBSERVED,
        "not a failure log: neither a table with a column",
    ),
    "more failures than memory": (
        "time,component,count\n0,node,1000000000\n",
        OBSERVED,
        "more than 1,000,000 failures",
    ),
    "empty": ("", OBSERVED, "not a failure log"),
    "JSON lines": ('{"component": "node"}\n7\n', OBSERVED, "JSON lines are no longer read"),
    "sacct backwards": (
        "JobID|State|Start|End|NNodes\n1|FAILED|2026-03-02T00:00:00|2026-03-01T00:00:00|1\n",
        {},
        "line 2: End 2026-03-01T00:00:00 lies before Start 2026-03-02T00:00:00",
    ),
    "sacct nodes": (
        "JobID|State|Start|End|NNodes\n1|FAILED|2026-03-02T00:00:00|2026-03-02T01:00:00|2K\n",
        {},
        "line 2: NNodes: '2K' is not a whole number above zero",
    ),
    "sacct without end": (
        f"JobID|State|Start|End|NNodes\n1|FAILED{' ' * 200_000}|2026|2026|1\n",
        {},
        "line 1: field larger than field limit",
    ),
    "a name without end": (f"component,{'x' * 200_000}\nnode,1\n", OBSERVED, "larger than field"),
    "sacct idle": ("JobID|State|Start|End|NNodes\n", {}, "no job in it has ended"),
}


def test_unusable_logs_are_refused_in_a_line(tmp_path: Path) -> None:
    wrong = []
    for name, (text, stated, expected) in REFUSED.items():
        try:
            read(tmp_path, text, **stated)
        except SpecError as error:
            if expected not in str(error) or "\n" in str(error):
                wrong.append((name, str(error)))
        else:
            wrong.append((name, "read"))
    assert not wrong, wrong


def test_machines_of_a_log_are_by_default_those_of_the_cluster(
    tiny_spec: Callable[..., Path], tmp_path: Path
) -> None:
    file, log = tiny_spec(), tmp_path / "failures.csv"
    log.write_text("component,count\nnode,2\n", encoding="utf-8")
    keys = yaml.safe_load(file.read_text())
    (pool,) = keys["cluster"]["pools"]
    # 64 devices in machines of 4 are 16 machines; as stated, 8 of 8.
    for stated, sizes, nodes in (
        ({}, (4,), 16),
        ({}, (4, 4), 16),
        ({"devices_per_node": 8}, (4, 2), 8),
    ):
        keys["cluster"]["pools"] = [
            pool | {"name": f"pool{index}", "devices_per_node": size}
            for index, size in enumerate(sizes)
        ]
        observed = {"path": str(log), "devices": 64, "period": "10d"} | stated
        keys["goal"]["reliability"] = {"restart": "10min", "log": observed}
        file.write_text(yaml.safe_dump(keys))
        assert present(read_spec(file).goal.reliability).node_mtbf == nodes * 10 * 86_400.0 / 2
    keys["goal"]["reliability"]["log"].pop("devices_per_node")
    file.write_text(yaml.safe_dump(keys))
    with refused(SpecError, match=r"log\.devices_per_node: state how many"):
        read_spec(file)
    # Machines have no part in the rate of devices.
    log.write_text("component,count\ndevice,2\n", encoding="utf-8")
    keys["goal"]["reliability"]["log"]["components"] = ["device"]
    file.write_text(yaml.safe_dump(keys))
    assert present(read_spec(file).goal.reliability).device_mtbf == 64 * 10 * 86_400.0 / 2
