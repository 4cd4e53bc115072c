"""Which stored profile says how fast a device converts KV caches."""

from pathlib import Path

import pytest

from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile
from tuner.costs.serve.kv_profile import conversion_prices


def stored(folder: Path, *, device: str, operation: str = "kv_conversion") -> Path:
    if operation == "gemm":
        case = Case(operation="gemm", dtype="bf16", axes={"m": 1, "n": 1, "k": 1})
    else:
        axes = {"tokens": 256, "heads": 8, "width": 128, "page_from": 16, "page_to": 64}
        case = Case(
            operation=operation,
            kind="nhd_hnd",
            dtype="bf16",
            axes={**axes, "tensor_from": 1, "tensor_to": 1},
        )
    profile = fake_profile([Measurement(case=case, times_s=(1e-3,))])
    header = profile.header.model_copy(update={"machine": fake_machine(device=device)})
    write_profile(folder, profile.model_copy(update={"header": header}))
    return folder


def test_the_device_s_own_table_is_found_among_others(tmp_path: Path) -> None:
    paths = [
        tmp_path,
        stored(tmp_path / "kernels", device="NVIDIA H200", operation="gemm"),
        stored(tmp_path / "other", device="NVIDIA L40S"),
        stored(tmp_path / "own", device="NVIDIA H200"),
    ]
    actual = present(conversion_prices(paths, device="h200-sxm"))
    assert [series.kind for series in actual.curves] == ["nhd_hnd"]
    assert conversion_prices(paths[:3], device="h200-sxm") is None


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    from profilers.errors import ProfileUnreadableError

    folder = stored(tmp_path / "own", device="NVIDIA H200")
    (folder / "kv_conversion.parquet").write_bytes(b"PAR1")
    with pytest.raises(ProfileUnreadableError, match="kv_conversion"):
        conversion_prices([folder], device="h200-sxm")
