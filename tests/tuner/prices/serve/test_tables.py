"""Which of several measurements of a shape counts."""

from dataclasses import replace

import numpy as np
import pytest

from profilers.arrays import Arrays
from tests.expect import present
from tests.rows import each_row
from tests.tuner.kernel_tables import arrays_of, kernel_tables
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices import ops
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.tables import KernelTables

AT = np.array([8.0])


def gemm(time_s: float, **named: str) -> Arrays:
    return arrays_of("gemm", [({"m": m, "n": 64, "k": 64}, time_s) for m in (1, 8, 64)], **named)


def gemm_s(tables_of: list[Arrays], *, software: str, dtype: str) -> float:
    tables = kernel_tables("x", tables_of)
    machine = ServingMachine(sheet=find_device("h200-sxm"), tables=tables, engines=ENGINE_TRAITS)
    return float(machine.seconds(replace(ops.gemm(AT, 64, 64, dtype=dtype), software=software))[0])


def test_an_engine_has_its_own_products() -> None:
    both = [gemm(2e-6, software="vllm"), gemm(1e-6, software="sglang")]
    assert gemm_s(both, software="vllm", dtype="bf16") == pytest.approx(2e-6)


def test_gemms_timed_with_more_than_the_kernel_yield_to_the_fastest() -> None:
    both = [
        gemm(6e-5, software="vllm", dtype="fp8_block"),
        gemm(8e-6, software="sglang", dtype="fp8_block"),
    ]
    assert gemm_s(both, software="vllm", dtype="fp8_block") == pytest.approx(8e-6)


@each_row(("older", "newer"), [("0.9.2", "0.10.0"), ("1.3.0rc20", "1.3.0")])
def test_the_newest_version_counts(older: str, newer: str) -> None:
    both = [gemm(3e-6, version=newer), gemm(1e-6, version=older)]
    assert gemm_s(both, software="vllm", dtype="bf16") == pytest.approx(3e-6)


def test_experts_of_an_older_version_stay_under_its_name() -> None:
    axes = {"hidden": 64, "ffn": 32, "top_k": 2, "experts": 8, "tensor": 1, "expert": 1}
    tables = kernel_tables(
        "x",
        [
            arrays_of("moe", [({"tokens": 8, **axes}, 2e-6)], version="0.19.0", kind="even"),
            arrays_of("moe", [({"tokens": 8, **axes}, 1e-6)], version="0.24.0", kind="even"),
        ],
    )
    tail = ("even", "bf16", 64, 32, 2, 8, 1, 1)
    newest, old = (tables.curve("moe", (name, *tail)) for name in ("vllm", "vllm@0.19.0"))
    assert float(present(newest).seconds(AT)[0]) == pytest.approx(1e-6)
    assert float(present(old).seconds(AT)[0]) == pytest.approx(2e-6)


def test_a_shape_that_nobody_measured_gives_nothing() -> None:
    tables = kernel_tables("x", [gemm(1e-6)])
    assert tables.gemm(dtype="nvfp4", n=64, k=64, software="vllm") is None
    assert tables.curve("moe", ("vllm", "", "bf16", 1)) is None


def test_the_ends_of_measured_shapes_are_known() -> None:
    axes = {"hidden": 64, "ffn": 32, "top_k": 2, "experts": 8, "tensor": 1}
    rows = [({"tokens": 8, **axes, "expert": expert}, 1e-6) for expert in (4, 1)]
    tables = kernel_tables("x", [arrays_of("moe", rows, kind="even")])
    assert tables.last_values("moe", ("vllm", "even", "bf16", 64, 32, 2, 8, 1)) == (1, 4)
    assert tables.last_values("moe", ("vllm", "even", "bf16", 64, 32, 2, 8, 2)) == ()
    assert tables.softwares("moe") == ("vllm", "vllm@1.0")


def test_tables_of_an_operation_are_read_once_and_on_use() -> None:
    requested: list[str] = []

    def read(operation: str) -> list[Arrays]:
        requested.append(operation)
        return [gemm(1e-6)] if operation == "gemm" else []

    tables = KernelTables(system="x", read=read)
    assert requested == []
    for n in (64, 128):
        assert tables.gemm(dtype="bf16", n=n, k=64, software="vllm") is not None
    assert tables.curve("moe", ("vllm", "", "bf16", 1)) is None
    assert tables.softwares("moe") == ()
    assert requested == ["gemm", "moe"]
