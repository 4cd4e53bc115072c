"""Finds a server's flags in scripts and pasted commands, and refuses the rest in one line."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.expect import refused
from tests.rows import each_row
from tuner.engines.reading.serve_launch import Surroundings
from tuner.errors import SpecError
from tuner.estimate.serving.registry import read_serving_launch, read_serving_text
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model

Made = Callable[..., Any]
MODEL = read_model(Path(__file__).parents[4] / "examples" / "models" / "mixtral-8x7b")
AROUND = Surroundings(
    model=MODEL, pool=Pool(name="gpus", device="h100-sxm", nodes=2, devices_per_node=8)
)


def test_flags_alone_are_read_and_the_last_counts(deployment: Made) -> None:
    both = deployment(engine="vllm")
    assert both.read("--tensor-parallel-size 4").engine == "vllm"
    assert both.read("--tp-size 4\n--mem-fraction-static 0.8").engine == "sglang"
    assert deployment().read("vllm serve m -tp 2 -tp 4").setting.degrees.attention_tensor == 4
    node = "vllm serve m -dp 2 -tp 4 --node-rank {0} --headless --master-addr n0"
    assert deployment().read(f"{node.format(0)}\n{node.format(1)}\n").setting.degrees.devices == 8


def test_variables_and_arrays_are_put_in(deployment: Made) -> None:
    launch = deployment().read(
        "TP=2\nARGS=(--max-num-seqs 32)\nARGS+=(--data-parallel-size $((2*2)))\n"
        'nohup vllm serve "$MODEL" -tp "${TP}" "${ARGS[@]}" "$@" > log 2>&1 &\n'
    )
    assert launch.setting.running == 32
    assert launch.setting.degrees.attention_tensor == 2
    assert launch.setting.degrees.attention_data == 4
    assert not launch.notes


def test_what_the_text_leaves_open_is_named(deployment: Made) -> None:
    launch = deployment().read("vllm serve m --max-num-seqs 32 --enforce-eager $EXTRA")
    assert "not read, because the text does not set it: $EXTRA" in launch.notes
    launch = deployment().read('vllm serve m -tp "${TP:-4}" --port ${PORT:-8000}')
    assert launch.setting.degrees.attention_tensor == 4
    assert launch.notes[0] == "not set in the file, so its default counts: TP=4"
    assert not any("PORT" in note for note in launch.notes)
    launch = deployment().read(
        "if [ -n $X ]; then\n ARGS=(--max-num-seqs 8)\nfi\nvllm serve m --max-num-seqs 32"
    )
    assert launch.setting.running == 32
    assert "not read, because a condition decides: ARGS=--max-num-seqs 8" in launch.notes


@each_row(
    "text",
    [
        "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.33.0 --model m -tp 4",
        "docker run --gpus all image:1 bash -c 'cd /w && vllm serve m -tp 4'",
        "docker run --entrypoint bash vllm/vllm-openai:v1 -c 'cd /w && vllm serve m -tp 4'",
        "podman run --entrypoint=/bin/sh i:1 -lc 'exec vllm serve \"$@\"' -- m -tp 4",
        "bash -c 'vllm serve m -tp ${1:-2}' x 4",
        "set -- -tp 4\nvllm serve m ${@}",
        "srun --nodes=1 /opt/venv/bin/vllm serve m -tp 4 2>&1 | tee log",
        "CMD='vllm serve m -tp 4'\necho $CMD\neval $CMD",
        "export X=1; nohup env A=b vllm serve m -tp=4 &",
    ],
)
def test_what_starts_the_server_is_passed_over(text: str, deployment: Made) -> None:
    assert deployment().read(text).setting.degrees.attention_tensor == 4


def test_a_file_is_read_like_its_text(tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text("vllm serve m -tp 4\n")
    launch = read_serving_launch(str(path), AROUND, engine="vllm")
    assert launch.source == str(path)
    pasted = read_serving_launch("vllm serve m -tp 4", AROUND, engine="vllm")
    assert pasted.setting == launch.setting
    assert pasted.source == "the command"


@each_row(
    ("text", "says"),
    [
        ("vllm-router --policy random", "starts a router, vllm-router by random, which serves no"),
        ("torchrun pretrain_gpt.py --tensor-model-parallel-size 8", "starts no server of"),
        ("trtllm-serve disaggregated -c f.yaml", "starts a router"),
        ("vllm serve m -tp 2 \\ \n --max-num-seqs 8", "ends before '--max-num-seqs'"),
        ("vllm serve m \\\n# eight\n -dp 8", "ends before '-dp'"),
        ("vllm bench serve --model m", "vllm bench is not read"),
        ("--no-such-flag 1", "starts no server of"),
        ("#!/bin/bash\n# nothing\n", "starts no server of"),
        ("vllm serve a -tp 2\nvllm serve b -tp 4", "starts 2 servers"),
        ("vllm serve 'm", "quote is never closed"),
        ("vllm serve m \0", "null character"),
    ],
)
def test_a_text_without_one_server_is_refused_in_one_line(text: str, says: str) -> None:
    with refused(SpecError, match=says):
        read_serving_text(text, AROUND, engine="vllm", source="launch.sh")


@each_row(
    ("launch", "says"),
    [
        ("", "--launch is empty"),
        ("nowhere.sh", "cannot read the launch"),
        ("vllm serve m " + "--seed 1 " * 30_000, "longer than"),
    ],
)
def test_a_launch_that_is_no_launch_is_refused_in_one_line(launch: str, says: str) -> None:
    with refused(SpecError, match=says):
        read_serving_launch(launch, AROUND, engine="vllm")


def test_a_format_that_is_no_serving_engine_is_refused() -> None:
    with pytest.raises(SpecError, match="'megatron' is none of sglang, vllm"):
        read_serving_launch("vllm serve m", AROUND, engine="vllm", format_name="megatron")
    with pytest.raises(SpecError, match="starts no server of sglang"):
        read_serving_launch("vllm serve m", AROUND, engine="vllm", format_name="sglang")


def test_long_commands_are_read_in_no_time() -> None:
    began = time.monotonic()
    for word in ("a ", "bash -c ", "vllm serve --help "):
        with pytest.raises(SpecError, match="starts no server of"):
            read_serving_text(word * 7_000, AROUND, engine="vllm", source="launch.sh")
    assert time.monotonic() - began < 60.0  # Quadratic scans took minutes.


WORDS = [
    *("vllm", "serve", "sglang.launch_server", "-tp", "-dp", "-ep", "--tp", "--attn-dp-size"),
    *("--ep", "--max-num-seqs", "--max-model-len", "--kv-transfer-config", "8", "3", "0", "-1"),
    *("9k", "$X", "{}", "''", "'", "(", ")", ";", "X=(", "if", "fi", "=", "--", "\n"),
]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(WORDS), max_size=14))
def test_any_words_are_a_launch_or_one_line(words: list[str]) -> None:
    refusal = ""
    launch = None
    try:
        launch = read_serving_text(" ".join(words), AROUND, engine="vllm", source="launch.sh")
    except SpecError as error:
        refusal = str(error)
    if launch is None:
        assert refusal.startswith("launch.sh: ")
        assert "\n" not in refusal
        return
    degrees = launch.setting.degrees
    assert degrees.devices * launch.copies <= 16
    assert degrees.expert * degrees.moe_tensor == degrees.devices
    assert launch.setting.running >= 1


def test_flags_are_read_in_every_spelling_of_the_engine_s_parser(deployment: Made) -> None:
    vllm, sglang = deployment(), deployment(engine="sglang")
    for engine, text, understood in (
        (vllm, "vllm serve m --tensor-parallel 4", "--tensor-parallel-size 4"),
        (vllm, "vllm serve m --tensor_par=4", "--tensor-parallel-size 4"),
        (vllm, "vllm serve m -ep -tp 4", "--enable-expert-parallel"),
        (vllm, "vllm serve m --gpu-mem 0.8", "--gpu-memory-utilization 0.8"),
        (vllm, "python -m vllm.entrypoints.openai.api_server --kv-transfer-c '{}'", None),
        (vllm, "docker run -it vllm/vllm-openai-rocm:v1 m -tp 4", "--tensor-parallel-size 4"),
        (
            vllm,
            "docker run vllm/vllm-openai:v1 bash\nvllm serve m -tp 4",
            "--tensor-parallel-size 4",
        ),
        (vllm, 'N=4\nbash -c "vllm serve m -tp $N --max-num-seqs 8"', "--max-num-seqs 8"),
        (vllm, "ssh host 'cd x && nohup vllm serve m -tp 4 &'", "--tensor-parallel-size 4"),
        (vllm, 'A=(vllm serve m -tp 4)\neval "${A[@]}"', "--tensor-parallel-size 4"),
        (vllm, 'vllm serve m --chat-template "" -tp 4', "--tensor-parallel-size 4"),
        (sglang, "sglang serve --model m --tensor-parallel 4", "--tp-size 4"),
        (sglang, "uv run python -m sglang.launch_server --tp 4", "--tp-size 4"),
        (sglang, "numactl -m 0 sglang serve --tp 4 --attention-data 2", "--attn-dp-size 2"),
    ):
        if understood is None:
            with pytest.raises(SpecError, match="kv_role None is none of"):
                engine.read(text)
            continue
        assert understood in engine.read(text).flags.understood, text
    trtllm = deployment(engine="trtllm").read("trtllm-serve m --tp_size 4 --max_batch 8")
    assert trtllm.setting.degrees.devices == 4
    assert trtllm.flags.ignored == ("--max-batch 8",), "click takes no prefixes"
    with pytest.raises(SpecError, match="--speculative-num is short for --speculative-num-draft"):
        sglang.read("sglang serve --tp 4 --speculative-num 3")


@each_row(
    "flags",
    (
        """--speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'""",
        "--speculative-config.method mtp --speculative_config.num_speculative_tokens 3",
        "-sc.method=mtp -sc.num_speculative_tokens=3",
        """-sc '{"method": "mtp"}' --spec-tokens 3""",
        "--spec-method mtp --spec-tokens 3 -cc.mode 3 -O3 --eplb-config.window_size 10",
    ),
)
def test_drafts_are_read_from_json_dotted_and_short_flags(deployment: Made, flags: str) -> None:
    launch = deployment().read(f"vllm serve m {flags}")
    assert launch.setting.draft_tokens == 3, flags
    assert not launch.flags.ignored, flags


