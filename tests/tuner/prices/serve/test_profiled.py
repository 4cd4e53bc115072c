"""Serving operations priced from curves of the machine itself."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from profilers.interpolation import Bools, Curve, Floats
from profilers.series import Series
from tuner.devices.catalogue import CPU
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.lookups import Lookups
from tuner.prices.ops import Op, gemm
from tuner.prices.serve.profiled import ProfiledMachine, grouped_experts


class Product:
    """Seconds are the product of the axes above 0; nothing above 1,000 was measured."""

    def predict(self, axes_NA: Floats) -> tuple[Floats, Bools]:
        above = np.where(axes_NA > 0.0, axes_NA, 1.0)
        return above.prod(axis=1), np.asarray((axes_NA > 1000.0).any(axis=1))


def machine(*operations: str) -> ProfiledMachine:
    curves: Mapping[Series, Curve] = {
        Series(name, "", "bf16", "" if name == "decode_attention" else "forward"): Product()
        for name in operations
    }
    return ProfiledMachine(engines=ENGINE_TRAITS, sheet=CPU, tables=None, curves=curves)


def routed(tokens: float, *, experts: int = 8, top_k: int = 2, expert: int = 1) -> Op:
    sizes = {"hidden": 4, "ffn": 6, "top_k": top_k, "experts": experts, "tensor": 1}
    return Op(
        operation="moe",
        dtype="bf16",
        kind="power_law_1.01",
        axes={"tokens": np.array([tokens]), "expert": expert, **sizes},
    )


def test_what_was_measured_is_interpolated_and_the_rest_is_named() -> None:
    own = machine("gemm", "decode_attention")
    rows = np.array([2.0, 3.0])
    assert own.seconds(gemm(rows, 5.0, 7.0, dtype="bf16")) == pytest.approx([70.0, 105.0])
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "window": 0}
    decode = Op(operation="decode_attention", axes={"batch": rows, "past": 10.0, **sizes})
    assert own.seconds(decode) == pytest.approx([2 * 10 * 2 * 8, 3 * 10 * 2 * 8])
    assert not own.estimated
    # The profile holds no fp8 caches and no experts: its rates price them.
    assert own.measured_s(replace(decode, kind="kv_fp8")) is None
    assert float(own.seconds(routed(64.0))[0]) > 0.0
    assert own.estimated == {"moe bf16"}


def test_linear_attention_and_indexers_are_looked_up_under_their_kinds() -> None:
    sizes = {"heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 16}
    rows, lookups = np.array([2.0, 3.0]), Lookups()
    update = Op(operation="linear_update", kind="kda", axes={"batch": rows, **sizes})
    scan = Op(
        operation="linear_scan",
        kind="kda",
        dtype="bf16",
        direction="forward",
        axes={"batch": 1.0, "sequence": rows, "chunk": 64, **sizes},
    )
    widths = {"heads": 4, "head_dim": 8, "top_k": 16}
    scores = Op(operation="index_scores", axes={"batch": 1, "sequence": 1, "past": rows, **widths})
    for op in (update, scan, scores):
        series = Series(op.operation, op.kind, "bf16", op.direction)
        own = ProfiledMachine(
            engines=ENGINE_TRAITS, sheet=CPU, tables=None, curves={series: Product()}
        )
        product = np.prod([np.asarray(size) * np.ones(2) for size in op.axes.values()], axis=0)
        assert own.seconds(op) == pytest.approx(product)
        assert not own.estimated
        lookups.note(op)
        if op.kind:
            # Another kind, or states that are not fp32, which have none.
            assert own.measured_s(replace(op, kind="mamba2")) is None
            assert own.measured_s(replace(op, kind="")) is None
    assert not lookups.unmeasured
    listed = {(case.operation, case.kind, case.direction) for case in lookups.wanted().cases}
    assert listed == {(op.operation, op.kind, op.direction) for op in (update, scan, scores)}


def test_sizes_beyond_the_measured_ones_are_named() -> None:
    own = machine("gemm")
    own.seconds(gemm(np.array([2000.0]), 5.0, 7.0, dtype="bf16"))
    assert own.estimated == {"gemm beyond the measured sizes"}


def test_experts_are_those_that_the_tokens_reach() -> None:
    # 64 tokens reach all 8 experts: 128 copies, 16 each. One token reaches its two.
    axes = grouped_experts(routed(64.0)).axes
    assert {name: float(np.max(size)) for name, size in axes.items()} == {
        "experts": 8.0,
        "tokens": 128.0,
        "largest": 16.0,
        "hidden": 4.0,
        "ffn": 6.0,
        "inner": 12.0,
    }
    one = grouped_experts(routed(1.0)).axes
    assert [float(np.max(one[name])) for name in ("experts", "tokens", "largest")] == [
        2.0,
        2.0,
        1.0,
    ]
    assert machine("grouped_gemm").seconds(routed(64.0)) == pytest.approx([8 * 128 * 16 * 4 * 6])
