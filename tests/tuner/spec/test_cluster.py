import re
from typing import Any

import pytest
from pydantic import ValidationError

from tuner.devices.catalogue import find_device
from tuner.spec.cluster import Pool

DEVICE: dict[str, Any] = {
    "name": "h100-64gb",
    "generation": "hopper",
    "compute_units": 132,
    "flop_per_s": {"bf16": 989.4e12},
    "memory_bytes": "64GiB",
    "memory_bytes_per_s": "2TB/s",
    "scale_up_bytes_per_s": "450GB/s",
    "scale_out_bytes_per_s": "200Gbit/s",
    "host_bytes_per_s": "64GB/s",
}


def read(device: object) -> Pool:
    return Pool.model_validate({"name": "a", "devices_per_node": 8, "device": device})


def test_a_pool_describes_a_device_or_names_a_datasheet() -> None:
    pool = read(DEVICE)
    assert pool.device == pool.sheet.name == "h100-64gb"
    assert pool.sheet.memory_bytes == 64 * 2**30
    assert pool.sheet.scale_out_bytes_per_s == 25e9
    assert Pool.model_validate_json(pool.model_dump_json()) == pool
    assert read("H100").sheet is find_device("h100-sxm")
    with pytest.raises(ValidationError, match="leave 'datasheet' out"):
        Pool.model_validate(
            {"name": "a", "devices_per_node": 8, "device": DEVICE, "datasheet": DEVICE}
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": None}, "datasheet.name"),
        ({"generation": "nada"}, "datasheet.generation"),
        ({"memory_bytes": 64}, "64 has no unit; write it like '80GiB'"),
        ({"memory_bytes": "64GBB"}, "unknown unit 'GBB'"),
        ({"memory_bytes": None}, "None has no unit"),
        ({"host_bytes_per_s": [64]}, "has no unit"),
        ({"flop_per_s": {"fp8": 1e15}}, "flop_per_s needs bf16"),
        ({"flop_per_s": {"bf16": -1.0}}, "greater than 0"),
        ({"memory": "64GiB"}, "datasheet.memory"),
    ],
)
def test_a_description_that_lacks_something_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        read(DEVICE | change)


def test_a_domain_that_is_not_stated_is_that_of_the_devices_servers_or_racks() -> None:
    for device, nodes, each, domain in (
        ("gb200-nvl72", 64, 4, 72),
        ("gb200-nvl72", 5, 4, 20),
        ("gb300-nvl72", 1, 4, 4),
        ("h100-sxm", 4, 8, 8),
        ("h100-sxm", 4, 4, 4),
        ("rtx-4090", 2, 10, 10),
        # Bridges join two cards.
        ("h100-nvl", 2, 8, 2),
        ("h100-nvl", 1, 1, 1),
        (DEVICE, 2, 8, 8),
    ):
        stated = {"name": "a", "device": device, "nodes": nodes, "devices_per_node": each}
        assert Pool.model_validate(stated).domain == domain, stated
        assert Pool.model_validate({**stated, "scale_up_domain": each}).domain == each
    assert Pool(name="a", device="tomorrow-1", nodes=2, devices_per_node=4).domain == 4


def test_memory_of_a_host_is_stated_with_what_no_job_may_take() -> None:
    own = {"name": "a", "devices_per_node": 8, "device": "h100-sxm"}
    pool = Pool.model_validate(own | {"host": {"memory": "2TB", "reserve": "64GB"}})
    assert pool.host_limit_bytes(None) == 2e12 - 64e9
    assert Pool.model_validate_json(pool.model_dump_json()) == pool
    assert Pool.model_validate(own | {"host": {"memory": "2TB"}}).host_limit_bytes(None) == 2e12
    # Not known where neither says it, and not in files of before it could be stated.
    assert Pool.model_validate(own).host_limit_bytes(None) is None
    assert "host" not in Pool.model_validate(own).model_dump()
    for host, said in (
        ({"memory": "64GB", "reserve": "64GB"}, "leaves nothing of memory"),
        ({"reserve": "64GB"}, "memory"),
        ({"memory": "64GB", "swap": "1GB"}, "swap"),
    ):
        with pytest.raises(ValidationError, match=said):
            Pool.model_validate(own | {"host": host})
