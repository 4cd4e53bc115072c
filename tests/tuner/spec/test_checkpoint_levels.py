"""Checkpoint levels in a spec: what may be stated, and what is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.expect import present, refused
from tests.rows import Failures
from tuner.errors import SpecError
from tuner.goals.train_spec import read_spec
from tuner.spec.goal import Checkpoint, Reliability

HOUR = 3600.0


def _read(file: Path, reliability: dict[str, Any]) -> Reliability:
    spec = yaml.safe_load(file.read_text())
    spec["goal"]["reliability"] = {"restart": "10min"} | reliability
    file.write_text(yaml.safe_dump(spec))
    return present(read_spec(file).goal.reliability)


def test_levels_are_stated_in_words_and_quantities(tiny_spec: Callable[..., Path]) -> None:
    checkpoint = {
        "levels": ["shared", "host"],
        "host_interval": "1min",
        "interval": "30min",
        "replicas": 1,
        "host_memory": "512GiB",
    }
    stated = _read(
        tiny_spec(),
        {
            "nodes_lost": "1% per week",
            "process_mtbf": "1000h",
            "in_process_restart": "45s",
            "lost_together": "0.5%",
            "checkpoint": checkpoint,
        },
    )
    assert stated.checkpoint.levels == ("host", "shared")
    assert (stated.checkpoint.replicas, stated.checkpoint.host_memory) == (1, 512 * 2**30)
    assert stated.process_mtbf == 1000 * HOUR
    assert (stated.in_process_restart, stated.lost_together) == (45.0, 0.005)


def test_one_level_is_the_default(tiny_spec: Callable[..., Path]) -> None:
    stated = _read(tiny_spec(), {"device_mtbf": "50000h"})
    assert stated.checkpoint.levels == ("shared",)
    assert not stated.checkpoint.keeps_host_copies
    assert stated.lost_together == 0.02
    # A stored plan of one level has no field of two, and is read again.
    stored = stated.model_dump()
    assert "lost_together" not in stored
    assert "levels" not in stored["checkpoint"]
    assert Reliability.model_validate(stored) == stated
    both = stated.model_copy(update={"checkpoint": Checkpoint(levels="auto", replicas=1)})
    assert Reliability.model_validate_json(both.model_dump_json()) == both


def test_nonsense_is_refused_in_one_line(
    tiny_spec: Callable[..., Path], failures: Failures
) -> None:
    for checkpoint, more, message in (
        ({"levels": ["disk"]}, {}, "'disk' is no level of checkpoints; write auto"),
        ({"levels": "both"}, {}, "'both' is no level of checkpoints"),
        ({"levels": 2}, {}, "'2' is no level"),
        ({"levels": []}, {}, "add shared"),
        ({"levels": ["host"]}, {}, "copies on hosts alone do not outlive all failures"),
        ({"levels": "auto", "replicas": 3}, {}, "3 is no number of replicas"),
        ({"levels": "auto", "replicas": True}, {}, "True is no number of replicas"),
        ({"levels": "auto", "host_interval": 60}, {}, "60 has no unit"),
        ({"levels": "auto", "host_interval": "0s"}, {}, "greater than 0"),
        ({"host_interval": "1min"}, {}, "host_interval needs levels"),
        ({"replicas": 0}, {}, "replicas needs levels"),
        ({"host_memory": "1TiB"}, {}, "host_memory needs levels"),
        (
            {"levels": "auto", "interval": "1min", "host_interval": "50s"},
            {},
            "interval 1.00 min is shorter than twice host_interval 50.0 s",
        ),
        ({}, {"lost_together": "0%"}, "greater than 0"),
        ({}, {"lost_together": "101%"}, "less than or equal to 1"),
        ({}, {"lost_together": 0.02}, "0.02 has no unit"),
        ({}, {"lost_together": "two %"}, "is not a share, such as '2%'"),
        ({}, {"process_mtbf": "0h"}, "greater than 0"),
        ({}, {"in_process_restart": "auto"}, "'auto' is read no more: no suite measures it"),
    ):
        stated: dict[str, Any] = {"device_mtbf": "50000h", "checkpoint": checkpoint}
        stated |= more
        with failures.of(checkpoint, more), refused(SpecError, message):
            _read(tiny_spec(), stated)
    with pytest.raises(SpecError, match="no machine is said to be lost"):
        _read(tiny_spec(), {"process_mtbf": "1000h", "checkpoint": {"levels": "auto"}})
    assert _read(tiny_spec(), {"process_mtbf": "1000h"}).node_mtbf_s is None


def test_a_log_parts_what_takes_a_machine_from_software(
    tiny_spec: Callable[..., Path], tmp_path: Path
) -> None:
    log = tmp_path / "log.csv"
    log.write_text("component,count\ndevice,4\nnode,2\nlink,1\nsoftware,6\n")
    stated_log = {"path": str(log), "devices": 16, "period": "1000h"}
    one = _read(tiny_spec(), {"log": stated_log})
    for stated in (one, _read(tiny_spec(), {"log": stated_log, "checkpoint": {"levels": "auto"}})):
        # Four machines of four devices, as in the cluster, for 1000 hours; software loses none.
        assert stated.device_mtbf == pytest.approx(16_000 * HOUR / 4)
        assert stated.node_mtbf == pytest.approx(4000 * HOUR / 3)
        assert stated.process_mtbf == pytest.approx(4000 * HOUR / 6)
    with pytest.raises(SpecError, match="leave out device_mtbf, node_mtbf, nodes_lost and process"):
        _read(tiny_spec(), {"log": stated_log, "process_mtbf": "10h"})


def test_memory_of_copies_may_not_exceed_what_the_host_leaves(
    tiny_spec: Callable[..., Path],
) -> None:
    file = tiny_spec()
    spec = yaml.safe_load(file.read_text())
    spec["cluster"]["pools"][0]["host"] = {"memory": "512GiB", "reserve": "64GiB"}
    file.write_text(yaml.safe_dump(spec))
    stated = {"device_mtbf": "50000h", "checkpoint": {"levels": "auto", "host_memory": "448GiB"}}
    assert _read(file, stated).checkpoint.host_memory == 448 * 2**30
    stated["checkpoint"] = {"levels": "auto", "host_memory": "449GiB"}
    with pytest.raises(SpecError, match="host_memory 449 GiB is more than the 448 GiB that") as why:
        _read(file, stated)
    assert "host leaves, which is its name now; leave host_memory out" in str(why.value)
