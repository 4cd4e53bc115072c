"""Servers inside Kubernetes objects as people write them."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.expect import present, refused
from tests.printed import words_of
from tests.rows import Failures, each_row
from tuner.config.serve import Role
from tuner.engines.reading.serve_launch import Surroundings
from tuner.errors import SpecError
from tuner.estimate.serving.registry import read_serving_text
from tuner.estimate.serving.router_launch import read_router
from tuner.goals.estimate import estimate_serving
from tuner.report.serving_estimate import serving_estimate_sections

Made = Callable[..., Any]
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: mixtral}
spec:
  replicas: 3
  template:
    spec:
      containers:
      - name: proxy
        image: nginx
        args: [--port, "80"]
      - name: server
        image: vllm/vllm-openai:v0.33.0
        command: [vllm, serve]
        args: [$(MODEL), --tensor-parallel-size, $(TP), --max-num-seqs, "96"]
        env:
        - {name: MODEL, value: mistralai/Mixtral-8x7B}
        - {name: TP, value: "4"}
        - name: TOKEN
          valueFrom: {secretKeyRef: {name: hub, key: token}}
"""
APART = """
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: reads, labels: {group: prefill-h100}}
spec:
  leaderWorkerTemplate:
    size: 2
    workerTemplate:
      spec:
        containers:
        - command:
          - sh
          - -c
          - exec python -m sglang.launch_server --tp $TP --disaggregation-mode prefill
          env: [{name: TP, value: 8}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: writes}
spec:
  template:
    spec:
      containers:
      - command: [python, -m, sglang.launch_server]
        args: [--tp, "2", --disaggregation-mode, decode]
---
apiVersion: v1
kind: Service
metadata: {name: writes}
spec: {ports: [{port: 80}]}
"""


@pytest.fixture
def read(deployment: Made) -> Callable[..., Any]:
    def made(text: str, *, role: str | None = None) -> Any:
        spec = deployment().spec
        around = Surroundings(model=spec.model, pool=spec.cluster.pools[0])
        return read_serving_text(text, around, engine="vllm", source="launch.yaml", role=role)

    return made


def test_the_container_that_serves_is_read_with_its_variables_and_replicas(
    read: Callable[..., Any],
) -> None:
    launch = read(DEPLOYMENT)
    assert launch.setting.degrees.attention_tensor == 4
    assert launch.setting.running == 96
    assert launch.replicas == 3


def test_the_router_in_front_is_named_or_said_to_be_unread(read: Callable[..., Any]) -> None:
    router = DEPLOYMENT.replace('args: [--port, "80"]', "args: [vllm-router, --policy, POLICY]")
    for policy, said in (
        ("random", "in front is a router, vllm-router by random; an even share of the requests"),
        ("fastest", "the router is not read: launch.yaml: policy 'fastest' of"),
    ):
        (note,) = read(router.replace("POLICY", policy)).notes
        assert note.startswith(said)
    assert not read(DEPLOYMENT).notes
    # It is in front of both halves, whichever is named.
    pair = f"{APART}---{router.replace('POLICY', 'random').replace('vllm, serve', 'sleep')}"
    for role in (None, "prefill", "decode"):
        launch = read(pair, role=role)
        assert not launch.reader.follows_prefixes
        assert not launch.counterpart.reader.follows_prefixes


def test_groups_are_named_by_label_object_or_role(read: Callable[..., Any]) -> None:
    for role, tensor in (("prefill", 8), ("prefill-h100", 8), ("decode", 2), ("writes", 2)):
        launch = read(APART, role=role)
        assert launch.setting.degrees.attention_tensor == tensor, role
        assert launch.role is (Role.PREFILL if tensor == 8 else Role.DECODE)
        assert launch.counterpart.setting.degrees.attention_tensor == 10 - tensor
    pair = read(APART)
    assert (pair.role, pair.counterpart.role) == (Role.PREFILL, Role.DECODE)


