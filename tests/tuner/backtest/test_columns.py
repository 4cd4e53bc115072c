"""Published rows as models, strategies and machines."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.backtest.columns import build_run, build_runs, stack_runs
from tuner.backtest.engines import OF_RELEASE
from tuner.backtest.rows import Row, read_rows
from tuner.costs.train.memory_constants import BY_GENERATION, OF_FAMILY
from tuner.engines.targets import PROGRAMS
from tuner.prices.train.constants import GemmPrecision, Software

RUNS = Path(__file__).parent / "runs.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read_rows(RUNS)}


def _with(row: Row, **numbers: float) -> Row:
    return replace(row, numbers={**row.numbers, **numbers})


def test_every_row_is_a_column_or_has_a_reason(rows: dict[str, Row]) -> None:
    runs, reasons = build_runs(tuple(rows.values()))
    assert [run.row.id for run in runs] == [
        "dense-a",
        "dense-b",
        "dense-c",
        "moe-a",
        "moe-b",
        "too-big",
    ]
    by_id = {row.id: reasons.get(row.number, "") for row in rows.values()}
    assert by_id["no-arch"] == "no arch_json, and Mystery is not known"
    assert by_id["bad-json"] == """arch_json '{"hidden":' is not JSON"""
    assert by_id["not-finite"] == "step_time_s 'inf' is not finite"
    assert by_id["negative"] == "mbs '-1' is not a whole number from 1 on"
    assert by_id["no-time"].startswith("neither step_time_s, tokens_per_sec_per_gpu")
    assert by_id["no-device"] == "no device description is named 'Abacus'"
    assert by_id["indivisible"] == "gbs 7 is no multiple of mbs 2 * dp 1"
    assert by_id["degrees"] == "tp 3 * pp 1 * cp 1 does not divide num_gpus 8"


def test_data_parallelism_is_what_the_devices_leave(rows: dict[str, Row]) -> None:
    run = build_run(rows["dense-b"])
    # 8 devices / (TP 2 * PP 2) = 2 replicas, 128 sequences / (2 * 1) = 64 micro-batches.
    assert run.strategy.data == 2.0
    assert run.strategy.num_microbatches == 64.0
    assert run.counts == (16, 16)
    assert "vpp" in run.assumed


def test_degrees_that_give_fewer_devices_leave_context_parallelism(rows: dict[str, Row]) -> None:
    # TP 4 * DP 1 on 8 devices: two ranks share a sequence, if the row does not say otherwise.
    dense = rows["dense-c"]
    numbers = {**dense.numbers, "dp": 1.0}
    del numbers["cp"]
    run = build_run(replace(dense, numbers=numbers))
    assert (run.strategy.context, run.strategy.data) == (2.0, 1.0)
    assert "cp" in run.assumed
    contradictory = replace(dense, numbers={**numbers, "cp": 1.0})
    with pytest.raises(ValueError, match="dp 1 does not divide num_gpus 8"):
        build_run(contradictory)


def test_seconds_come_from_what_was_printed(rows: dict[str, Row]) -> None:
    assert build_run(rows["dense-a"]).measured_s == 14.0
    # 128 * 8192 tokens / 8 devices / 9000 tokens per second and device.
    assert build_run(rows["dense-b"]).measured_s == pytest.approx(128 * 8192 / 8 / 9000)


def test_seconds_from_flop_count_the_full_square_of_attention(rows: dict[str, Row]) -> None:
    # Weights of a layer that a token meets: attention 4096 * (4096 + 2 * 1024 + 4096), network
    # 3 * 4096 * 14336; the head 4096 * 128256. Scores and values: 2 * 8192 * 32 * (128 + 128) FLOP.
    layer = 2 * (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336) + 2 * 8192 * 32 * 256
    flop_per_token = 3 * (32 * layer + 2 * 4096 * 128256)
    expected_s = flop_per_token * 128 * 8192 / 8 / 420e12
    assert build_run(rows["dense-c"]).measured_s == pytest.approx(expected_s)


def test_what_ran_out_of_memory_needs_no_time(rows: dict[str, Row]) -> None:
    assert build_run(rows["too-big"]).measured_s is None


def test_blank_flags_of_a_recipe_are_off_and_guesses_are_named(rows: dict[str, Row]) -> None:
    known, guessed = build_run(rows["moe-a"]), build_run(rows["moe-b"])
    assert (known.strategy.is_hybridep, known.strategy.partial_graph) == (1.0, 1.0)
    assert (guessed.strategy.is_hybridep, guessed.strategy.partial_graph) == (0.0, 0.0)
    assert known.knows_recompute
    assert "dispatcher" not in known.assumed
    assert {"ep", "dispatcher", "a2a_overlap", "recompute"} <= set(guessed.assumed)
    # A GB200 tray has 4 devices, and 4 divides both 8 ranks and 128 experts.
    assert guessed.strategy.expert == 4.0
    texts = {**rows["moe-a"].texts, "recipe_match": "near", "recompute": "mla_up_proj"}
    near = build_run(replace(rows["moe-a"], texts=texts))
    assert near.strategy.recompute_mla_up_proj == near.strategy.is_hybridep == 1.0
    assert {"dispatcher", "cuda_graph", "recompute"} <= set(near.assumed)


@each_row(
    ("flag", "field"),
    [("overlap_grad_reduce", "overlap_gradients"), ("tensor_overlap", "overlap_tensor")],
)
def test_a_stated_overlap_replaces_the_software_s(
    rows: dict[str, Row], flag: str, field: str
) -> None:
    for stated in (False, True):
        run = build_run(replace(rows["dense-b"], flags={flag: stated}))
        assert float(getattr(run.strategy, field)) == float(stated)


def test_a_stated_network_and_layers_in_bf16_count(rows: dict[str, Row]) -> None:
    run = build_run(_with(rows["moe-a"], node_gbit_per_s=1600.0, bf16_share=0.5))
    # 200 GB/s for the four devices of a tray.
    assert run.hardware.scale_out_bytes_per_s == 50e9
    wide, narrow = run.device.flop_per_s["bf16"], run.device.flop_per_s["fp8"]
    expected = 2.0 / (1.0 / wide + 1.0 / narrow)
    assert run.hardware.matmul_flop_per_s == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"bf16_share 1\.5 is not a share of 0 to 1"):
        build_run(_with(rows["moe-a"], bf16_share=1.5))


def test_recipes_overlap_tensor_parallelism_but_in_nvfp4(rows: dict[str, Row]) -> None:
    def overlap(precision: str, **numbers: float) -> float:
        row = _with(rows["dense-b"], **numbers)
        texts = {**row.texts, "gpu": "DGX-GB200", "release": "nemo-26.04", "precision": precision}
        return float(build_run(replace(row, texts=texts)).strategy.overlap_tensor)

    assert (overlap("bf16"), overlap("MXFP8"), overlap("NVFP4")) == (1.0, 1.0, 0.0)
    assert overlap("MXFP8", tp=1.0) == 0.0
    assert build_run(rows["dense-b"]).strategy.overlap_tensor == 0.0


def test_megatron_fsdp_shards_eight_bit_parameters_once(rows: dict[str, Row]) -> None:
    row = rows["dense-b"]

    def stored(precision: str, sharding: str) -> float:
        texts = {"release": "nemo-26.04", "precision": precision, "zero_or_fsdp": sharding}
        return float(build_run(replace(row, texts={**row.texts, **texts})).strategy.weight_bytes)

    assert stored("FP8-CS", "FSDP") == stored("FP8", "FSDP=2") == 1.0
    assert stored("MXFP8", "FSDP") == stored("BF16", "FSDP") == stored("FP8-CS", "DDP") == 2.0


def test_release_and_precision_choose_software_and_peak(rows: dict[str, Row]) -> None:
    run = build_run(rows["moe-a"])
    assert (run.family, run.release) == ("nemo", "26.04")
    assert run.software is Software.MEGATRON_2026
    assert run.precision is GemmPrecision.MXFP8
    assert run.hardware.matmul_flop_per_s == run.device.flop_per_s["fp8"]


def test_degrees_that_cannot_be_are_refused(rows: dict[str, Row]) -> None:
    with pytest.raises(ValueError, match="ep 5 does not divide 128 experts"):
        build_run(_with(rows["moe-a"], ep=5.0))
    with pytest.raises(ValueError, match="ep 16 \\* etp 1 does not divide the 8 ranks"):
        build_run(_with(rows["moe-a"], ep=16.0))
    with pytest.raises(ValueError, match=r"64 stages \(pp \* vpp\) exceed 32 layers"):
        build_run(_with(rows["dense-b"], vpp=32.0))


def test_columns_keep_the_order_of_the_runs(rows: dict[str, Row]) -> None:
    runs, _ = build_runs(tuple(rows.values()))
    batch = stack_runs(runs)
    assert batch.strategy.tensor.tolist() == [1.0, 2.0, 4.0, 1.0, 1.0, 8.0]  # type: ignore[union-attr]  # an array here
    assert batch.stages.dense_SC.shape == (2, 6)
    assert batch.stages.dense_SC[:, 1].tolist() == [16.0, 16.0]
    assert batch.stages.head_SC[:, 1].tolist() == [0.0, 1.0]


def test_memory_of_torchtitan_goes_by_what_is_compiled_and_its_allocator(
    rows: dict[str, Row],
) -> None:
    def family(release: str, **flags: bool) -> str:
        texts = {**rows["dense-a"].texts, "release": release}
        return build_run(replace(rows["dense-a"], texts=texts, flags=flags)).memory_family

    assert family("torchtitan-2025.06", compiled=True) == "torchtitan-2025-compiled"
    in_segments = family("torchtitan-2025.06", compiled=True, expandable_segments=False)
    assert in_segments == "torchtitan-2025-compiled-segments"
    # Nothing is known of segments in 2024.
    assert family("torchtitan-2024.12", expandable_segments=False) == "torchtitan-2024"
    assert family("automodel", fused_loss=True) == "automodel-linear-loss"
    eager = replace(rows["dense-a"], texts={**rows["dense-a"].texts, "release": "torchtitan-0.2.1"})
    assert build_run(replace(eager, flags={"compiled": False})).software is Software.TORCH_EAGER


def test_memory_of_torchtitan_goes_by_month_or_version_and_an_unknown_one_is_named(
    rows: dict[str, Row],
) -> None:
    def family(release: str) -> tuple[str, bool]:
        texts = {**rows["dense-a"].texts, "release": release}
        run = build_run(replace(rows["dense-a"], texts=texts))
        return run.memory_family, "release" in run.assumed

    assert {
        release: family(release)
        for release in (
            "torchtitan-0.1.0",
            "torchtitan-0.2.0",
            "torchtitan-0.2.1",
            "torchtitan-0.3",
            "torchtitan",
        )
    } == {
        "torchtitan-0.1.0": ("torchtitan-2025", False),
        "torchtitan-0.2.0": ("torchtitan-2025", False),
        "torchtitan-0.2.1": ("torchtitan", False),
        "torchtitan-0.3": ("torchtitan", False),
        "torchtitan": ("torchtitan", True),
    }

    months = ("2024.12", "2025.05", "2025.06", "2025.10", "2025.11")
    assert [family(f"torchtitan-{month}")[0] for month in months] == [
        "torchtitan-2024",
        "torchtitan-2024",
        "torchtitan-2025",
        "torchtitan-2025",
        "torchtitan",
    ]


def test_every_software_that_runs_or_targets_name_has_constants_of_memory() -> None:
    engines = {one.family for one in OF_RELEASE.values()}
    engines |= {target.family for target in PROGRAMS.values()}
    assert engines <= {*OF_FAMILY, *BY_GENERATION}


def test_a_source_that_is_a_software_s_name_implies_it_where_the_release_names_none(
    rows: dict[str, Row],
) -> None:
    def engine(source: str, release: str) -> tuple[str, str]:
        row = rows["dense-a"]
        run = build_run(replace(row, texts={**row.texts, "source": source, "release": release}))
        return run.family, run.release

    assert engine("torchtitan", "") == ("torchtitan", "")
    assert engine("torchtitan", "nemo-26.04") == ("nemo", "26.04")
    assert engine("torchtitan", "2025.06") == ("torchtitan", "2025.06")
    assert engine("megatron-bridge", "25.09") == ("nemo", "25.09")
    assert engine("lab", "25.09") == ("unstated", "25.09")
