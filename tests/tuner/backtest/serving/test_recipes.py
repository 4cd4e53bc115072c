"""What is known of a launch beyond its columns."""

from collections.abc import Callable

from tests.rows import each_row
from tuner.backtest.serving.launches import parse_launch
from tuner.backtest.serving.recipes import Recipe, find_recipe

Row = Callable[..., dict[str, str]]
UNDOCUMENTED = "source_file=/x/h100/vllm/0.12.0/Llama.csv; silicon_concurrency=8"


def recipe(cells: dict[str, str]) -> Recipe:
    return find_recipe(parse_launch(cells, number=1))


@each_row(
    ("release", "waits"),
    [("0.12.0", True), ("", True), ("0.14.1", False), ("nightly-5b8c30", False)],
)
def test_vllm_pays_per_sequence_until_it_schedules_ahead(
    row: Row, release: str, waits: bool
) -> None:
    assert (recipe(row(backend_version=release)).sequence_s > 0.0) is waits


def test_an_undocumented_driver_pays_per_sequence_on_other_engines(row: Row) -> None:
    for source, waits in ((UNDOCUMENTED, True), ("db-dump/1; silicon_concurrency=8", False)):
        result = recipe(row(backend="trtllm", silicon_data_source=source))
        assert (result.sequence_s > 0.0) is waits


@each_row(("concurrency", "steps"), [(4, 10), (16, 30)])
def test_sglang_on_blackwell_polls_for_requests_every_few_steps(
    row: Row, concurrency: int, steps: int
) -> None:
    cells = row(
        backend="sglang",
        system="b200_sxm",
        model_path="deepseek-ai/DeepSeek-R1",
        tp_size="8",
        silicon_data_source=f"db-dump/1; silicon_concurrency={concurrency}",
    )
    assert recipe(cells).poll_steps == steps
    assert recipe({**cells, "system": "h200_sxm"}).poll_steps == 1


def test_prompts_wait_for_every_rank_under_attention_data_parallelism(row: Row) -> None:
    cells = row(backend="trtllm", model_path="deepseek-ai/DeepSeek-R1", tp_size="8")
    split = {**cells, "tp_size": "1", "attention_dp_size": "8", "moe_ep_size": "8"}
    assert recipe(split).stream_steps > recipe(cells).stream_steps > 0.0


def test_releases_before_generated_kernels_ran_experts_with_triton(row: Row) -> None:
    cells = row(model_path="MiniMaxAI/MiniMax-M2.5", backend_version="0.17.0")
    assert recipe(cells).experts_table == "vllm@0.19.0"
    assert not recipe({**cells, "backend_version": "0.19.0"}).experts_table
    assert not recipe({**cells, "precision": "fp4"}).experts_table


def test_only_equal_output_lengths_keep_sglang_in_lock_step(row: Row) -> None:
    cells = row(backend="sglang", silicon_data_source=UNDOCUMENTED)
    assert recipe(cells).least_ratio == 1.0
    launch = parse_launch(cells, number=1)
    assert find_recipe(launch, is_unseen=True).least_ratio < 1.0
    assert recipe({**cells, "isl": "1000"}).least_ratio < 1.0
    assert recipe({**cells, "backend": "vllm"}).least_ratio < 1.0


def test_trtllm_waits_for_more_prompts_where_its_script_says_so(row: Row) -> None:
    cells = row(backend="trtllm", osl="1024")
    assert recipe(cells).stream_steps > 0.0
    for others in ({"tp_size": "8"}, {"isl": "8192"}, {"model_path": "meta-llama/Llama-3.1-8B"}):
        assert recipe({**cells, **others}).stream_steps == 0.0
