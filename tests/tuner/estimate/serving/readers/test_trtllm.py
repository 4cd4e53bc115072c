"""Reads launches of TensorRT-LLM: its command, its file of options, or both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.expect import refused
from tests.rows import each_row
from tuner.config.serve import Role
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.speculative import DraftMethod
from tuner.errors import SpecError
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.registry import read_serving_launch

Made = Callable[..., Any]
Read = Callable[..., Any]
SCRIPT = 'exec trtllm-serve serve "$MODEL" --config "$FILES/options.yaml" "$@"\n'
PLAIN = {"tensor_parallel_size": 8, "max_batch_size": 64, "max_num_tokens": 4096}


@pytest.fixture
def read(deployment: Made, tmp_path: Path) -> Read:
    def made(
        options: dict[str, Any] | None,
        *,
        script: str = SCRIPT,
        model: str = "mixtral-8x7b",
        nodes: int = 2,
    ) -> Any:
        (tmp_path / "serve.sh").write_text(script)
        if options is not None:
            (tmp_path / "options.yaml").write_text("# Written by hand.\n" + yaml.safe_dump(options))
        spec = deployment(engine="trtllm", model=model, nodes=nodes).spec
        return read_serving_launch(
            str(tmp_path / "serve.sh"),
            surroundings(spec, pool_named(spec, None)),
            engine="trtllm",
        )

    return made


@each_row(
    ("options", "degrees"),
    (
        ({}, InstanceDegrees(attention_tensor=8, moe_tensor=8)),
        ({"moe_expert_parallel_size": 8}, InstanceDegrees(attention_tensor=8, expert=8)),
        (
            {"moe_expert_parallel_size": 4},
            InstanceDegrees(attention_tensor=8, expert=4, moe_tensor=2),
        ),
        (
            {"moe_expert_parallel_size": 8, "enable_attention_dp": True},
            InstanceDegrees(attention_data=8, expert=8),
        ),
        (
            {"moe_tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            InstanceDegrees(attention_tensor=8, expert=4, moe_tensor=2, pipeline=2),
        ),
    ),
)
def test_degrees_are_those_of_the_options(
    read: Read, options: dict[str, Any], degrees: Any
) -> None:
    launch = read(PLAIN | options)
    assert launch.engine == "trtllm"
    assert launch.setting.degrees == degrees, options


def test_everything_else_that_counts_is_read(read: Read) -> None:
    launch = read(
        PLAIN
        | {
            "max_seq_len": 8192,
            "enable_chunked_prefill": True,
            "kv_cache_config": {
                "dtype": "fp8",
                "tokens_per_block": 64,
                "free_gpu_memory_fraction": 0.85,
            },
            "cuda_graph_config": {"enable_padding": True, "max_batch_size": 32},
            "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
            "print_iter_log": True,
        }
    )
    setting = launch.setting
    assert (setting.running, setting.step_tokens, setting.is_chunked) == (64, 4096, True)
    assert (setting.page_tokens, setting.graph_sequences, setting.draft_tokens) == (64, 32, 3)
    assert (setting.graphed_sequences, setting.streamed_tokens) == (32, 1.0)
    assert (launch.kv_cache_dtype, launch.memory_ratio) == ("fp8", 0.85)
    assert (launch.max_model_len, launch.draft_method) == (8192, DraftMethod.MTP)
    assert launch.role is Role.AGGREGATED
    assert launch.flags.ignored == ("--print-iter-log true",)


def test_batches_have_graphs_of_their_own_size_unless_they_are_padded(read: Read) -> None:
    for graphs, largest, every in (
        ({}, 128, 32),
        ({"max_batch_size": 16}, 16, 16),
        ({"max_batch_size": 512}, 512, 32),
        ({"max_batch_size": 512, "enable_padding": True}, 512, 512),
    ):
        setting = read(PLAIN | {"cuda_graph_config": graphs}).setting
        assert (setting.graph_sequences, setting.graphed_sequences) == (largest, every), graphs
    assert read(PLAIN | {"stream_interval": 20}).setting.streamed_tokens == 20


def test_switches_of_the_command_take_no_value_and_those_of_a_file_take_one(read: Read) -> None:
    for flag, is_chunked in (("--enable_chunked_prefill", True), ("", False)):
        command = f"trtllm-serve m --tp_size 8 --max_seq_len=4096 {flag}\n"
        assert read(None, script=command).setting.is_chunked is is_chunked
    assert read(PLAIN | {"enable_chunked_prefill": True}).setting.is_chunked
    command = "trtllm-serve m --tp_size 8 --enable_chunked_prefill false --max_batch_size 8\n"
    assert not read(None, script=command).setting.is_chunked


def test_a_role_is_that_of_cache_and_scheduler_or_of_dynamos_worker(read: Read) -> None:
    sends = PLAIN | {"cache_transceiver_config": {"backend": "NIXL"}}
    assert read(sends | {"disable_overlap_scheduler": True}).role is Role.PREFILL
    assert read(sends).role is Role.DECODE
    worker = "python3 -m dynamo.trtllm --extra-engine-args /x/options.yaml --disaggregation-mode"
    assert read(sends, script=f"{worker} prefill\n").role is Role.PREFILL


def test_a_variable_forces_the_all_to_all_backend(read: Read) -> None:
    wide = PLAIN | {"moe_expert_parallel_size": 8, "enable_attention_dp": True}
    for value, backend in (("DEEPEP", "deepep_normal"), ("ALLGATHER", "allgather")):
        launch = read(wide, script=f"export TRTLLM_FORCE_COMM_METHOD={value}\n{SCRIPT}")
        assert launch.setting.a2a_backend == backend
    other = read(wide, script=f"export TRTLLM_FORCE_COMM_METHOD=NVLINK\n{SCRIPT}")
    assert any("NVLINK is priced as all-gather" in note for note in other.notes)


def test_slots_beyond_the_experts_are_copies_wherever_they_are_stated(
    read: Read, tmp_path: Path
) -> None:
    wide = {"tensor_parallel_size": 12, "moe_expert_parallel_size": 12, "enable_attention_dp": True}
    (tmp_path / "balancer.yaml").write_text("num_slots: 264\nlayer_updates_per_iter: 0\n")
    for balancer in ({"num_slots": 264, "layer_updates_per_iter": 1}, "./balancer.yaml"):
        options = PLAIN | wide | {"moe_config": {"load_balancer": balancer}}
        assert read(options, model="deepseek-v3").setting.redundant_experts == 8, balancer


def test_a_file_of_options_is_read_by_itself(deployment: Made, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("# Don't quote me.\n" + yaml.safe_dump(PLAIN))
    spec = deployment(engine="trtllm").spec
    around = surroundings(spec, pool_named(spec, None))
    assert read_serving_launch(str(path), around, engine="vllm").engine == "trtllm"


def test_an_instance_of_several_machines_is_an_mpi_job(read: Read) -> None:
    script = SCRIPT.replace(
        "exec ", 'exec $([[ "$NNODES" == 1 ]] || echo trtllm-llmapi-launch) \\\n  '
    )
    assert read(PLAIN, script=script).setting.degrees.attention_tensor == 8


@each_row(
    ("options", "says"),
    [
        (None, "the options file 'options.yaml' is not beside it"),
        ({"tensor_parallel_size": "x"}, "--tensor-parallel-size 'x' is not a whole number"),
        ({**PLAIN, "moe_expert_parallel_size": 3}, "3 ranks of experts do not divide .* are 2"),
        (
            {**PLAIN, "moe_expert_parallel_size": 4, "moe_tensor_parallel_size": 4},
            "size 4 x --moe-expert-parallel-size 4 is not --tensor-parallel-size 8",
        ),
        ({**PLAIN, "kv_cache_config": {"dtype": "int3"}}, "'int3' has no price"),
        ({**PLAIN, "moe_config": {"load_balancer": {"num_slots": 4}}}, "the nearest is 8"),
        (
            {**PLAIN, "enable_attention_dp": "maybe"},
            "'--enable-attention-dp maybe': a switch takes no value",
        ),
        ({**PLAIN, "tensor_parallel_size": 32}, "takes 32 devices, pool 'gpus' has 16"),
    ],
)
def test_contradictions_are_one_line(read: Read, options: dict[str, Any], says: str) -> None:
    with refused(SpecError, match=says):
        read(options)


@each_row(
    ("config", "aligns"),
    (
        (None, False),
        ({"enable_balance": False, "timeout_iters": 50}, False),
        ({"enable_balance": True, "batching_wait_iters": 10}, True),
    ),
)
def test_ranks_wait_for_prompts_together_where_the_launch_says_so(
    *, read: Read, config: dict[str, Any] | None, aligns: bool
) -> None:
    wide = {**PLAIN, "enable_attention_dp": True, "moe_expert_parallel_size": 8}
    launch = read(wide | ({"attention_dp_config": config} if config else {}))
    assert launch.setting.aligns_prompts is aligns
    assert not any("enable" in flag and "balance" in flag for flag in launch.flags.ignored)


def test_prompts_that_are_not_aligned_make_other_ranks_wait(deployment: Made) -> None:
    made = deployment(
        engine="trtllm",
        nodes=1,
        traffic="{rate: 10/s, input_tokens: 4000, output_tokens: 200}",
    )
    options = "trtllm-serve m --tp_size 8 --ep_size 1 --enable_attention_dp true"
    apart = made.predict(options)
    aligned = made.predict(f"{options} --attention_dp_config.enable_balance true")
    assert aligned.load.tpot_s.p90 < 0.8 * apart.load.tpot_s.p90
