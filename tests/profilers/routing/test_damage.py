"""Dumps of every format with bytes lost, changed or added: read, or refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from profilers.errors import ProfilerError
from profilers.routing.recording import Recording
from profilers.routing.store import read_recording, write_recording
from tests.rows import each_row

COUNTS = np.random.default_rng(5).integers(1, 99, (3, 4, 8))
CHOSEN = np.random.default_rng(6).integers(0, 8, (4, 5, 2))
TRIES = 60


def plain(folder: Path) -> None:
    record = {"num_logical_experts": 8, "layer_ids": [0, 1, 2, 3], "passes": COUNTS.tolist()}
    (folder / "a.json").write_text(json.dumps(record))


def numpy_array(folder: Path) -> None:
    np.save(folder / "a.npy", COUNTS)


def tensor(folder: Path) -> None:
    torch.save(torch.from_numpy(COUNTS), folder / "a.pt")


def sglang(folder: Path) -> None:
    record = {
        "forward_pass_id": 1,
        "rank": 0,
        "global_physical_count": torch.from_numpy(COUNTS[0]),
        "topk_ids_of_layer": torch.from_numpy(CHOSEN),
    }
    slots = torch.arange(8).repeat(4, 1)
    content = {"records": [record], "last_physical_to_logical_map": slots}
    torch.save(content, folder / "expert_distribution_recorder_1_0.pt")


def trtllm(folder: Path) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    (folder / "meta_info.json").write_text('{"num_experts": 8, "num_experts_per_token": 2}')
    save_file({f"1_{row}": COUNTS[0, row] for row in range(4)}, folder / "rank0.safetensors")


def megatron(folder: Path) -> None:
    with (folder / "router_trace_rank0.jsonl").open("w") as stream:
        for layer in range(4):
            record = {"step": 0, "layer": layer, "rank": 0, "top_indices": CHOSEN[layer].tolist()}
            stream.write(json.dumps(record) + "\n")


def ascend(folder: Path) -> None:
    devices = [
        {"device_id": device, "device_expert": list(range(4 * device, 4 * device + 4))}
        for device in range(2)
    ]
    layers = [{"layer_id": layer, "device_list": devices} for layer in range(4)]
    (folder / "map.json").write_text(json.dumps({"layer_list": layers}))
    np.save(folder / "load.npy", COUNTS.reshape(3, 4, 2, 4))


def stored(folder: Path) -> None:
    recording = Recording(
        model="m", workload="w", layer_ids=(0, 1, 2, 3), top_k=2, count_PLE=COUNTS.copy()
    )
    write_recording(folder, recording)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Cut it, change some bytes (mostly early ones, where headers are), or add some."""
    changed = bytearray(content)
    draw = rng.random()
    if draw < 0.3:
        return content[: rng.integers(len(content))]
    if draw < 0.9:
        for _ in range(rng.integers(1, 5)):
            end = min(len(changed), int(rng.choice([100, len(changed)])))
            changed[rng.integers(end)] = rng.integers(256)
        return bytes(changed)
    place = int(rng.integers(len(changed)))
    return content[:place] + rng.bytes(8) + content[place:]


@each_row(
    "write",
    [
        *(plain, numpy_array, tensor, sglang, trtllm, megatron, ascend, stored),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_damage_is_read_or_refused_in_one_line(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    folder = tmp_path / write.__name__
    folder.mkdir()
    write(folder)
    files = sorted(folder.iterdir())
    path = folder if write in (sglang, trtllm, megatron, ascend, stored) else files[0]
    read_recording(path)
    rng = np.random.default_rng(7)
    messages = []
    for number in range(TRIES):
        file = files[number % len(files)]
        whole = file.read_bytes()
        file.write_bytes(damaged(whole, rng))
        try:
            read_recording(path)
        except ProfilerError as error:
            messages.append(str(error))
        file.write_bytes(whole)
    assert len(messages) > TRIES / 4
    assert not any("\n" in message for message in messages)