def test_the_longest_length_that_fits_is_no_number(deployment: Made) -> None:
    for word in ("auto", "-1", "AUTO"):
        launch = deployment().read(f"vllm serve m -tp 2 --max-model-len {word}")
        assert launch.max_model_len is None
        assert launch.shortens_length
    # One device has room for its weights, and not for the longest request beside them.
    one = deployment(model="qwen3-30b-a3b", extra="quantization: bf16", device="h100-sxm", nodes=1)
    stated, found = (
        one.predict(f"vllm serve m --gpu-memory-utilization 0.81{more}")
        for more in ("", " --max-model-len auto")
    )
    assert "the engine wants room" in stated.misfit
    assert found.fits


def test_a_quantization_method_is_weights_or_refused_with_the_way_out(deployment: Made) -> None:
    for method, spec_format in (
        ("awq_marlin", "int4"),
        ("gptq", "fp8_block"),
        ("ascend", "fp8_block"),
        ("experts_int8", "fp8"),
        ("modelopt", "nvfp4"),
        ("compressed-tensors", "bf16"),
        ("bitsandbytes", "int4"),
    ):
        own = deployment(extra=f"quantization: {spec_format}")
        launch = own.read(f"vllm serve m -tp 4 --quantization {method}")
        assert launch.quantization == "", method
        assert any("goal.quantization" in note for note in launch.notes), method
        assert own.predict(f"vllm serve m -tp 4 -q {method}").quantization == spec_format
    with pytest.raises(SpecError, match="means weights of 4 bits, the spec"):
        deployment().predict("vllm serve m -tp 4 -q awq")


