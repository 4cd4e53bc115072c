"""The node's parts, read from a made-up sysfs."""

from pathlib import Path

from profilers.topology import node_topology


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def test_nics_memory_nodes_and_rdma_ports_are_listed(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "devices/system/node/node0/cpulist": "0-31\n",
            "devices/system/node/node0/distance": "10 21\n",
            "devices/pci/0000:3b:00.0/numa_node": "0\n",
            "class/net/eth0/speed": "100000\n",
            "class/net/eth0/mtu": "9000\n",
            "class/net/eth0/operstate": "up\n",
            "class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        },
    )
    (tmp_path / "class/net/eth0/device").symlink_to(tmp_path / "devices/pci/0000:3b:00.0")
    assert node_topology(accelerators="GPU0 GPU1\nNV18", sysfs=tmp_path).splitlines() == [
        "GPU0 GPU1",
        "NV18",
        "numa node0: cores 0-31, distance 10 21",
        "card eth0: 100000 Mbit/s, mtu 9000, up, 0000:3b:00.0 at numa 0",
        "rdma mlx5_0/1: 400 Gb/sec (4X NDR), InfiniBand, 4: ACTIVE",
    ]


def test_nothing_to_read_is_nothing_to_say(tmp_path: Path) -> None:
    assert node_topology(sysfs=tmp_path / "absent") == ""
