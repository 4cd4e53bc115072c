"""Links between nodes of a run: rates that are reached, and what is left of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tuner.errors import EnvironmentMissingError
from tuner.verify.faults.links import PROGRAMS, NodeLinks, node_links

RATE = 50e6
SENT = 12_000_000
RECEIVE = """
import socket, time
with socket.create_server(("10.91.0.2", 5000)) as server:
    print("listening", flush=True)
    for _ in range(2):
        connection, _peer = server.accept()
        connection.recv(1)
        begin_s, received = time.monotonic(), 1
        while data := connection.recv(1 << 20):
            received += len(data)
        print(received / (time.monotonic() - begin_s), flush=True)
"""
SEND = f"""
import socket
with socket.create_connection(("10.91.0.2", 5000)) as connection:
    connection.sendall(bytes({SENT}))
"""


def sent(links: NodeLinks) -> None:
    command = (*links.entering(0), sys.executable, "-c", SEND)
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture
def links_possible() -> None:
    if os.geteuid() != 0 or any(shutil.which(name) is None for name in PROGRAMS):
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}")
    try:
        with node_links(1, bytes_per_s=RATE):
            pass
    except EnvironmentMissingError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("links_possible")
def test_a_node_sends_at_its_rate_and_slower_on_a_slow_link() -> None:
    with node_links(2, bytes_per_s=RATE) as links:
        pids = [space.pid for space in links.spaces]
        command = (*links.entering(1), sys.executable, "-c", RECEIVE)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "listening\n"
            sent(links)
            usual = float(receiver.stdout.readline())
            links.set_rate(0, ratio=0.2)
            sent(links)
            slow = float(receiver.stdout.readline())
    assert usual < 1.2 * RATE
    assert 0.1 < slow / usual < 0.4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_without_root_or_a_program_links_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentMissingError, match="need root"), node_links(1, bytes_per_s=RATE):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(EnvironmentMissingError, match="program tc"), node_links(1, bytes_per_s=1.0):
        pass