def test_options_come_from_the_file_that_a_command_names_or_writes(deployment: Made) -> None:
    written = "cat > /tmp/x.yaml <<EOF\ntensor-parallel-size: 2\nmax-num-seqs: 8\nEOF\n"
    launch = deployment().read(f"{written}vllm serve m --config /tmp/x.yaml -tp 4")
    assert launch.setting.degrees.attention_tensor == 4, "the command counts"
    assert launch.setting.running == 8
    trtllm = written.replace("-", "_").replace("num_seqs", "batch_size")
    command = "trtllm-serve m --tp_size 4 --extra_llm_api_options /tmp/x.yaml"
    launch = deployment(engine="trtllm").read(f"{trtllm}{command}")
    assert (launch.setting.degrees.devices, launch.setting.running) == (2, 8), "the file counts"
    assert any("is overridden by x.yaml" in note for note in launch.notes)
    with pytest.raises(SpecError, match="is not beside it"):
        deployment().read("vllm serve m --config y.yaml")


@each_row(
    "text",
    (
        "vllm serve m\n" + "<<a\n" * 20_000,
        "vllm serve m -tp $((" + "(" * 100_000,
        "vllm serve m -tp " + "$((1+" * 30_000,
        "A=" + "9" * 100_000 + "\nvllm serve m -tp $((A*A*A))",
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60)),
        "x: " + "[" * 100_000,
        "if [[ " + "a == b && " * 20_000 + "]]; then\nvllm serve m\nfi",
    ),
)
def test_hostile_texts_are_read_or_refused_in_no_time(deployment: Made, text: str) -> None:
    started_s = time.process_time()
    with suppress(SpecError):
        deployment().read(text)
    assert time.process_time() - started_s < 5.0, text[:30]
