"""Operations from tables, and from the datasheet where there are none."""

from dataclasses import replace

import numpy as np
import pytest

from profilers.arrays import Arrays
from tests.expect import present
from tests.tuner.kernel_tables import arrays_of, kernel_tables
from tuner.costs.serve.multiplexing import DeviceShare, SharedMachine
from tuner.costs.serve.ops import collective
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.ops import Op, gemm, memory_bound
from tuner.prices.rated_gemm import START_S
from tuner.prices.serve.machine import (
    BALANCED,
    LOAD,
    HostTimes,
    ServingMachine,
    on_core_share,
)

H200 = find_device("h200-sxm")
AT = np.array([16.0])


def experts(*, expert: int, dtype: str = "fp8_block", software: str = "vllm") -> Op:
    sizes = {"hidden": 64, "ffn": 32, "top_k": 2, "experts": 64, "tensor": 1, "expert": expert}
    return Op(
        operation="moe",
        kind=LOAD,
        dtype=dtype,
        axes={"tokens": AT, **sizes},
        software=software,
    )


def product(rows: np.ndarray, *, dtype: str) -> Op:
    return replace(gemm(rows, 8192, 8192, dtype=dtype), software="vllm")


def reduction(num_bytes: np.ndarray, *, ranks: int, software: str = "vllm") -> Op:
    return collective("all_reduce", num_bytes, ranks=ranks, software=software)


def test_a_product_without_a_table_comes_from_the_datasheet_and_is_named() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None)
    # 16 rows of a 8192 x 8192 product at fp8 are bound by its 67 MB of weights.
    seconds = machine.seconds(product(AT, dtype="fp8"))
    moved = 8192 * 8192 + 2 * 16 * (8192 + 8192)
    assert float(seconds[0]) == pytest.approx(moved / (0.77 * 4.8e12) + START_S, rel=1e-2)
    assert machine.estimated == {"gemm fp8"}


def test_a_degree_between_two_measured_ones_is_interpolated() -> None:
    def moe(expert: int, time_s: float) -> Arrays:
        axes = {"hidden": 64, "ffn": 32, "top_k": 2, "experts": 64, "tensor": 1}
        row = {"tokens": 16, **axes, "expert": expert}
        return arrays_of("moe", [(row, time_s)], kind=LOAD, dtype="fp8_block", version=str(expert))

    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=H200, tables=kernel_tables("x", [moe(4, 4e-6), moe(16, 1e-6)])
    )
    found = {degree: float(machine.seconds(experts(expert=degree))[0]) for degree in (4, 8, 16)}
    assert found == pytest.approx({4: 4e-6, 8: 2e-6, 16: 1e-6})
    assert not machine.estimated


def test_experts_from_the_datasheet_take_what_was_measured() -> None:
    # Microseconds at 16, 256, 1,024 and 8,192 tokens of one rank's experts, by Triton's kernels of
    # vLLM 0.24.0 (aiconfigurator-core 0.12.0): DeepSeek-V3 and Qwen3-30B on H200 with TP 8 and 2,
    # Qwen3-235B on A100 with TP 4; of each the decode and the prompt end.
    deepseek = {"hidden": 7168, "ffn": 2048, "top_k": 8, "experts": 256, "tensor": 8, "expert": 1}
    qwen_30b = {"hidden": 2048, "ffn": 768, "top_k": 8, "experts": 128, "tensor": 2, "expert": 1}
    qwen_235b = {"hidden": 4096, "ffn": 1536, "top_k": 8, "experts": 128, "tensor": 4, "expert": 1}
    tokens = np.array([16.0, 256.0, 1024.0, 8192.0])
    for device, dtype, axes, measured_us in (
        ("h200-sxm", "fp8_block", deepseek, [155, 408, 611, 2538]),
        ("h200-sxm", "bf16", qwen_30b, [105, 195, 262, 922]),
        ("a100-80gb-sxm", "bf16", qwen_235b, [408, 1025, 1317, 5791]),
    ):
        machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(device), tables=None)
        op = replace(experts(expert=1, dtype=dtype), axes={**axes, "tokens": tokens})
        assert machine.seconds(op) * 1e6 == pytest.approx(measured_us, rel=0.4), device
    # Few tokens are a matter of how many kernels there are.
    few = np.array([2.0, 8.0, 16.0])
    for device, few_us in (
        ("h200-sxm", [67.5, 112.5, 155.1]),
        ("b200-sxm", [42.5, 76.5, 103.2]),
    ):
        machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(device), tables=None)
        op = replace(experts(expert=1, dtype="fp8_block"), axes={**deepseek, "tokens": few})
        assert machine.seconds(op) * 1e6 == pytest.approx(few_us, rel=0.3), device