def test_both_halves_of_a_deployment_are_priced_with_each_other(
    deployment: Made, tmp_path: Path
) -> None:
    lengths = "input_tokens: 2000, output_tokens: 300"
    deployment(engine="sglang", traffic=f"{{concurrency: 64, {lengths}}}", slo="{}")
    (tmp_path / "launch.yaml").write_text(APART.replace("--tp $TP", "--tp 8"))
    estimated = partial(
        estimate_serving, tmp_path / "spec.yaml", launch=str(tmp_path / "launch.yaml")
    )
    first = estimated()
    second = present(first.other)
    assert [one.instance.role for one in (first, second)] == [Role.PREFILL, Role.DECODE]
    served = [one.load.requests_per_s for one in (first, second) if one.load is not None]
    assert served[0] == pytest.approx(served[1], rel=0.02)
    # Two decode devices are the bottleneck, which the reading half alone does not see.
    assert served[0] < 0.9 * present(first.load).capacity_per_s
    # The decode instances keep no prefixes; those of the other half count.
    lengths += ", prefix_hit: 0.6, prefix_scope: common"
    deployment(engine="sglang", traffic=f"{{concurrency: 64, {lengths}}}", slo="{}")
    kept = APART.replace("--tp $TP", "--tp 8").replace('"2",', '"2", --disable-radix-cache,')
    (tmp_path / "launch.yaml").write_text(kept)
    found = estimated()
    assert found.load is not None
    assert present(present(found.other).load).requests_per_s == pytest.approx(
        found.load.requests_per_s, rel=0.02
    )
    assert found.load.capacity_per_s > 1.5 * present(first.load).capacity_per_s
    words = words_of(serving_estimate_sections(first))
    # What is said of both halves is said once, behind them.
    shared = {*first.notes, *first.flags_ignored} & {*second.notes, *second.flags_ignored}
    assert shared
    _, _, behind = words.partition("Both halves ")
    for one in shared:
        said = " ".join(one.split())
        assert words.count(said) == 1, one
        assert said in behind
    assert "Both halves in all 10 devices" in words
    assert "the other half is the file's: 1 instance" in words
    (tmp_path / "launch.yaml").write_text(APART.replace("--tp $TP", "--tp 8"))
    deployment(
        engine="sglang",
        traffic="{concurrency: 64, input_tokens: 2000, output_tokens: 300}",
        slo="{}",
    )
    assert estimated(role="writes") == second
    with pytest.raises(SpecError, match="--instances 2: of which half"):
        estimated(instances=2)


