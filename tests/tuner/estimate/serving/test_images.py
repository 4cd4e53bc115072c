"""Container images whose entry point serves, and what starts another program in them."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.rows import Failures
from tuner.errors import SpecError

Made = Callable[..., Any]
RUN = "docker run -d --name vllm-openai --device=/dev/kfd --network=host -v /path/to/models:/m:ro"
ARGS = "--model /m/Mixtral --port 8000 --tensor-parallel-size 8 --max-model-len 32000"


def test_an_image_that_serves_is_read_as_its_engine(deployment: Made) -> None:
    failures = Failures()
    for image in (
        *("vllm/vllm-openai:v0.22.0", "vllm/vllm-openai-rocm:v0.33.0", "lmcache/vllm-openai"),
        *("ghcr.io/llm-d/llm-d-rocm:v0.6.0", "ghcr.io/llm-d/llm-d-cuda:v0.4.0"),
        *("ghcr.io/llm-d/llm-d-xpu:v0.6.0", "ghcr.io/llm-d/llm-d:v0.2.0"),
        "registry.redhat.io/rhaiis/vllm-cuda-rhel9:3.2",
        "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0",
    ):
        for command in (f"{RUN} {image} {ARGS}", f"{RUN} \\\n  {image} \\\n    {ARGS}"):
            with failures.of(command):
                launch = deployment().read(command)
                assert launch.engine == "vllm"
                assert launch.setting.degrees.attention_tensor == 8
                assert launch.max_model_len == 32000
        pod = (
            "apiVersion: v1\nkind: Pod\nmetadata: {name: server}\nspec:\n  containers:\n"
            f"  - {{name: server, image: '{image}', args: [--model, m, -tp, '8']}}\n"
        )
        compose = f"services:\n  server:\n    image: {image}\n    command: --model m -tp 8\n"
        for text in (pod, compose):
            with failures.of(text):
                assert deployment().read(text).setting.degrees.attention_tensor == 8
    failures.check()


def test_an_entry_point_of_the_command_counts_instead(deployment: Made) -> None:
    failures = Failures()
    for entrypoint, rest, engine in (
        ("vllm", "vllm/vllm-openai:v0.22.0 serve m -tp 8", "vllm"),
        ("/usr/bin/python3", "img:1 -m vllm.entrypoints.openai.api_server --model m -tp 8", "vllm"),
        ("sglang", "lmsysorg/sglang:v0.5.23 serve --model-path m --tp 8", "sglang"),
        ("trtllm-serve", "nvcr.io/nvidia/tensorrt-llm/release:1.3 m --tp_size 8", "trtllm"),
    ):
        with failures.of(entrypoint, rest):
            launch = deployment().read(f"docker run --gpus all --entrypoint {entrypoint} {rest}")
            assert launch.engine == engine
            assert launch.setting.degrees.attention_tensor == 8
    # Its shell has the variables that the command states.
    command = "docker run --env=SEQS=16 -eTP=4 --entrypoint /bin/bash img:1"
    launch = deployment().read(
        f"{command} -lc 'exec vllm serve m -tp ${{TP}} --max-num-seqs $SEQS'"
    )
    assert launch.setting.degrees.attention_tensor == 4
    # The program's verb follows the image; before it the same word names something else.
    for named in ("--name serve", "--network serve", "-v /w/serve -w serve", "--label=serve"):
        command = f"docker run {named} --entrypoint vllm a/serve:1 serve /models/serve -tp 4"
        with failures.of(command):
            assert deployment().read(command).setting.degrees.attention_tensor == 4
            assert "--name" not in deployment().read(command).flags.ignored
    # A folder is no word of a server.
    launch = deployment().read("docker run -v /m/ --rm img:1 vllm serve /m/ -tp 2 --seed 3")
    assert launch.setting.degrees.attention_tensor == 2
    with pytest.raises(SpecError, match="starts no server"):
        deployment().read("docker run -v /m/ img:1 python3 prepare.py --folder /m/ --tp 8")
    for command in (
        "docker run --entrypoint nvidia-smi vllm/vllm-openai:v0.22.0 -L",
        "docker run --entrypoint python3 vllm/vllm-openai:v0.22.0 bench.py --model m",
        "docker run ghcr.io/llm-d/llm-d-router-disagg-sidecar:v0.1 --port 8000",
        "docker run myregistry/private:1 --model m -tp 8",
    ):
        with failures.of(command), pytest.raises(SpecError, match="starts no server"):
            deployment().read(command)
    failures.check()


def test_an_image_that_chooses_its_engine_is_refused_by_name(deployment: Made) -> None:
    for text in (
        "docker run --gpus all -e NGC_API_KEY nvcr.io/nim/meta/llama-3.1-8b-instruct:latest",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: nim}\nspec:\n  containers:\n"
        "  - {name: nim, image: 'nvcr.io/nim/deepseek-ai/deepseek-r1:1.7'}\n",
    ):
        with pytest.raises(SpecError, match="NVIDIA NIM is not read; its image chooses engine"):
            deployment().read(text)