def test_half_of_a_core_takes_twice_as_long_on_the_host_too() -> None:
    host = HostTimes(step_s=1e-3, tensor_step_s=2e-3, sequence_s=3e-5, request_s=4e-3)
    whole = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None, host=host)
    half = on_core_share(whole, 0.5)
    assert half.host == HostTimes(step_s=2e-3, tensor_step_s=4e-3, sequence_s=6e-5, request_s=8e-3)
    half.seconds(product(AT, dtype="fp8"))
    assert whole.estimated == {"gemm fp8"}
    for op in (product(AT, dtype="fp8"), experts(expert=1), reduction(AT, ranks=2)):
        assert half.seconds(op) == pytest.approx(2.0 * whole.seconds(op))


def test_one_rank_needs_no_collective() -> None:
    assert (
        float(
            ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None).seconds(
                reduction(AT, ranks=1)
            )[0]
        )
        == 0.0
    )


def test_the_faster_of_nccl_and_the_engines_own_kernel_counts() -> None:
    def reduce(kind: str, time_s: float, **named: str) -> Arrays:
        row = {"bytes": 1024, "ranks": 8, "stride": 1, "world": 8}
        return arrays_of("collective", [(row, time_s)], kind=kind, dtype="", **named)

    tables = kernel_tables(
        "x",
        [
            reduce("all_reduce", 9e-6, software=""),
            reduce("all_reduce/vllm_graph", 5e-6),
            reduce("all_reduce/vllm_eager", 1e-6),
        ],
    )
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=tables)
    at = np.array([1024.0])
    ours = machine.seconds(reduction(at, ranks=8))
    others = machine.seconds(reduction(at, ranks=8, software="trtllm"))
    assert float(ours[0]) == pytest.approx(5e-6)
    assert float(others[0]) == pytest.approx(9e-6)


def test_a_group_beyond_the_domain_pays_for_the_network() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None)
    at = np.array([1e6])
    inside = machine.seconds(reduction(at, ranks=8))
    assert float(machine.seconds(reduction(at, ranks=16))[0]) > float(inside[0]) + 20e-6


def test_an_exchange_is_that_of_the_faster_mode_that_holds_the_tokens() -> None:
    def half(kind: str, tokens: int, time_s: float) -> Arrays:
        axes = {"hidden": 64, "top_k": 2, "experts": 8, "ranks": 16, "nodes": 2, "units": 0}
        row = ({"tokens": tokens, **axes}, time_s)
        return arrays_of("expert_all_to_all", [row], kind=f"deepep_{kind}", dtype="", version=kind)

    tables = kernel_tables(
        "x",
        [
            half("low_latency_dispatch", 128, 2e-5),
            half("low_latency_combine", 128, 3e-5),
            half("normal_dispatch", 8192, 1e-3),
            half("normal_combine", 8192, 1e-3),
        ],
    )
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=tables)
    at = np.array([128.0, 8192.0])
    found = present(machine.all_to_all_s(at, hidden=64, top_k=2, ranks=16))
    assert found == pytest.approx([5e-5, 2e-3])
    # Buffers are made for up to 1,024 tokens, whatever was measured; and for no more.
    at_last = present(machine.deepep_s(np.array([1024.0, 1025.0]), hidden=64, top_k=2, ranks=16)[1])
    assert at_last == pytest.approx([8 * 5e-5, np.inf])
    # A few more ranks than were measured are like those; fewer, or many more, are not.
    assert present(machine.all_to_all_s(at, hidden=64, top_k=2, ranks=24)) == pytest.approx(found)
    assert machine.all_to_all_s(at, hidden=64, top_k=2, ranks=8) is None
    assert machine.all_to_all_s(at, hidden=64, top_k=2, ranks=64) is None