@each_row(
    ("text", "role", "says"),
    [
        (APART + "---" + DEPLOYMENT, None, "starts 3 servers; name one of them with --role"),
        (APART, "aggregated", "--role 'aggregated' is none of prefill-h100, writes"),
        (DEPLOYMENT, "decode", "--role 'decode' is none of mixtral"),
        (DEPLOYMENT.replace("vllm, serve", "vllm, bench"), None, "vllm bench is not read"),
        (DEPLOYMENT + "\n  bad: [", None, r"line \d+: expected"),
        ("apiVersion: v1\nkind: Deployment\nspec: 7\n", None, "starts no server"),
        ("apiVersion: v1\nkind: ConfigMap\ndata: [a]\n", None, "starts no server"),
        ("vllm serve m -tp 2", "decode", "--role 'decode' is none of aggregated"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    read: Callable[..., Any], text: str, role: str | None, says: str
) -> None:
    with refused(SpecError, match=says):
        read(text, role=role)


def test_aliases_that_grow_without_end_are_read_in_no_time(read: Callable[..., Any]) -> None:
    levels = "\n".join(
        f"b{level}: &b{level} [{', '.join([f'*b{level - 1}'] * 10)}]" for level in range(1, 12)
    )
    bomb = f"apiVersion: v1\nkind: Deployment\nb0: &b0 [x]\n{levels}\nspec: {{replicas: *b11}}\n"
    pods = f"{bomb}metadata: {{name: *b11, labels: *b11}}\n"
    options = f"tensor_parallel_size: 8\nmax_batch_size: *b11\nb: &b0 [x]\n{levels}\n"
    deep = "\n".join(
        f"c{level}: &c{level} {{{', '.join(f'k{n}: *c{level - 1}' for n in range(10))}}}"
        for level in range(1, 12)
    )
    nested = f"tensor_parallel_size: 8\nmax_batch_size: 4\nc0: &c0 {{k: 1}}\n{deep}\n"
    for text in (bomb, pods, options, nested):
        with pytest.raises(SpecError) as caught:
            read(text)
        assert len(str(caught.value)) < 400


def test_values_that_no_flag_can_hold_are_refused_in_one_line(read: Callable[..., Any]) -> None:
    levels = "\n".join(f"b{n}: &b{n} [*b{n - 1}, *b{n - 1}]" for n in range(1, 28))
    recipe = f"b0: &b0 [x]\n{levels}\nbackend: {{vllm_config: {{decode: {{hf-overrides: VALUE}}}}}}"
    compose = "services: {one: {command: vllm serve m, environment: [VALUE]}}\n"
    options = "tensor_parallel_size: 8\nmax_batch_size: VALUE\nmax_num_tokens: 4\n"
    texts = (recipe, compose, options, DEPLOYMENT.replace("replicas: 3", "replicas: VALUE"))
    digits, hexadecimal = "1" * 6_000, "0x" + "f" * 6_000
    for value in ("2024-13-45", digits, hexadecimal, "0x_", '!!bool "x"', "&a [*a]", "!!omap [1]"):
        for text in texts:
            with suppress(SpecError):
                assert read(text.replace("VALUE", value))
    for value in ("*b27", "&a [*a]", "{1: [{2020-01-01: 1}]}"):
        with refused(SpecError, match=r"no flag's|starts no server"):
            read(recipe.replace("VALUE", value))


def test_variables_of_pods_and_options_are_put_in(read: Callable[..., Any]) -> None:
    launch = read("tensor_parallel_size: ${TP:-8}\nmax_batch_size: 4\nmax_num_tokens: 4096\n")
    assert launch.setting.degrees.devices == 8
    assert "not set in the file, so their defaults count: TP=8" in launch.notes
    launch = read(MAPPED)
    assert (launch.setting.degrees.attention_tensor, launch.setting.draft_tokens) == (2, 2)
    chain = "".join(
        f'    - {{name: A{at}, value: "{f"$(A{at - 1})" * 10}"}}\n' for at in range(1, 9)
    )
    first = '    - {name: A0, value: "' + "x" * 100 + '"}\n'
    with pytest.raises(SpecError, match="hold more than"):
        read(MAPPED.replace("    env:\n", f"    env:\n{first}{chain}"))
    text = APART.partition("---")[0].replace("8}", "1}").replace("size: 2", "size: 4")
    assert (
        read(text.replace("--tp $TP", "--tp $((LWS_GROUP_SIZE * 2))")).setting.degrees.devices == 8
    )


CONFIG = """
apiVersion: v1
kind: ConfigMap
metadata: {name: own}
data:
  decode.yaml: |
    tensor_parallel_size: 4
    moe_expert_parallel_size: 4
    kv_cache_config: {free_gpu_memory_fraction: 0.85, dtype: fp8}
  drafts: '{"method": "mtp", "num_speculative_tokens": 2}'
---
apiVersion: v1
kind: ConfigMap
metadata: {name: others}
data: {decode.yaml: "tensor_parallel_size: 8"}
---
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: moe}
spec:
  envs: [{name: SEQUENCES, value: "64"}]
  services:
    Frontend:
      extraPodSpec: {mainContainer: {command: [python3, -m, dynamo.frontend]}}
    decode:
      replicas: 3
      extraPodSpec:
        volumes: [{name: options, configMap: {name: own}}]
        mainContainer:
          command: [/bin/sh, -c]
          args:
          - |
            python3 -m dynamo.ENGINE
"""


def test_services_of_dynamo_are_read_with_the_maps_that_they_mount(
    read: Callable[..., Any],
) -> None:
    options = "trtllm --extra-engine-args /x/decode.yaml --disaggregation-mode decode"
    launch = read(CONFIG.replace("ENGINE", options))
    assert (launch.engine, launch.role, launch.replicas) == ("trtllm", Role.DECODE, 3)
    assert (launch.setting.degrees.devices, launch.setting.degrees.expert) == (4, 4)
    assert (launch.kv_cache_dtype, launch.memory_ratio) == ("fp8", 0.85)
    reference = "{valueFrom: {configMapKeyRef: {name: own, key: drafts}}, name: DRAFTS}"
    command = "vllm -tp 2 --max-num-seqs $SEQUENCES --speculative-config $DRAFTS"
    text = CONFIG.replace("ENGINE", command).replace(
        "mainContainer:\n", f"mainContainer:\n          env: [{reference}]\n"
    )
    launch = read(text)
    assert (launch.setting.running, launch.setting.draft_tokens) == (64, 2)


MAPPED = """
kind: ConfigMap
metadata: {name: own}
data:
  drafts: |-
    {
      "method": "mtp",
      "num_speculative_tokens": 2
    }
---
kind: Pod
spec:
  containers:
  - command: [vllm, serve, m]
    args: [--speculative-config=$(DRAFTS), "--tensor-parallel-size=$(TP)"]
    env:
    - {name: TP, value: "2"}
    - {name: DRAFTS, valueFrom: {configMapKeyRef: {name: own, key: drafts}}}
"""


def _with_args(args: str, *, command: str, text: str = MAPPED) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith("    args: "))
    return text.replace(line, f"    args: {args}").replace("[vllm, serve, m]", command)


@each_row("args", (f"['{'$(TP)' * 2000}']", f"[{'$(TP), ' * 2000}m]"))
def test_words_that_name_variables_many_times_are_refused(
    read: Callable[..., Any], args: str
) -> None:
    long = MAPPED.replace('value: "2"', f'value: "{"x" * 50_000}"')
    with pytest.raises(SpecError, match="hold more than"):
        read(_with_args(args, command="[vllm, serve, m]", text=long))


def test_variables_of_a_pod_are_filled_in_before_its_shell_starts(
    read: Callable[..., Any],
) -> None:
    for script, ranks in (
        ("vllm serve m -tp $(TP)", 2),
        ("N=1; if [ $(TP) -gt 1 ]; then N=$(TP); fi; vllm serve m -tp $N", 2),
        ("vllm serve m -tp $(expr $(TP) + $(TP))", 4),
        ("vllm serve m -tp $(SIZE)", 8),
    ):
        text = _with_args(f"['export SIZE=8; {script}']", command="[bash, -c]")
        assert read(text).setting.degrees.attention_tensor == ranks, script
    # Two dollars stand for one, and a command of the shell stays one.
    for script in ("vllm serve m -tp $$(TP)", "vllm serve m -tp $(nproc)"):
        with pytest.raises(SpecError, match="has no value here"):
            read(_with_args(f"['{script}']", command="[bash, -c]"))


def test_any_pod_and_a_chart_s_values_are_read(read: Callable[..., Any]) -> None:
    pod = "{containers: [{image: 'vllm/vllm-openai:v1', args: [m, --tensor-parallel-size, 2]}]}"
    for text in (
        f"apiVersion: v1\nkind: Pod\nmetadata: {{name: m}}\nspec: {pod}\n",
        f"apiVersion: batch/v1\nkind: Job\nspec: {{template: {{spec: {pod}}}}}\n",
        f"kind: LLMInferenceService\napiVersion: v1\nspec: {{template: {pod}}}\n",
        "decode:\n  containers: [{modelCommand: vllmServe, args: [-tp, 2]}]\n",
    ):
        assert read(text).setting.degrees.attention_tensor == 2, text


COMPOSE = """
x-common: &common
  image: vllm/vllm-openai:v0.33.0
  environment: {TP: 4}
services:
  proxy: {image: nginx, command: [--port, 80]}
  server:
    <<: *common
    COMMAND
"""


@each_row(
    "command",
    (
        "command: >\n      /model\n      --tensor-parallel-size 4\n      --enable-exp\n",
        "command: [m, -tp, 4, --enable-expert-parallel]",
        "command: m -tp $$TP --enable-expert-parallel",
        "command: m -tp ${TPS:-4} --enable-expert-parallel",
        "entrypoint: vllm serve\n    command: m -tp 4 --enable-expert-parallel",
        "entrypoint: [bash, -c]\n    command: [exec vllm serve m -tp 4 --enable-expert-parallel]",
        "command: |\n      m -tp 4 \\\n      --enable-expert-parallel\n",
    ),
)
def test_compose_services_are_read_from_image_entrypoint_and_command(
    read: Callable[..., Any], command: str
) -> None:
    degrees = read(COMPOSE.replace("COMMAND", command)).setting.degrees
    assert (degrees.attention_tensor, degrees.expert) == (4, 4), command


@each_row(
    "text",
    (
        "server:\n  image: vllm/vllm-openai\n  run: >\n    --tensor-parallel-size 4\n",
        "services: {server: {image: nginx, note: vllm serve m -tp 4}}\n",
        "steps:\n- vllm serve m\n- -tp 4\n",
        "apiVersion: kustomize/v1\nkind: Kustomization\npatches: [{patch: vllm serve m}]\n",
    ),
)
def test_yaml_that_is_not_understood_is_never_taken_for_a_script(
    read: Callable[..., Any], text: str
) -> None:
    with pytest.raises(SpecError, match="starts no server"):
        read(text)


def test_recipes_of_srt_slurm_are_read_by_role(read: Callable[..., Any]) -> None:
    text = """
resources: {decode_workers: 2}
backend:
  vllm_config:
    prefill: {tensor-parallel-size: 2, enable-expert-parallel: true, kv-cache-dtype: fp8}
    decode: {tensor-parallel-size: 4, no-enable-prefix-caching: true, enforce-eager: false}
"""
    launch = read(text, role="decode")
    assert (launch.setting.degrees.attention_tensor, launch.replicas) == (4, 2)
    assert not launch.has_prefix_cache
    assert "--enforce-eager" not in launch.flags.unpriced
    launch = read(text, role="prefill")
    assert (launch.setting.degrees.expert, launch.kv_cache_dtype) == (2, "fp8")
    sections = text.replace("vllm_config", "trtllm_config").replace("-size", "_size")
    sections = sections.replace("tensor-parallel", "tensor_parallel")
    assert read(sections, role="prefill").engine == "trtllm"


SCRIPTED = """
services:
  server:
    image: vllm/vllm-openai:v0.33.0
    entrypoint:
      - bash
      - -c
      - |
        source /etc/links.sh
        if [ "$${LINKED:-0}" = "1" ]; then
          exec vllm serve "$$@"
        else
          exec vllm serve OTHER "$$@"
        fi
      - --
    command: [--model, m, --tensor-parallel-size, "${TP:-4}", --max-num-seqs, 8]
"""


def test_a_scripted_entrypoint_gets_its_arguments(read: Callable[..., Any]) -> None:
    launch = read(SCRIPTED.replace("OTHER", "--disable-custom-all-reduce"))
    assert (launch.setting.degrees.attention_tensor, launch.setting.running) == (4, 8)
    assert any("differ in --disable-custom-all-reduce" in note for note in launch.notes)
    apart = SCRIPTED.replace("OTHER", "--kv-cache-dtype fp8")
    with pytest.raises(SpecError, match=r"starts 2 servers.*keep one branch.*--kv-cache-dtype"):
        read(apart)
    assert read(apart.replace("source /etc/links.sh", "LINKED=1")).kv_cache_dtype == "bf16"
    shifted = SCRIPTED.replace("source /etc/links.sh", "shift; shift").replace("OTHER", "x")
    assert read(shifted).setting.degrees.attention_tensor == 4
    pod = (
        "kind: Pod\napiVersion: v1\nspec: {containers: [{image: i, command: [bash, -c], args: ["
        "'exec \"$@\" --max-num-seqs 8', x, vllm, serve, m, -tp, '$(TP)'], env: [{name: TP,"
        " value: '4'}]}]}\n"
    )
    assert read(pod).setting.degrees.attention_tensor == 4


# Container images whose entry point serves, and what starts another program in them.

RUN = "docker run -d --name vllm-openai --device=/dev/kfd --network=host -v /path/to/models:/m:ro"
ARGS = "--model /m/Mixtral --port 8000 --tensor-parallel-size 8 --max-model-len 32000"


def test_an_image_that_serves_is_read_as_its_engine(deployment: Made, failures: Failures) -> None:
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


def test_an_entry_point_of_the_command_counts_instead(deployment: Made, failures: Failures) -> None:
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


@each_row(
    "text",
    (
        "docker run --gpus all -e NGC_API_KEY nvcr.io/nim/meta/llama-3.1-8b-instruct:latest",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: nim}\nspec:\n  containers:\n"
        "  - {name: nim, image: 'nvcr.io/nim/deepseek-ai/deepseek-r1:1.7'}\n",
    ),
)
def test_an_image_that_chooses_its_engine_is_refused_by_name(deployment: Made, text: str) -> None:
    with pytest.raises(SpecError, match="NVIDIA NIM is not read; its image chooses engine"):
        deployment().read(text)


