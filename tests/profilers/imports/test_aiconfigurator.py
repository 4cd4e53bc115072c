import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profilers.arrays import Arrays
from profilers.errors import MissingLibraryError, ProfileUnreadableError, UnknownNameError
from profilers.imports import aiconfigurator_arrays
from profilers.imports.aiconfigurator_arrays import read_system
from profilers.imports.registry import import_measurements
from profilers.imports.releases import release_order
from profilers.imports.result import Imported
from profilers.records import Measurement, Source
from profilers.store import read_profile, write_profile
from tests.expect import contains, refused
from tests.rows import each_row
from tuner.cli import app as frame

Write = Callable[[str, Sequence[Mapping[str, Any]]], Path]

GEMM = {"gemm_dtype": "bfloat16", "m": 4, "n": 8, "k": 16, "latency": 0.5}
MOE = {
    "moe_dtype": "fp8_block",
    "num_tokens": 256,
    "hidden_size": 512,
    "inter_size": 1024,
    "topk": 2,
    "num_experts": 8,
    "moe_tp_size": 1,
    "moe_ep_size": 4,
    "distribution": "power_law_1.2",
    "latency": 1.0,
}
NCCL = {
    "op_name": "alltoall",
    "nccl_dtype": "half",
    "num_gpus": 4,
    "message_size": 1024,
    "latency": 0.01,
}
DEEPEP = {
    "node_num": 2,
    "hidden_size": 7168,
    "num_token": 64,
    "num_topk": 8,
    "num_experts": 256,
    "dispatch_sms": 20,
    "dispatch_transmit_us": 100.0,
    "dispatch_notify_us": 20.0,
    "combine_sms": 24,
    "combine_transmit_us": 200.0,
    "combine_notify_us": 30.0,
}


def imported(systems: Path, **options: str) -> Imported:
    return import_measurements("aiconfigurator", systems, options=options, created="now")


def only(found: Imported) -> Measurement:
    (row,) = found.profile.measurements
    return row