def test_dispatched_copies_have_kernels_of_their_own() -> None:
    axes = {"hidden": 4096, "ffn": 1536, "top_k": 8, "experts": 128, "tensor": 1, "expert": 8}
    kinds = {
        (LOAD, "sglang"): 900e-6,
        (LOAD, "trtllm"): 500e-6,
        (f"wideep_context/{LOAD}", "sglang"): 300e-6,
        ("wideep_context/uniform", "sglang"): 200e-6,
    }
    tables = [
        arrays_of(
            "moe", [({**axes, "tokens": 64}, time_s)], software=own, kind=kind, dtype="fp8_block"
        )
        for (kind, own), time_s in kinds.items()
    ]
    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=H200, tables=kernel_tables("h200_sxm", tables)
    )
    one = replace(experts(expert=8, software="sglang"), axes={**axes, "tokens": np.array([64.0])})

    def seconds(kind: str) -> float:
        return float(machine.seconds(replace(one, kind=kind))[0])

    assert seconds(LOAD) == pytest.approx(900e-6)
    assert seconds(f"context/{LOAD}") == pytest.approx(300e-6)
    assert seconds(f"context/{BALANCED}") == pytest.approx(200e-6)
    # Nobody measured the other half: the fastest of those that hold more than copies.
    assert seconds(f"generation/{LOAD}") == pytest.approx(500e-6)


MOE_AXES = {"hidden": 64, "ffn": 32, "top_k": 2, "experts": 64, "tensor": 1, "expert": 4}


def mxfp4(software: str, written: str, time_s: float) -> Arrays:
    row = ({"tokens": 16, **MOE_AXES}, time_s)
    return arrays_of("moe", [row], software=software, kind=LOAD, dtype=written)


def test_mxfp4_is_what_the_engines_own_table_calls_it() -> None:
    tables = kernel_tables(
        "x",
        [
            mxfp4("sglang", "w4a8_mxfp4_mxfp8", 1e-6),
            mxfp4("sglang", "w4a16_mxfp4", 2e-6),
            mxfp4("vllm", "w4a16_mxfp4", 3e-6),
        ],
    )
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("b200-sxm"), tables=tables)
    found = {
        name: float(machine.seconds(experts(expert=4, dtype="mxfp4", software=name))[0])
        for name in ("sglang", "vllm")
    }
    assert found == pytest.approx({"sglang": 1e-6, "vllm": 3e-6})
    assert not machine.estimated


def test_fp4_weights_are_multiplied_in_bf16_where_a_device_has_no_units_for_them() -> None:
    # 65,536 rows are bound by GEMMs: 2 x 65536 x 8192^2 at shares of the bf16 and the fp4 peak.
    at = np.array([65_536.0])
    found = {
        name: float(
            ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=None).seconds(
                product(at, dtype="nvfp4")
            )[0]
        )
        for name in ("h200-sxm", "b200-sxm")
    }
    flop = 2.0 * 65_536 * 8192**2
    assert found["h200-sxm"] == pytest.approx(flop / (0.93 * 989.5e12), rel=0.05)
    assert found["b200-sxm"] == pytest.approx(flop / (0.45 * 9000e12), rel=0.1)


def test_weights_that_are_unpacked_take_what_was_measured() -> None:
    # Microseconds of 8,192 x 8,192 int4 weights on A100 (TensorRT-LLM 1.0.0's GEMM in
    # aiconfigurator-core 0.12.0); their roofline alone is short by a half at 16 tokens.
    tokens, measured_us = [16, 64, 128, 256, 1024], [42.0, 78.8, 95.2, 169.0, 606.2]
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("a100-80gb"), tables=None)
    found_s = machine.seconds(product(np.array(tokens, dtype=float), dtype="int4_wo"))
    assert [1e6 * one for one in found_s.tolist()] == pytest.approx(measured_us, rel=0.3)
    native = replace(machine, sheet=find_device("h100-sxm"))
    fp8_s = (machine.seconds(product(AT, dtype="fp8")), native.seconds(product(AT, dtype="fp8")))
    weights = 8192.0**2
    assert fp8_s[0].item() > weights / (0.77 * 2.039e12) + START_S + 10e-6
    assert fp8_s[1].item() < weights / (0.77 * 3.35e12) + START_S + 1e-6


