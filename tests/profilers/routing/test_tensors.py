"""What a small file of torch.save cannot be made to take."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profilers.errors import RecordingUnreadableError
from profilers.routing.contents import contents
from profilers.routing.store import read_recording


def test_a_tensor_that_repeats_few_bytes_is_refused_before_room_is_made(tmp_path: Path) -> None:
    one = torch.ones(1)
    for repeated in (
        one.as_strided((1, 2**20, 2**20), (0, 0, 0)),
        {"records": [one.as_strided((2**30,), (0,))] * 100},
        one.to(torch.int64).as_strided((2**15, 2**15), (0, 0)),
    ):
        torch.save(repeated, tmp_path / "a.pt")
        assert (tmp_path / "a.pt").stat().st_size < 4000
        with pytest.raises(ValueError, match="repeats the few bytes"):
            contents(tmp_path / "a.pt")


def test_views_of_one_tensor_and_shared_lists_are_read(tmp_path: Path) -> None:
    whole = torch.arange(24).reshape(3, 8)
    deep: Any = [whole[0]]
    for _ in range(40):
        deep = [deep, deep]
    torch.save({"a": whole, "b": whole[1], "deep": deep}, tmp_path / "a.pt")
    found = contents(tmp_path / "a.pt")
    assert np.array_equal(found["b"], np.arange(8, 16))
    assert found["deep"][0] is found["deep"][1]


def test_a_load_without_axes_beside_an_expert_map_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(
        '{"layer_list": [{"layer_id": 0, "device_list": [{"device_id": 0, "device_expert": [0]}]}]}'
    )
    np.save(tmp_path / "load.npy", np.array(7))
    with pytest.raises(RecordingUnreadableError, match=r"has shape \[\]"):
        read_recording(tmp_path)