def test_a_gemm_becomes_seconds_with_its_origin(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    found = imported(systems)
    row = only(found)
    assert row.case.id == "gemm/bf16/forward/m4-n8-k16"
    assert row.times_s == (0.0005,)  # 0.5 ms
    assert row.source is Source.IMPORTED
    assert found.profile.header.tables["gemm"].note == "1 rows of trtllm 1.0 k"
    machine = found.profile.header.machine
    assert (machine.device, machine.num_devices) == ("NVIDIA T1", 8)
    assert machine.memory_bytes_per_device == 1_000_000
    assert machine.libraries == {"trtllm": "1.0"}


def test_both_halves_of_deepep_are_read_with_their_notification(
    systems: Path, write: Write
) -> None:
    write("comm/sglang/0.5/wideep_deepep_normal_perf.parquet", [DEEPEP])
    dispatch, combine = imported(systems).profile.measurements
    assert dispatch.case.id == (
        "expert_all_to_all/deepep_normal_dispatch/"
        "tokens64-hidden7168-top_k8-experts256-ranks16-nodes2-units20"
    )
    # 100 + 20 and 200 + 30 microseconds
    assert dispatch.times_s == pytest.approx((120e-6,))
    assert combine.times_s == pytest.approx((230e-6,))
    assert combine.case.axes["units"] == 24


def test_without_a_framework_every_one_becomes_a_profile_of_its_own(
    systems: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = GEMM | {"device": "NVIDIA H200"}
    write("gemm/trtllm/1.0/gemm_perf.parquet", [known])
    write("gemm/vllm/0.2/gemm_perf.parquet", [known | {"m": 32}])
    write("mlp/empty/0.2/other_perf.parquet", [known])
    write("comm/nccl/2.29/nccl_perf.parquet", [NCCL])
    out = tmp_path / "out"
    command = ["profile", "import", "aiconfigurator", str(systems), "-o", str(out)]
    assert frame.run([*command, "--operations", "gemm"]) == 0
    stored = {
        folder.name: [row.case.axes["m"] for row in read_profile(folder).rows("gemm")]
        for folder in sorted(out.iterdir())
    }
    assert stored == {"trtllm": [4], "vllm": [32]}
    contains(capsys.readouterr().err, "no table of empty", "2 profiles in")
    assert frame.run([*command, "--system", "moon"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    # No plan could use the kernels of a device that nothing describes.
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    assert frame.run([*command, "--framework", "trtllm"]) == 2
    assert "NVIDIA T1" in capsys.readouterr().err


def test_one_framework_is_read_with_the_collectives_of_all(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    write("gemm/vllm/0.2/gemm_perf.parquet", [GEMM | {"m": 32}])
    write("comm/nccl/2.29/nccl_perf.parquet", [NCCL])
    with pytest.raises(UnknownNameError, match="say --framework with one of trtllm, vllm"):
        imported(systems)
    profile = imported(systems, framework="vllm").profile
    assert [row.case.axes.get("m") for row in profile.rows("gemm")] == [32]
    assert len(profile.rows("collective")) == 1
    with pytest.raises(UnknownNameError, match="'sglang' has no tables there; those with tables"):
        imported(systems, framework="sglang")


def test_of_two_versions_the_newer_measurement_counts(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.3.0rc9/gemm_perf.parquet", [GEMM, GEMM | {"m": 2, "latency": 7.0}])
    write("gemm/trtllm/1.3.0rc10/gemm_perf.parquet", [GEMM | {"latency": 0.25}])
    found = imported(systems)
    assert {row.case.axes["m"]: row.times_s[0] for row in found.profile.measurements} == {
        4: 0.00025,
        2: 0.007,
    }
    assert found.profile.header.tables["gemm"].note == (
        "1 rows of trtllm 1.3.0rc10 k; 1 rows of trtllm 1.3.0rc9 k"
    )


def test_rows_of_another_device_are_left_out_and_named(systems: Path, write: Write) -> None:
    rows = [GEMM, GEMM | {"m": 8}, GEMM | {"m": 16, "device": "NVIDIA T2"}]
    write("gemm/trtllm/1.0/gemm_perf.parquet", rows)
    found = imported(systems)
    assert len(found.profile.measurements) == 2
    assert found.left_out == ("gemm_perf.parquet 1.0: 1 rows not of NVIDIA T1",)


def test_a_device_named_in_short_is_the_same(systems: Path, write: Write) -> None:
    rows = [GEMM | {"device": f"NVIDIA T1{more}", "m": m} for m, more in ((1, " 8GB"), (2, ""))]
    write("gemm/trtllm/1.0/gemm_perf.parquet", [*rows, GEMM | {"device": "NVIDIA T1 8GB"}])
    found = imported(systems)
    assert len(found.profile.measurements) == 3
    assert found.profile.header.machine.device == "NVIDIA T1 8GB"
    write("gemm/trtllm/1.0/gemm_perf.parquet", [*rows, GEMM | {"device": "NVIDIA T10"}] * 2)
    assert found.left_out == ()
    assert len(imported(systems).left_out) == 1


def test_tables_and_settings_that_are_no_profile_are_named_or_passed_over(
    systems: Path, write: Write
) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    (systems / "defaults.yaml").write_text("- one\n- two\n")
    assert only(imported(systems)).case.operation == "gemm"
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    write("quantize/trtllm/1.0/scale_matrix_perf.parquet", [{"m": 1, "latency": 1.0}])
    assert imported(systems).left_out == ("scale_matrix_perf: no operation of a profile holds it",)


def test_text_tables_of_older_releases_are_read(systems: Path, write: Write) -> None:
    write("trtllm/1.0/gemm_perf.txt", [GEMM])
    assert only(imported(systems)).case.id == "gemm/bf16/forward/m4-n8-k16"


def test_names_in_text_tables_that_look_like_numbers_stay_names(
    systems: Path, write: Write
) -> None:
    names = {"gemm_dtype": "007", "kernel_source": "0090", "device": "NA"}
    write("trtllm/1.0/gemm_perf.csv", [GEMM | names, GEMM | names | {"m": 2.5}])
    with pytest.raises(ProfileUnreadableError, match=r"row 1: m is '2\.5', must be a whole"):
        imported(systems)
    write("trtllm/1.0/gemm_perf.csv", [GEMM | names])
    found = imported(systems)
    assert only(found).case.dtype == "007"
    assert found.profile.header.tables["gemm"].note == "1 rows of trtllm 1.0 0090"
    assert found.profile.header.machine.device == "NA"


def test_the_folder_of_a_system_itself_can_be_named(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    assert only(imported(systems / "data" / "tiny_sxm")).case.operation == "gemm"


def test_only_the_named_operations_are_kept(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    write("moe/trtllm/1.0/moe_perf.parquet", [MOE])
    assert only(imported(systems, operations="moe")).case.operation == "moe"
    with pytest.raises(UnknownNameError, match="operation 'sorting' is not one of gemm, "):
        imported(systems, operations="moe,sorting")


@each_row(
    ("row", "complaint"),
    [
        (GEMM | {"latency": -1.0}, "row 1: latency is '-1.0', must be positive"),
        (GEMM | {"latency": float("nan")}, "row 1: latency is 'nan', must be a number"),
        (GEMM | {"m": 0}, "row 1: m is '0.0', must be a whole number of at least 1"),
        (GEMM | {"gemm_dtype": "x" * 999}, "row 1: gemm_dtype is 'x+', must be a short text"),
    ],
)
def test_a_damaged_row_is_one_clear_line(
    systems: Path, write: Write, row: Mapping[str, Any], complaint: str
) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM, row])
    with refused(ProfileUnreadableError, match=complaint):
        imported(systems)


@each_row(
    ("name", "column", "complaint"),
    (
        ("m", ["4"], "row 0: m is '4', must be a number"),
        ("m", [], "row 0: m is '', must be a number"),
        ("gemm_dtype", [b"fp8"], "row 0: gemm_dtype is .*fp8.*, must be a short text"),
        ("gemm_dtype", [8], "row 0: gemm_dtype is '8', must be a short text"),
        ("latency", [[1.0]], "column 'latency' is missing"),
        ("k", [True], "column 'k' is missing"),
        ("n", [None], "column 'n' is missing"),
        ("device", [7], ""),
    ),
)
def test_columns_of_another_type_are_one_clear_line(
    systems: Path, write: Write, name: str, column: Any, complaint: str
) -> None:
    file = write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    table = pq.read_table(file).slice(0, len(column))
    kind = pa.string() if not column else None
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, pa.array(column, type=kind)), file)
    if complaint:
        with refused(ProfileUnreadableError, match=complaint):
            imported(systems)
    else:
        assert imported(systems).profile.header.machine.device == "7"


def test_a_missing_column_is_named(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [{"gemm_dtype": "fp8", "m": 1, "n": 1}])
    with pytest.raises(ProfileUnreadableError, match="column 'k' is missing"):
        imported(systems)


@each_row(
    ("content", "complaint"),
    [
        (b"PAR1 nonsense PAR1", "gemm_perf.parquet: "),
        (b"version https://git-lfs.github.com/spec/v1\n", "only a Git LFS pointer"),
        (b"", "gemm_perf.parquet: "),
    ],
)
def test_a_file_that_is_no_table_is_one_clear_line(
    systems: Path, write: Write, content: bytes, complaint: str
) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM]).write_bytes(content)
    with refused(ProfileUnreadableError, match=complaint):
        imported(systems)


def test_a_description_may_not_lead_out_of_its_folder(systems: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (systems / "tiny_sxm.yaml").write_text("data_dir: ../elsewhere\n")
    with pytest.raises(UnknownNameError, match="say --system with one of none"):
        imported(systems)


@each_row("text", ["a: [", "!!python/object/apply:os.getcwd []"])
def test_a_description_that_is_no_plain_yaml_is_refused(systems: Path, text: str) -> None:
    (systems / "tiny_sxm.yaml").write_text(text)
    with pytest.raises(ProfileUnreadableError, match=r"tiny_sxm\.yaml"):
        imported(systems)


def test_a_description_without_the_machine_is_refused(systems: Path, write: Write) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    (systems / "tiny_sxm.yaml").write_text("data_dir: data/tiny_sxm\nnode: 3\ngpu: {}\n")
    with pytest.raises(ProfileUnreadableError, match=r"node\.num_gpus_per_node and gpu\.mem"):
        imported(systems)


@each_row(
    ("memory", "complaint"),
    [("-1", "memory_bytes_per_device"), ("1" + "0" * 400, "memory_bytes"), (".inf", "numbers")],
)
def test_a_machine_that_cannot_exist_is_refused_with_its_file(
    systems: Path, write: Write, memory: str, complaint: str
) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    file = systems / "tiny_sxm.yaml"
    file.write_text(re.sub(r"mem_capacity: [^,]+", f"mem_capacity: {memory}", file.read_text()))
    with pytest.raises(ProfileUnreadableError, match=rf"tiny_sxm\.yaml: .*{complaint}"):
        imported(systems)


def test_without_a_path_the_installed_package_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiconfigurator_arrays, "PACKAGE", "no_such_package_is_installed")
    with pytest.raises(MissingLibraryError, match=r"pip install 'moetune\[nvidia\]'"):
        import_measurements("aiconfigurator", None, options={}, created="now")


def test_an_installed_package_is_found_without_being_imported(
    systems: Path, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    package = tmp_path / "site" / "fake_configurator"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('engines are loaded')\n")
    systems.rename(package / "systems")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(aiconfigurator_arrays, "PACKAGE", "fake_configurator")
    found = import_measurements("aiconfigurator", None, options={}, created="now")
    assert only(found).case.operation == "gemm"


def test_what_was_imported_survives_the_disk(systems: Path, write: Write, tmp_path: Path) -> None:
    write("gemm/trtllm/1.0/gemm_perf.parquet", [GEMM])
    write("moe/trtllm/1.0/moe_perf.parquet", [MOE])
    profile = imported(systems).profile
    write_profile(tmp_path / "out", profile)
    assert read_profile(tmp_path / "out") == profile


def test_an_unknown_kind_or_option_is_answered_with_the_known_ones(systems: Path) -> None:
    with pytest.raises(UnknownNameError, match="'csv' is not one of aiconfigurator, nccl-tests"):
        import_measurements("csv", systems, options={}, created="now")
    with pytest.raises(UnknownNameError, match="no option 'collective'; it has system, framework"):
        imported(systems, collective="all_reduce")


# Tables read directly say what imported ones say.

ATTENTION_SIZES = {
    "batch_size": 2,
    "isl": 64,
    "num_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attn_dtype": "bfloat16",
    "kv_cache_dtype": "fp8",
    "window_size": 0,
    "beam_width": 1,
}
LATENT = {"mla_dtype": "bfloat16", "num_heads": 16, "batch_size": 2, "isl": 64}
EXPERTS = {
    "moe_dtype": "fp8_block",
    "num_tokens": 16,
    "hidden_size": 64,
    "inter_size": 32,
    "topk": 2,
    "num_experts": 8,
    "moe_tp_size": 1,
    "moe_ep_size": 4,
    "distribution": "power_law_1.01",
}
ROWS: Mapping[str, Mapping[str, Any]] = {
    "gemm_perf": {"gemm_dtype": "bfloat16", "m": 4, "n": 8, "k": 16},
    "context_attention_perf": {**ATTENTION_SIZES, "step": 0},
    "generation_attention_perf": {**ATTENTION_SIZES, "step": 127},
    "context_mla_perf": {**LATENT, "kv_cache_dtype": "bfloat16", "step": 0},
    "generation_mla_perf": {**LATENT, "kv_cache_dtype": "fp8", "step": 63},
    "mla_context_module_perf": {
        **LATENT,
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
        "step": 0,
    },
    "mla_generation_module_perf": {
        **LATENT,
        "kv_cache_dtype": "fp8",
        "gemm_type": "bfloat16",
        "step": 9,
    },
    "mla_bmm_perf": {
        "op_name": "mla_gen_pre",
        "bmm_dtype": "fp8",
        "num_tokens": 8,
        "num_heads": 16,
    },
    "dsa_context_module_perf": {
        **LATENT,
        "op_name": "dsa_context_module",
        "architecture": "GlmMoeDsaForCausalLM",
        "kv_cache_dtype": "fp8",
        "gemm_type": "fp8_block",
        "step": 128,
    },
    "dsa_generation_module_perf": {
        **LATENT,
        "op_name": "dsa_generation_module",
        "architecture": "GlmMoeDsaForCausalLM",
        "kv_cache_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "step": 128,
    },
    "gdn_perf": {
        "phase": "generation",
        "batch_size": 4,
        "seq_len": 1,
        "num_k_heads": 2,
        "num_v_heads": 8,
        "head_k_dim": 128,
        "head_v_dim": 128,
    },
    "moe_perf": EXPERTS,
    "wideep_context_moe_perf": EXPERTS,
    "wideep_generation_moe_perf": EXPERTS,
    "nccl_perf": {
        "op_name": "alltoall",
        "nccl_dtype": "half",
        "num_gpus": 4,
        "message_size": 256,
    },
    "custom_allreduce_perf": {
        "allreduce_dtype": "bfloat16",
        "num_gpus": 8,
        "message_size": 128,
        "backend": "vllm_graph",
    },
}


HEADS = "heads8-kv_heads2-head_dim128"
MOE_SIZES = "tokens16-hidden64-ffn32-top_k2-experts8-tensor1-expert4"
SPARSE = "GlmMoeDsaForCausalLM"
IDS: Mapping[str, str] = {
    "gemm_perf": "gemm/bf16/forward/m4-n8-k16",
    "context_attention_perf": f"attention/kv_fp8/bf16/forward/batch2-sequence64-{HEADS}",
    "generation_attention_perf": (
        f"decode_attention/kv_fp8/bf16/forward/batch2-past127-{HEADS}-window0"
    ),
    "context_mla_perf": "latent_attention/core/bf16/forward/batch2-sequence64-heads16",
    "generation_mla_perf": "latent_decode/core/kv_fp8/bf16/forward/batch2-past63-heads16",
    "mla_context_module_perf": (
        "latent_attention/module/kv_fp8/gemm_fp8_block/bf16/forward/batch2-sequence64-heads16"
    ),
    "mla_generation_module_perf": (
        "latent_decode/module/kv_fp8/gemm_bf16/bf16/forward/batch2-past9-heads16"
    ),
    "mla_bmm_perf": "latent_product/pre/fp8/forward/tokens8-heads16",
    "dsa_context_module_perf": (
        f"sparse_latent_attention/{SPARSE}/kv_fp8/gemm_fp8_block/bf16/forward/"
        "batch2-past128-sequence64-heads16"
    ),
    "dsa_generation_module_perf": (
        f"sparse_latent_decode/{SPARSE}/gemm_bf16/bf16/forward/batch2-past128-heads16"
    ),
    "gdn_perf": ("gated_delta/generation/k/bf16/forward/batch4-sequence1-key_heads2-value_heads8"),
    "moe_perf": f"moe/power_law_1.01/fp8_block/forward/{MOE_SIZES}",
    "wideep_context_moe_perf": f"moe/wideep_context/power_law_1.01/fp8_block/forward/{MOE_SIZES}",
    "wideep_generation_moe_perf": (
        f"moe/wideep_generation/power_law_1.01/fp8_block/forward/{MOE_SIZES}"
    ),
    # 256 elements of two bytes
    "nccl_perf": "collective/all_to_all/bytes512-ranks4-stride1-world4",
    "custom_allreduce_perf": ("collective/all_reduce/vllm_graph/bytes256-ranks8-stride1-world8"),
}


@each_row("table", IDS)
def test_a_row_says_the_same_read_directly_and_imported(
    table: str, systems: Path, write: Write
) -> None:
    framework = "nccl" if table == "nccl_perf" else "vllm"
    row = {"kernel_source": "k", **ROWS[table], "latency": 0.25}
    file = write(f"family/{framework}/1.2.0/{table}.parquet", [row])
    (found,) = read_system(systems, system="tiny_sxm")
    write("other/vllm/1.2.0/other_perf.parquet", [row])
    (stored,) = _imported(systems)
    file.unlink()
    assert stored.case.id == IDS[table]
    _agree(found, stored)
    assert stored.times_s == (0.00025,)
    assert found.software == ("" if framework == "nccl" else "vllm")


def test_dispatch_and_combine_are_read(systems: Path, write: Write) -> None:
    axes = {"node_num": 2, "num_token": 64, "hidden_size": 7168, "num_topk": 8, "num_experts": 256}
    times = {"dispatch_avg_t_us": 50.0, "combine_avg_t_us": 70.0}
    row = {"kernel_source": "k", **axes, **times}
    write("comm/sglang/0.5.12/wideep_deepep_ll_perf.parquet", [row])
    found = read_system(systems, system="tiny_sxm")
    stored = _imported(systems)
    assert [one.case.id for one in stored] == [
        f"expert_all_to_all/deepep_low_latency_{half}/"
        "tokens64-hidden7168-top_k8-experts256-ranks16-nodes2-units0"
        for half in ("dispatch", "combine")
    ]
    for one, row_of in zip(found, stored, strict=True):
        _agree(one, row_of)


def test_tables_and_rows_that_only_the_importer_reads(systems: Path, write: Write) -> None:
    moe = {**ROWS["moe_perf"], "kernel_source": "nongated_x", "num_slots": 16, "latency": 1.0}
    write("moe/trtllm/1.0/wideep_moe_perf.parquet", [moe, {**moe, "num_slots": 8, "topk": 1}])
    a2a = {"comm_backend": "nvl", "phase": "dispatch", "comm_dtype": "default", "latency": 3.0}
    axes = {"num_tokens": 8, "hidden_size": 64, "topk": 2, "num_experts": 8, "ep_size": 4}
    write("comm/trtllm/1.0/moe_a2a_perf.parquet", [{**a2a, **axes, "node_num": 1}])
    windowed = {**ROWS["context_attention_perf"], "window_size": 32, "latency": 1.0}
    write("attention/trtllm/1.0/context_attention_perf.parquet", [windowed])
    assert read_system(systems, system="tiny_sxm") == ()
    assert {row.case.id for row in _imported(systems)} == {
        f"moe/wideep/power_law_1.01/nongated/16_slots/fp8_block/forward/{MOE_SIZES}",
        f"moe/wideep/power_law_1.01/nongated/fp8_block/forward/{MOE_SIZES.replace('k2', 'k1')}",
        "expert_all_to_all/nvl_dispatch/tokens8-hidden64-top_k2-experts8-ranks4-nodes1-units0",
        f"windowed_attention/kv_fp8/bf16/forward/batch2-sequence64-{HEADS}-window32",
    }


def _imported(systems: Path, **options: str) -> tuple[Measurement, ...]:
    found = import_measurements("aiconfigurator", systems, options=options, created="now")
    return found.profile.measurements


def _agree(found: Arrays, stored: Measurement) -> None:
    case = stored.case
    assert found.operation == case.operation
    assert (found.kind_N.tolist(), found.dtype_N.tolist()) == ([case.kind], [case.dtype])
    assert {axis: int(values[0]) for axis, values in found.axes_N.items()} == case.axes
    assert found.time_s_N.tolist() == list(stored.times_s)


def test_damaged_tables_are_refused_when_read_as_arrays(systems: Path, write: Write) -> None:
    assert read_system(systems, system="other") == ()
    file = write("gemm/vllm/1.0/gemm_perf.parquet", [{**ROWS["gemm_perf"], "latency": 1.0}])
    file.write_bytes(b"PAR1")
    with pytest.raises(ProfileUnreadableError, match=r"gemm_perf\.parquet"):
        read_system(systems, system="tiny_sxm")
    write("gemm/vllm/1.0/gemm_perf.parquet", [{"gemm_dtype": "fp8", "m": 1, "latency": 1.0}])
    with pytest.raises(ProfileUnreadableError, match="'n' is missing"):
        read_system(systems, system="tiny_sxm")


# Releases in the order in which they came out.


@each_row(
    ("older", "newer"),
    [("1.3.0rc20", "1.3.0"), ("0.5.6", "0.5.6.post2"), ("0.5.9", "0.5.10"), ("1.2", "1.2.1")],
)
def test_versions_are_ordered_as_people_read_them(older: str, newer: str) -> None:
    assert release_order(older) < release_order(newer)