def test_fp8_kernels_do_not_stand_in_for_fp4_without_units_for_it() -> None:
    rows = {"fp8": 1e-6, "int4_wo": 4e-6}
    tables = kernel_tables(
        "x",
        [
            arrays_of("moe", [({"tokens": 16, **MOE_AXES}, time_s)], kind=LOAD, dtype=dtype)
            for dtype, time_s in rows.items()
        ],
    )
    requested = experts(expert=4, dtype="nvfp4")
    found = {
        name: float(
            ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=tables).seconds(
                requested
            )[0]
        )
        for name in ("h200-sxm", "b200-sxm")
    }
    assert found == pytest.approx({"h200-sxm": 4e-6, "b200-sxm": 1e-6})


def test_experts_of_two_matrices_have_rows_of_their_own() -> None:
    row = {"tokens": 16, **MOE_AXES}
    gated, ungated = (
        arrays_of("moe", [(row, time_s)], kind=kind, dtype="bf16", software=software)
        for kind, time_s, software in ((LOAD, 3e-6, "vllm"), (f"{LOAD}/nongated", 2e-6, "trtllm"))
    )
    requested = experts(expert=4, dtype="bf16")
    two = replace(requested, axes={**requested.axes, "matrices": 2})
    machine = ServingMachine(
        engines=ENGINE_TRAITS, sheet=H200, tables=kernel_tables("x", [gated, ungated])
    )
    assert machine.seconds(requested) == pytest.approx([3e-6])
    assert machine.seconds(two) == pytest.approx([2e-6])
    assert not machine.estimated
    alone = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=kernel_tables("x", [gated]))
    alone.seconds(two)
    assert alone.estimated == {"moe bf16"}


def test_a_machine_that_prices_shares_counts_its_share_once() -> None:
    large = {**MOE_AXES, "hidden": 4096, "ffn": 1536}
    row = ({"tokens": 16, **large}, 1e-6)
    tables = kernel_tables("x", [arrays_of("moe", [row], kind=LOAD, dtype="fp8_block")])
    half = SharedMachine(
        engines=ENGINE_TRAITS,
        sheet=H200,
        tables=tables,
        share=DeviceShare(compute_ratio=0.5, bandwidth_ratio=0.5),
    )
    one = replace(experts(expert=4), axes={**large, "tokens": AT})
    plain = float(half.seconds(one)[0])
    dispatched = float(half.seconds(replace(one, kind=f"context/{LOAD}"))[0])
    # Nobody measured copies alone, so that both are the one kernel of the table.
    assert dispatched == pytest.approx(plain, rel=0.01)
    assert 1.5e-6 < plain < 2e-6


def test_gemms_take_the_share_of_the_peak_that_the_device_was_seen_to_sustain() -> None:
    # 2 x 8192^3 operations; of NVIDIA's as measured, 0.84 of A100's peak in bf16; where GEMMs of a
    # model sustain less than 0.7 of the peak, large ones reach less in proportion: MI300X's best
    # GEMM has 0.54 in bf16 (sheets/mi300x.toml).
    sides = {"m": 8192.0, "n": 8192.0, "k": 8192.0}
    for device, dtype, reached_per_s in (
        ("mi300x", "bf16", 0.51 * 1307.4e12),
        ("mi300x", "fp8", 0.33 * 2614.9e12),
        ("mi325x", "bf16", 0.60 * 1307.4e12),
        ("mi355x", "fp8", 0.37 * 5033.2e12),
        ("a100-80gb-sxm", "bf16", 0.84 * 312e12),
        ("h100-sxm", "fp8", 0.6 * 1978.9e12),
        # A quarter of the matrix units beside as much of everything else.
        ("h20-sxm", "bf16", 0.94 * 148e12),
    ):
        machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(device), tables=None)
        taken_s = machine.seconds(Op(operation="gemm", dtype=dtype, axes=sides))
        assert float(taken_s) == pytest.approx(2.0 * 8192.0**3 / reached_per_s, rel=0.08), device


def test_experts_of_amd_without_tuned_kernels_start_late_and_read_int4_slowly() -> None:
    machines = {
        name: ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=None)
        for name in ("mi300x", "h200-sxm")
    }
    for device, engine, dtype, is_slower in (
        ("mi300x", "sglang", "fp8_block", True),
        ("mi300x", "sglang@0.5.9", "int4_wo", True),
        ("mi300x", "sglang", "bf16", False),
        ("mi300x", "vllm", "fp8_block", False),
        ("h200-sxm", "sglang", "fp8_block", False),
    ):
        seconds = machines[device].seconds(experts(expert=1, dtype=dtype, software=engine))
        assert (seconds[0] > 0.2e-3) == is_slower, (device, engine, dtype)
    # DeepSeek-V3's layer of one token on 8 MI300X is 0.27 ms above its kernels; Kimi-K2.5's of 16
    # on 4 MI350X takes about 2.9 ms (sgl-project/sgl-cookbook).
    sizes = {"hidden": 7168, "ffn": 2048, "top_k": 8, "experts": 384, "tensor": 4, "expert": 1}
    op = replace(
        experts(expert=1, dtype="int4_wo", software="sglang"), axes={"tokens": AT, **sizes}
    )
    slow = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("mi355x"), tables=None).seconds(
        op
    )
    assert slow[0] == pytest.approx(2.9e-3, rel=0.2)


