"""Published serving rows: what their publishers knew and did not print."""

from tests.benchmarks.published_serving import as_unseen, distinct, documented
from tests.rows import each_row
from tuner.backtest.serving.launches import PublishedLaunch, parse_launch

UNDOCUMENTED = "source_file=/x/h100/vllm/0.12.0/Llama.csv; silicon_concurrency=8"
PLAIN = {
    "silicon_data_source": "db-dump/2026-04-27; config_id=1; silicon_concurrency=8; image",
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "tp_size": "4.0",
    "attention_dp_size": "1",
    "moe_tp_size": "4",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "80.5",
    "silicon_tpot_ms": "11.25",
}


def launch_of(**cells: str) -> PublishedLaunch:
    return parse_launch(documented({**PLAIN, **cells}), number=1)


@each_row(
    ("cells", "read"),
    [
        # The columns state the product of both expert degrees as the devices.
        (("sglang", "DeepSeek-R1", "64", "1", "8", "8"), (8, 1, 1, 8)),
        (("sglang", "Qwen3-235B-A22B-FP8", "16", "1", "4", "4"), (4, 1, 1, 4)),
        (("trtllm", "DeepSeek-R1", "1", "64", "8", "8"), (1, 8, 1, 8)),
        # Both kinds of attention parallelism with their product for the experts.
        (("vllm", "Qwen3-235B-A22B-FP8", "4", "4", "1", "16"), (4, 1, 1, 4)),
        # Recipes that give every rank whole experts.
        (("vllm", "MiniMax-M2.5", "8", "1", "8", "1"), (8, 1, 1, 8)),
        (("trtllm", "DeepSeek-V3", "8", "1", "8", "1"), (8, 1, 1, 8)),
        (("sglang", "DeepSeek-V3", "8", "1", "8", "1"), (8, 1, 8, 1)),
        # Ranks that attend to different sequences have whole experts.
        (("sglang", "DeepSeek-V3", "1", "8", "8", "1"), (1, 8, 1, 8)),
        # A blank attention-data degree follows from the ranks of experts.
        (("vllm", "Qwen3-235B-A22B-FP8", "2", "", "1", "8"), (2, 4, 1, 8)),
    ],
)
def test_what_recipes_write_is_read_as_what_runs(
    cells: tuple[str, ...], read: tuple[int, ...]
) -> None:
    engine, model, tensor, data, moe_tensor, expert = cells
    side = launch_of(
        backend=engine,
        model_path=model,
        tp_size=tensor,
        attention_dp_size=data,
        moe_tp_size=moe_tensor,
        moe_ep_size=expert,
    ).sides[0]
    own = side.degrees
    assert (own.attention_tensor, own.attention_data, own.moe_tensor, own.expert) == read


def test_one_model_has_three_names() -> None:
    names = (
        "deepseek-ai/DeepSeek-R1-0528-FP4-V2",
        "deepseek-ai/DeepSeek-V3",
        "nvidia/DeepSeek-V3.1",
    )
    assert {launch_of(model_path=name, tp_size="8").decoder.name for name in names} == {
        "deepseek-v3"
    }


@each_row(
    ("cells", "read"),
    [
        ({}, ("fp8", "fp8", "fp8")),
        ({"backend": "sglang"}, ("fp8", "fp8", "bf16")),
        ({"model_path": "Kimi-K2.5", "precision": "fp4", "tp_size": "8"}, ("bf16", "nvfp4", "fp8")),
        ({"model_path": "gpt-oss-120b", "precision": "fp4"}, ("bf16", "mxfp4", "bf16")),
    ],
)
def test_checkpoints_keep_what_they_did_not_quantise(
    cells: dict[str, str], read: tuple[str, ...]
) -> None:
    formats = launch_of(**cells).formats
    assert (formats.attention, formats.experts, formats.kv) == read


def test_an_undocumented_driver_pays_per_sequence_on_engines_other_than_vllm() -> None:
    assert launch_of(backend="trtllm").sequence_s == 0.0
    for engine, waits in (("trtllm", True), ("sglang", True), ("vllm", False)):
        launch = launch_of(backend=engine, silicon_data_source=UNDOCUMENTED)
        assert (launch.sequence_s > 0.0) is waits


@each_row(("concurrency", "steps"), [(4, 10), (16, 30)])
def test_sglang_on_blackwell_polls_for_requests_every_few_steps(
    concurrency: int, steps: int
) -> None:
    cells = {
        "backend": "sglang",
        "system": "b200_sxm",
        "model_path": "deepseek-ai/DeepSeek-R1",
        "tp_size": "8",
        "silicon_data_source": f"db-dump/1; silicon_concurrency={concurrency}",
    }
    assert launch_of(**cells).poll_steps == steps
    assert launch_of(**{**cells, "system": "h200_sxm"}).poll_steps == 1


def test_prompts_wait_for_every_rank_under_attention_data_parallelism() -> None:
    cells = {"backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "tp_size": "8"}
    split = {**cells, "tp_size": "1", "attention_dp_size": "8", "moe_ep_size": "8"}
    assert launch_of(**split).stream_steps > launch_of(**cells).stream_steps > 0.0


def test_trtllm_waits_for_more_prompts_where_its_script_says_so() -> None:
    cells = {"backend": "trtllm", "osl": "1024"}
    assert launch_of(**cells).stream_steps > 0.0
    for others in ({"tp_size": "8"}, {"isl": "8192"}, {"model_path": "meta-llama/Llama-3.1-8B"}):
        assert launch_of(**cells | others).stream_steps == 0.0


def test_releases_before_generated_kernels_ran_experts_with_triton() -> None:
    cells = {"model_path": "MiniMaxAI/MiniMax-M2.5", "backend_version": "0.17.0"}
    assert launch_of(**cells).experts_table == "vllm@0.19.0"
    assert not launch_of(**{**cells, "backend_version": "0.19.0"}).experts_table
    assert not launch_of(**{**cells, "precision": "fp4"}).experts_table


def test_only_equal_output_lengths_keep_sglang_in_lock_step() -> None:
    cells = {"backend": "sglang", "silicon_data_source": UNDOCUMENTED}
    launch = launch_of(**cells)
    assert launch.length_ratio == 1.0
    assert as_unseen(launch).length_ratio < 1.0
    assert launch_of(**cells, isl="1000").length_ratio < 1.0
    assert launch_of(**{**cells, "backend": "vllm"}).length_ratio < 1.0


@each_row(
    "cells", [{"tp_size": ""}, {"tp_size": "two"}, {"moe_ep_size": "1.5"}, {"model_path": "x/y"}]
)
def test_a_row_that_lacks_something_stays_as_it_is(cells: dict[str, str]) -> None:
    assert documented({**PLAIN, **cells}) == {**PLAIN, **cells}


def test_repeated_measurements_count_once_by_a_readable_row() -> None:
    blind, seen, again = ({**PLAIN, "id": name} for name in ("blind", "seen", "again"))
    rows = ({**blind, "tp_size": ""}, seen, again, {**PLAIN, "id": "x", "silicon_ttft_ms": ""})
    assert [row["id"] for row in distinct(rows)] == ["seen", "x"]


def test_a_measurement_that_one_source_rounds_is_the_same() -> None:
    def measured(ttft: str, tpot: str) -> dict[str, str]:
        return {**PLAIN, "silicon_ttft_ms": ttft, "silicon_tpot_ms": tpot}

    exact, rounded = measured("80.512345678", "11.2512349"), measured("80.51234", "11.25123")
    other = measured("80.6", "11.25123")
    assert distinct((exact, rounded, other)) == (exact, other)
