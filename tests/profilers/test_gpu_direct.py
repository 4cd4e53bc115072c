"""What made-up trees of devices say of GPU-direct; what they do not say is called unknown."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from profilers.gpu_direct import distance, driver_support, gpu_direct_facts
from tests.rows import each_row

SWITCH = "devices/pci0000:10/0000:10:01.0/0000:11:00.0"
"""A root port and the switch's port up."""


class Node:
    """A sysfs and a proc of the test."""

    def __init__(self, root: Path) -> None:
        self.sysfs = root / "sys"
        self.proc = root / "proc"
        self.slots = self.sysfs / "bus/pci/devices"
        self.slots.mkdir(parents=True)
        (self.sysfs / "module").mkdir()

    def gpu(self, place: str, *, numa: str = "0", kind: str = "0x030200") -> Path:
        device = self._device(place, numa=numa)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(f"{kind}\n")
        (self.slots / device.name).symlink_to(device)
        return self.slots / device.name

    def card(self, name: str, place: str, *, numa: str = "0") -> Path:
        folder = self.sysfs / "class/infiniband" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(self._device(place, numa=numa))
        return folder / "device"

    def module(self, name: str) -> None:
        (self.sysfs / "module" / name).mkdir()

    def driver(self, text: str) -> None:
        (self.proc / "driver/nvidia").mkdir(parents=True)
        (self.proc / "driver/nvidia/version").write_text(text)

    def facts(self, environment: Mapping[str, str] | None = None) -> list[str]:
        return list(
            gpu_direct_facts(
                sysfs=self.sysfs,
                proc=self.proc,
                kernel="6.8.0-31-generic",
                environment=environment or {},
            )
        )

    def _device(self, place: str, *, numa: str) -> Path:
        device = self.sysfs / place
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{numa}\n")
        return device


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def new_node(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Node]:
    """Make a node of its own for every row of a table."""
    return lambda: Node(tmp_path_factory.mktemp("node"))


@each_row(
    ("place", "numa", "far"),
    [
        # Another port of the same switch.
        (f"{SWITCH}/0000:12:01.0/0000:14:00.0", "0", "PIX"),
        # A second switch below the first one.
        (f"{SWITCH}/0000:12:01.0/0000:14:00.0/0000:15:00.0/0000:16:00.0", "0", "PXB"),
        # Another root port of the same host bridge.
        ("devices/pci0000:10/0000:10:03.0/0000:17:00.0", "0", "PHB"),
        ("devices/pci0000:40/0000:40:01.0/0000:41:00.0", "0", "NODE"),
        ("devices/pci0000:80/0000:80:01.0/0000:81:00.0", "1", "SYS"),
        # Nobody says which memory node it is.
        ("devices/pci0000:80/0000:80:01.0/0000:81:00.0", "-1", "SYS"),
    ],
)
def test_distances_are_those_of_nvidia_smi(
    new_node: Callable[[], Node], place: str, numa: str, far: str
) -> None:
    node = new_node()
    gpu = node.gpu(f"{SWITCH}/0000:12:00.0/0000:13:00.0")
    card = node.card("mlx5_0", place, numa=numa)
    assert distance(card, gpu) == distance(gpu, card) == far