def test_all_reduces_take_what_engines_own_kernels_were_measured_to() -> None:
    # Microseconds of SGLang 0.5.9's kernels in a CUDA graph (aiconfigurator-core 0.12.0).
    measured = {
        "a100-80gb-sxm": {4: (6.1, 14.5, 26.3), 8: (8.0, 19.9, 28.5)},
        "h100-sxm": {4: (4.9, 11.4, 18.6), 8: (5.6, 15.8, 20.9)},
        "h200-sxm": {4: (4.8, 10.5, 17.8), 8: (5.6, 14.9, 20.2)},
        "b200-sxm": {4: (7.8, 17.7, 27.8), 8: (8.3, 25.9, 28.9)},
    }
    num_bytes = np.array([2.0**15, 2.0**19, 2.0**21])
    for name, by_ranks in measured.items():
        machine = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=None)
        for ranks, seconds in by_ranks.items():
            rated = machine.seconds(reduction(num_bytes, ranks=ranks)) * 1e6
            assert np.all(np.abs(np.log(rated / np.array(seconds))) < np.log(1.66))


def test_ranks_on_pcie_and_other_collectives_start_as_nccl_does() -> None:
    # NCCL 2.29.2 of one KiB to 16: 13 us for 4 RTX PRO 6000 and 26 for 8, 7 to 12 us for an
    # all-gather of 4 of NVLink's, 11 to 20 of 8 (aiconfigurator-core 0.12.0).
    few = np.array([1024.0])
    workstation = ServingMachine(
        engines=ENGINE_TRAITS, sheet=find_device("rtx-pro-6000"), tables=None
    )
    for ranks, least_us in ((4, 13.0), (8, 25.0)):
        assert workstation.seconds(reduction(few, ranks=ranks))[0] * 1e6 > least_us
    hopper = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None)
    for ranks, low_us, high_us in ((4, 7.0, 12.0), (8, 11.0, 20.0)):
        gathered = collective("all_gather", few, ranks=ranks, software="vllm")
        assert low_us < hopper.seconds(gathered)[0] * 1e6 < high_us


def test_expert_ranks_wait_for_the_one_that_reads_most() -> None:
    machine = ServingMachine(engines=ENGINE_TRAITS, sheet=H200, tables=None)
    sizes = {"hidden": 3072, "ffn": 1536, "top_k": 8, "experts": 256, "tensor": 1, "expert": 8}
    waiting = Op(
        operation="moe", kind=LOAD, dtype="fp8_block", axes={"tokens": AT, **sizes}, software="vllm"
    )
    read = 3.0 * 3072 * 1536 / 4.8e12
    more = machine.seconds(waiting) - machine.seconds(replace(waiting, kind=BALANCED))
    # Sixteen tokens reach 12.7 of 32 experts on average and 16.6 on the busiest of eight ranks.
    assert float(more[0]) == pytest.approx(3.9 * read, rel=0.25)
    spread = replace(waiting, axes={**waiting.axes, "tensor": 8, "expert": 1})
    assert machine.seconds(spread) == machine.seconds(replace(spread, kind=BALANCED))
    fourth = replace(waiting, dtype="nvfp4")
    assert machine.seconds(fourth) == machine.seconds(replace(fourth, kind=BALANCED))


def test_small_kernels_of_rocm_start_later() -> None:
    none = memory_bound(np.array([0.0]))
    instinct, hopper = (
        ServingMachine(engines=ENGINE_TRAITS, sheet=find_device(name), tables=None)
        for name in ("mi300x", "h200-sxm")
    )
    assert instinct.seconds(none)[0] == pytest.approx(5e-6)
    assert hopper.seconds(none)[0] == pytest.approx(1.5e-6)