# Routers of launches that others wrote.

UNKNOWN = "a policy that is not known here"
FILES = {
    "router.yaml": "context_servers:\n  num_instances: 1\n  router: {type: 'load_balancing'}\n"
    "generation_servers:\n  num_instances: 1\n"
}


def test_routers_of_others_are_named_with_their_policies() -> None:
    for text, said in (
        ("python -m sglang_router.launch_router --worker-urls http://a:1", "cache_aware"),
        ("smg launch --policy random --worker-urls http://a:1 http://b:1", "random"),
        ("vllm-router --policy=power_of_two --worker-urls http://a:1", "power_of_two"),
        ("uv run vllm-router --policy random", "random"),
        ("vllm-router --cache-threshold 1.0 --worker-urls http://a:1", "least_requests"),
        (
            "python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://a:1 8998"
            " --decode http://b:1 --prefill-policy cache_aware --decode-policy round_robin",
            "cache_aware, round_robin for decode",
        ),
        ("python -m dynamo.frontend --router-mode kv --http-port 8000", "cache_aware"),
        ("python -m dynamo.frontend", "round_robin"),
        ("upstream llm {\n  least_conn;\n  server a:1;\n  server b:1;\n}", "least_requests"),
        (
            "upstream llm {\n  least_conn;\n  server a:1 weight=3;\n  server b:1 weight=1;\n}",
            "weighted_least_requests",
        ),
        ("upstream llm {\n  server a:1;\n}", "round_robin"),
        ("upstream llm {\n  random  two;\n  server a:1;\n}", "power_of_two"),
        ("upstream llm {\n  ip_hash;\n  server a:1;\n}", UNKNOWN),
        ("upstream a {\n server a:1;\n}\nupstream b {\n least_conn;\n server b:1;\n}", UNKNOWN),
        ("export DYN_ROUTER_MODE=kv\npython -m dynamo.frontend", "cache_aware"),
        ("trtllm-serve disaggregated -c config.yaml", UNKNOWN),
        ("trtllm-serve disaggregated -c router.yaml", "least_requests, round_robin for decode"),
        (
            "if ! command -v vllm-router; then pip install vllm-router; fi\n"
            "vllm-router --policy random",
            "random",
        ),
    ):
        result = read_router(text, source="the command", beside=FILES.get)
        assert str(present(result)).partition(" by ")[2] == said, text
    for text in (
        "vllm serve m",
        "# vllm-router --policy random",
        "command -v vllm-router",
        "pip install vllm-router==0.1.17",
        "uv pip install vllm-router",
        "pkill -f vllm-router",
        "cp load_balance_proxy_server_example.py /tmp",
        "",
    ):
        assert read_router(text, source="the command") is None, text