def test_every_pair_is_listed_and_those_beyond_the_users_level_marked(node: Node) -> None:
    node.module("nvidia_peermem")
    node.gpu(f"{SWITCH}/0000:12:00.0/0000:13:00.0")
    # The display adapter of the board is no accelerator of NVIDIA's.
    other = node.gpu("devices/pci0000:00/0000:00:02.0")
    (other / "vendor").write_text("0x1a03\n")
    node.card("mlx5_0", f"{SWITCH}/0000:12:01.0/0000:14:00.0")
    node.card("mlx5_1", "devices/pci0000:80/0000:80:01.0/0000:81:00.0", numa="1")
    assert node.facts() == [
        "gpu direct: yes, nvidia_peermem is loaded",
        "gpu direct mlx5_0 - 0000:13:00.0: PIX",
        "gpu direct mlx5_1 - 0000:13:00.0: SYS",
    ]
    assert node.facts({"NCCL_NET_GDR_LEVEL": "PHB"})[1:] == [
        "gpu direct: NCCL_NET_GDR_LEVEL PHB, at most NODE",
        "gpu direct mlx5_0 - 0000:13:00.0: PIX",
        "gpu direct mlx5_1 - 0000:13:00.0: SYS, farther than allowed",
    ]
    # What NCCL calls PHB reaches across the host bridges of one memory node.
    node.card("mlx5_2", "devices/pci0000:40/0000:40:01.0/0000:41:00.0")
    for level in ("PHB", "3"):
        assert "gpu direct mlx5_2 - 0000:13:00.0: NODE" in node.facts({"NCCL_NET_GDR_LEVEL": level})
    assert "gpu direct: NCCL_NET_GDR_LEVEL 0, never" in node.facts({"NCCL_NET_GDR_LEVEL": "0"})
    assert "NCCL_NET_GDR_LEVEL far, not a level" in node.facts({"NCCL_NET_GDR_LEVEL": "far"})[1]


@each_row(
    ("level", "meant"),
    [
        ("LOC", "never"),
        ("PIX", "at most PIX"),
        ("SYS", "at most SYS"),
        ("0", "never"),
        ("2", "at most PXB"),
        ("4", "at most SYS"),
        ("5", "at most SYS"),
        # NCCL takes what is above its table for the last entry.
        ("6", "at most SYS"),
        ("99", "at most SYS"),
        # It compares names letter by letter, and ignores what it does not know.
        ("sys", "not a level"),
        ("-1", "not a level"),
    ],
)
def test_levels_mean_what_nccl_takes_them_for(
    new_node: Callable[[], Node], level: str, meant: str
) -> None:
    node = new_node()
    node.gpu("devices/pci0000:00/0000:00:02.0")
    node.card("mlx5_0", "devices/pci0000:80/0000:80:01.0/0000:81:00.0", numa="1")
    said = node.facts({"NCCL_NET_GDR_LEVEL": level})
    assert f"gpu direct: NCCL_NET_GDR_LEVEL {level}, {meant}" in said
    is_too_far = meant not in ("at most SYS", "not a level")
    assert said[-1].endswith(", farther than allowed") == is_too_far


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue"


@each_row(
    ("driver", "kernel", "said"),
    [
        (OPEN, "6.8.0-31-generic", "yes, by DMA-BUF"),
        (OPEN, "5.12", "yes, by DMA-BUF"),
        (OPEN, "5.4.0", "no, nvidia_peermem is not loaded and Linux 5.4 has no DMA-BUF"),
        (OPEN, "custom", "unknown, open kernel modules on a kernel 'custom'"),
        (CLOSED, "6.8.0", "no, nvidia_peermem is not loaded and the driver's modules are not"),
        (None, "6.8.0", "unknown, nvidia_peermem is not loaded and the driver's version"),
    ],
)
def test_the_driver_support_yes_no_or_nothing(
    new_node: Callable[[], Node], driver: str | None, kernel: str, said: str
) -> None:
    node = new_node()
    if driver is not None:
        node.driver(driver)
    assert driver_support(sysfs=node.sysfs, proc=node.proc, kernel=kernel).startswith(said)


def test_modules_that_cannot_be_read_leave_it_unknown(tmp_path: Path) -> None:
    found = driver_support(sysfs=tmp_path, proc=tmp_path, kernel="6.8.0")
    assert found == "unknown, the kernel's modules cannot be read"


def test_a_node_without_nics_has_no_facts_and_one_without_accelerators_says_so(
    node: Node,
) -> None:
    assert node.facts() == []
    node.card("mlx5_0", f"{SWITCH}/0000:12:01.0/0000:14:00.0")
    assert node.facts() == ["gpu direct: no accelerator is seen on PCIe"]
