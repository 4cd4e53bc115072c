"""Launches of public threads whose outcome is known, reduced to what decides it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.estimate.conftest import MODELS, predict
from tuner.engines.megatron_bridge.read import read_container
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.peft import read as trainer
from tuner.engines.reading.launch import LaunchSettings
from tuner.engines.torchtitan import read as torchtitan
from tuner.estimate.configuration import build_configuration
from tuner.estimate.estimate import pricing_setup, shipped_residuals
from tuner.estimate.prices import PricedConfiguration, price_configurations
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]
GIB = 2**30


def _priced(launch: LaunchSettings, spec: Spec) -> PricedConfiguration:
    setup = pricing_setup(spec, shipped_residuals())
    (priced,) = price_configurations((build_configuration(launch, spec)[0],), setup)
    return priced


def _peak_gib(launch: LaunchSettings, spec: Spec) -> float:
    return float(_priced(launch, spec).peak_bytes_P.max()) / GIB


def _deepseek(
    rest: str, *, batch: int = 8, sequence: int = 4096, expert: int = 1
) -> LaunchSettings:
    text = (
        f"[training]\nlocal_batch_size = {batch}\nseq_len = {sequence}\n"
        f"[parallelism]\nexpert_parallel_degree = {expert}\n{rest}"
    )
    return torchtitan.read(text, source="run.toml")


ALL_COMPILED = '[activation_checkpoint]\nmode = "none"\n[compile]\nenable = true\n'
BY_OP = (
    '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n'
    '[compile]\nenable = true\ncomponents = ["loss"]\n'
)


def test_an_eager_loss_has_eighteen_bytes_a_logit(spec_of: MakeSpec) -> None:
    # pytorch/torchtitan#1690: 32B, local batch 64, ran out of 95 GiB without compilation.
    spec = spec_of("qwen2.5-32b", nodes=4, global_batch_size=256)
    text = (
        "[training]\nlocal_batch_size = 64\nseq_len = 4096\n"
        "[parallelism]\ndata_parallel_shard_degree = 4\ntensor_parallel_degree = 8\n"
        '[activation_checkpoint]\nmode = "full"\n[compile]\nenable = '
    )
    eager, compiled = (
        _peak_gib(torchtitan.read(text + word, source="run.toml"), spec)
        for word in ("false", "true")
    )
    logits = 64 * 4096 * spec.model.vocab_size / 8
    assert eager - compiled == pytest.approx(14.0 * logits / GIB, rel=0.05)
    assert eager > 95.0


def test_experts_without_checkpointing_keep_scored_copies(spec_of: MakeSpec) -> None:
    # pytorch/torchtitan#1993: 8 x 4,096 and 4 x 8,192 ran out of 178 GiB, 4 x 6,144 took 157 GiB.
    spec = spec_of("deepseek-v2-lite", nodes=1, device="b200-sxm", global_batch_size=64)
    assert _peak_gib(_deepseek(ALL_COMPILED), spec) > 178.0
    assert _peak_gib(_deepseek(ALL_COMPILED, batch=4, sequence=8192), spec) > 178.0
    ran = _peak_gib(_deepseek(ALL_COMPILED, batch=4, sequence=6144), spec)
    assert ran == pytest.approx(157.0, rel=0.05)


def test_checkpointing_by_operation_keeps_copies_with_an_all_to_all_alone(
    spec_of: MakeSpec,
) -> None:
    # pytorch/torchtitan#1789: 75.9 GiB with EP 1; EP 8 ran out of 79.1 GiB.
    spec = spec_of("deepseek-v2-lite", nodes=1, global_batch_size=64)
    assert _peak_gib(_deepseek(BY_OP), spec) == pytest.approx(75.9, rel=0.05)
    assert _peak_gib(_deepseek(BY_OP, expert=8), spec) > 79.1
    # Before 6 September 2025 none was kept. pytorch/torchtitan#1610, of August: 78.1 GiB of 95.
    former = BY_OP + "[checkpoint]\nenable_checkpoint = false\n"
    assert _peak_gib(_deepseek(former, expert=8), spec) == pytest.approx(78.1, rel=0.1)


@each_row(("switch", "gib"), (("[checkpoint]\nenable_checkpoint = false\n", 70.02), ("", 74.53)))
def test_an_all_to_all_that_is_kept_adds_its_copies(
    spec_of: MakeSpec, switch: str, gib: float
) -> None:
    spec = spec_of("deepseek-v2-lite", nodes=1, device="a100-80gb-sxm", global_batch_size=4)
    launch = _deepseek(BY_OP + switch, batch=1, expert=4).model_copy(update={"devices": 4})
    assert _peak_gib(launch, spec) == pytest.approx(gib, rel=0.03)


def test_a_command_before_june_2025_compiles_layers_and_scales_by_rows(spec_of: MakeSpec) -> None:
    # pytorch/torchtitan#808, February 2025: 47.77 GiB and 1.27 s of 8 H100 of 96 GB.
    spec = spec_of("llama-3.1-8b", nodes=1, device="h100-96gb-hbm2e", global_batch_size=8)
    text = "[training]\nbatch_size = 2\nseq_len = 8192\ndata_parallel_shard_degree = -1\n"
    words = "--training.batch_size 1 --training.compile --model.converters float8"
    launch = torchtitan.read(
        text + '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\n',
        source="run.toml",
        command_words=[*words.split(), "--float8.recipe_name", "rowwise"],
    )
    assert set(launch.compiled or ()) == {"model"}
    assert (launch.fp8_recipe, launch.micro_batch) == ("blockwise", 1)
    priced = _priced(launch, spec)
    assert float(priced.peak_bytes_P.max()) / GIB == pytest.approx(47.77, rel=0.1)
    assert float(priced.step_s) == pytest.approx(1.27, rel=0.1)


def test_stages_of_fsdp2_hold_whole_gradients_whatever_they_gather_again(
    spec_of: MakeSpec,
) -> None:
    # pytorch/torchtitan#2107: 512 H100, 56.75 GiB reserved, of which rank is not said.
    text = (
        "[training]\nlocal_batch_size = 16\nseq_len = 4096\n[compile]\nenable = true\n"
        '[activation_checkpoint]\nmode = "full"\n[parallelism]\nexpert_parallel_degree = 32\n'
        'pipeline_parallel_degree = 8\npipeline_parallel_schedule = "Interleaved1F1B"\n'
        'expert_parallel_comm_backend = "deepep"\n'
    )
    spec = spec_of("deepseek-v3", nodes=64, global_batch_size=1024)
    peaks = _priced(torchtitan.read(text, source="run.toml"), spec).peak_bytes_P / GIB
    assert peaks.min() == pytest.approx(56.75, rel=0.1)
    assert peaks.max() == pytest.approx(56.75, rel=0.1)


def test_segments_that_cannot_grow_leave_memory_unused(spec_of: MakeSpec) -> None:
    # The kind of hiyouga/LlamaFactory#6531, which ran for a while, then out of 44.5 GiB.
    spec = spec_of("llama-3.1-8b", nodes=1, sequence_length=15000, global_batch_size=32)
    command = (
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=4 llamafactory-cli train --stage sft --bf16 true"
        " --model_name_or_path m"
        " --finetuning_type lora --lora_target all --cutoff_len 15000 --deepspeed z3.json"
        " --per_device_train_batch_size 1 --gradient_accumulation_steps 8"
    )
    files = {"z3.json": '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}'}
    grows = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
    plain, grown = (
        _peak_gib(trainer.read(f"{before}{command}", source="run.sh", beside=files.get), spec)
        for before in ("", grows)
    )
    assert 1.03 * grown < plain < 1.15 * grown


def test_deepspeeds_step_copies_the_gradients_of_a_rank(spec_of: MakeSpec) -> None:
    # hiyouga/LlamaFactory#8642: 32B on 8 x 141 GB ran out at the first step of the optimizer.
    spec = spec_of("qwen2.5-32b", nodes=1, device="h200-sxm", sequence_length=1024)
    command = (
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train --stage sft --bf16 true"
        " --finetuning_type full --cutoff_len 1024 --deepspeed z.json --model_name_or_path m"
        " --per_device_train_batch_size 1 --gradient_accumulation_steps 1"
    )

    def peak_gib(stage: int) -> float:
        text = json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": stage}})
        return _peak_gib(trainer.read(command, source="run.sh", beside={"z.json": text}.get), spec)

    # 16-bit weights; of an eighth, fp32 states and, of gradients, two tensors and their cast.
    least = 32.76e9 * (2 + (12 + 2 + 2 + 4) / 8) / GIB
    assert least < peak_gib(2) < least + 4.0
    assert peak_gib(2) > 0.95 * 140.0
    assert peak_gib(3) < 0.6 * peak_gib(2)


LLAMA = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 2 --use-distributed-optimizer "
    "--sequence-parallel --recompute-activations --micro-batch-size 1 --global-batch-size 128 "
    "--seq-length 4096 --hidden-dropout 0 --attention-dropout 0 "
)


def test_parameters_are_fp32_where_no_flag_says_otherwise(spec_of: MakeSpec) -> None:
    # NVIDIA/Megatron-LM#1000: about 20 TFLOP/s on A100, 11.9 minutes a step; 16 bytes a parameter.
    spec = spec_of("llama-3.1-70b", nodes=2, device="a100-80gb-sxm", global_batch_size=128)
    priced = predict(spec, megatron.read(LLAMA, source="run.sh"), residuals=shipped_residuals())
    low, high = priced.step_time_s_band
    assert low < 11.9 * 60.0 < high
    rank = priced.memory[0]
    assert rank.weight_bytes == rank.gradient_bytes == rank.optimizer_bytes // 2
    halved = predict(spec, megatron.read(f"{LLAMA}--bf16", source="run.sh"))
    assert halved.step_time_s < 0.2 * priced.step_time_s


def test_a_printed_configuration_of_bridge_has_the_peak_that_its_run_printed(
    spec_of: MakeSpec, tmp_path: Path
) -> None:
    # Llama-3.2-1B on 8 devices in NeMo 25.09: 12,003.6 MiB allocated at most.
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    config = json.loads((MODELS / "llama-3.1-8b" / "config.json").read_text())
    more = {"tie_word_embeddings": True, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | more))
    spec = spec_of(str(tmp_path), nodes=1, sequence_length=1024, global_batch_size=512)
    text = (
        "dataset: {sequence_length: 1024}\nmixed_precision: {bf16: true}\n"
        "ddp: {use_distributed_optimizer: true, grad_reduce_in_fp32: true}\n"
        "model: {cross_entropy_fusion_impl: native, cross_entropy_loss_fusion: true,"
        " hidden_dropout: 0.0, attention_dropout: 0.0}\n"
        "train: {micro_batch_size: 1, global_batch_size: 512}\n"
    )
    priced = _priced(read_container(text, source="ConfigContainer.yaml"), spec)
    allocated = float(np.max(priced.memory.allocated_PC)) / 2**20
    assert allocated == pytest.approx(12003.6, rel=0.02)


QWEN = (
    "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --micro-batch-size 1 "
    "--bf16 --hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer "
)


@pytest.fixture(scope="module")
def qwen(spec_of: MakeSpec) -> Callable[..., Spec]:
    """Make specs of a model like Qwen3-30B-A3B."""

    def make(*, device: str, nodes: int, batch: int, sequence: int) -> Spec:
        return spec_of(
            "qwen3-30b-a3b",
            nodes=nodes,
            device=device,
            global_batch_size=batch,
            sequence_length=sequence,
        )

    return make


def test_moments_in_bf16_make_a_launch_fit_and_grouped_gemms_wait_less(
    qwen: Callable[..., Spec],
) -> None:
    spec = qwen(device="h100-sxm", nodes=1, batch=256, sequence=4096)
    flags = f"{QWEN}--expert-model-parallel-size 8 --global-batch-size 256 --seq-length 4096 "
    aware = "--use-precision-aware-optimizer --main-grads-dtype bf16 "
    short = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 "
    wide, narrow = (
        _priced(megatron.read(flags + aware + more, source="run.sh"), spec) for more in ("", short)
    )
    saved = float((wide.peak_bytes_P - narrow.peak_bytes_P).max()) / GIB
    # 4 bytes of each of its parameters, 3.8 billion on this device.
    assert saved == pytest.approx(14.2, rel=0.02)
    assert narrow.peak_bytes_P.max() < 76.0 * GIB
    each, grouped = (
        _priced(megatron.read(flags + more, source="run.sh"), spec)
        for more in ("", "--moe-grouped-gemm")
    )
    assert each.seconds("host_s") > 1.5 * grouped.seconds("host_s")
    assert each.peak_bytes_P.max() == grouped.peak_bytes_P.max()


@each_row(("pipeline", "expert", "batch", "seconds"), ((2, 8, 128, 10.361), (4, 4, 256, 20.992)))
def test_tokens_beyond_the_capacity_leave_memory(
    qwen: Callable[..., Spec], pipeline: int, expert: int, batch: int, seconds: float
) -> None:
    # alibaba/Pai-Megatron-Patch#643: both ran on 80 GB, in 10.4 and 21.0 s.
    spec = qwen(device="h800-sxm", nodes=2, batch=batch, sequence=8192)
    flags = (
        f"{QWEN}--pipeline-model-parallel-size {pipeline} --moe-permute-fusion "
        f"--expert-model-parallel-size {expert} --global-batch-size {batch} --seq-length 8192 "
    )
    capped = _priced(
        megatron.read(f"{flags}--moe-expert-capacity-factor 1.0", source="run.sh"), spec
    )
    assert capped.peak_bytes_P.max() < 76.0 * GIB
    assert capped.step_s == pytest.approx(seconds, rel=0.15)
    assert _priced(megatron.read(flags, source="run.sh"), spec).peak_bytes_P.max() > 76.0 * GIB