def test_routing_to_ranks_is_read_where_the_release_does_it() -> None:
    for text, finds, ranks in (
        ("vllm-router --worker-urls http://a:1 --intra-node-data-parallel-size 8", True, 8),
        ("vllm-router --worker-urls http://a:1 --intra-node-data-parallel-size 1", False, None),
        ("vllm-router --worker-urls http://a:1", False, None),
        ("vllm-router --intra-node-data-parallel-size 8 --policy round_robin", False, 8),
        (
            "vllm-router --vllm-pd-disaggregation --prefill http://a:1 --decode http://b:1",
            True,
            None,
        ),
        ("python -m dynamo.frontend --router-mode kv", True, None),
        ("python -m dynamo.frontend", False, None),
        ("python -m sglang_router.launch_router --dp-aware --worker-urls http://a:1", False, None),
        ("upstream llm {\n  server a:1;\n}", False, None),
    ):
        result = read_router(text, source="the command")
        assert result is not None, text
        assert (result.finds_ranks, present(result.router).ranks) == (finds, ranks), text
        assert bool(result.cautions(8)) == ("--dp-aware" in text), text
        assert bool(result.cautions(4)) == ("--dp-aware" in text or ranks is not None), text
    with refused(SpecError, match="intra-node-data-parallel-size 0"):
        read_router("vllm-router --intra-node-data-parallel-size 0", source="the command")


@each_row(
    ("text", "said"),
    (
        ("vllm-router --policy fastest", "policy 'fastest' of vllm-router is not modelled; those"),
        ("vllm-router --cache-threshold 7", "--cache-threshold 7 is outside 0..1"),
        ("vllm-router --policy random & vllm-router --policy round_robin", "starts 2 servers"),
        ("dynamo.frontend --router-mode", "--router-mode has no value"),
    ),
)
def test_a_policy_that_a_router_lacks_is_named(text: str, said: str) -> None:
    with refused(SpecError, match=said):
        read_router(text, source="the command")


@each_row(
    "text",
    (
        "context_servers:" + " " * 150_000 + "router:" + " " * 150_000,
        "upstream" + " " * 150_000 + "{",
        "\n" * 150_000 + "vllm-router",
    ),
)
def test_long_runs_of_spaces_are_read_in_no_time(text: str) -> None:
    started_s = time.process_time()
    read_router(text, source="it")
    assert time.process_time() - started_s < 5.0
