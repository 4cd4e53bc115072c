"""A launch priced with the adapters that the spec names."""

from collections.abc import Callable

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.estimate.conftest import predict
from tuner.cli.estimate_text import estimate_text
from tuner.engines.ms_swift import read as swift
from tuner.engines.peft import read as trainer
from tuner.errors import SpecError
from tuner.estimate.estimate import estimate, shipped_residuals
from tuner.estimate.records import Estimate
from tuner.estimate.registry import read_text
from tuner.spec.goal import Reliability
from tuner.spec.spec import Spec
from tuner.spec.tune import Adapters

LAUNCH = (
    "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4"
    " --micro-batch-size 1 --global-batch-size 256 --bf16 --seq-length 4096"
    " --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0"
)


LORA = Adapters(method="lora", rank=16, targets=("q_proj", "k_proj", "v_proj"))


READ = read_text(LAUNCH, format_name="megatron", source="launch.sh")


def test_adapters_take_less_time_and_memory_and_a_note_says_so(
    spec_of: Callable[..., Spec],
) -> None:
    full, tuned = (
        predict(spec_of("llama-3.1-8b", nodes=1, tune=chosen), READ) for chosen in ("full", LORA)
    )
    assert tuned.step_time_s < 0.9 * full.step_time_s
    peaks = [max(rank.total_bytes for rank in one.memory) for one in (full, tuned)]
    assert peaks[1] < 0.8 * peaks[0]
    assert any("LoRA adapters of rank 16" in note for note in tuned.notes)
    assert not any("LoRA" in note for note in full.notes)


def test_checkpoints_hold_the_adapters_alone(spec_of: Callable[..., Spec]) -> None:
    launch = f"{LAUNCH} --save /shared --save-interval 500"
    failing = Reliability.model_validate({"device_mtbf": 5e6, "restart": 300.0})
    stated = []
    for chosen in ("full", LORA):
        spec = spec_of("llama-3.1-8b", nodes=1, tune=chosen)
        goal = spec.goal.model_copy(update={"reliability": failing})
        read = read_text(launch, format_name="megatron", source="launch.sh")
        told = present(predict(spec.model_copy(update={"goal": goal}), read).checkpoints)
        stated.append(present(told.run).checkpoint_bytes)
    # One adapter for the joined projection of 4,096 to 4,096 + 2 x 1,024, in 32 layers.
    assert stated == [14 * 8_030_261_248, 14 * 32 * 16 * (4096 + 6144)]


def test_a_launch_cannot_say_qlora(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, tune=Adapters(method="qlora", rank=16))
    with pytest.raises(SpecError, match=r"4 bits \(qlora\) are priced on replicas"):
        estimate(spec, READ)


# Launches whose samples are not packed: the length that they state is the longest of one.

MakeSpec = Callable[..., Spec]
GIB = 2**30
FSDP = '{"fsdp_transformer_layer_cls_to_wrap": ["Layer"]}'
COMMAND = (
    "torchrun --nnodes 2 --nproc-per-node 8 train/sft.py --per_device_train_batch_size=1"
    " --gradient_accumulation_steps=1 --block_size=32768 --fsdp='full_shard auto_wrap'"
    " --fsdp_config=fsdp.json --bf16=True --gradient_checkpointing=True"
)


def _estimated(spec_of: MakeSpec, sequence: int, command: str = COMMAND) -> Estimate:
    spec = spec_of("qwen2.5-32b", nodes=2, global_batch_size=16, sequence_length=sequence)
    launch = trainer.read(command, source="run.sh", beside={"fsdp.json": FSDP}.get)
    return predict(spec, launch, residuals=shipped_residuals())


def test_a_shorter_length_of_the_spec_is_that_of_the_samples(spec_of: MakeSpec) -> None:
    # simplescaling/s1, train/sft_multinode.sh: 16 H100, 4,700 tokens in the mean, 4.95 s.
    usual = _estimated(spec_of, 4700)
    assert usual.fits
    assert usual.sequence_length == 4700
    low, high = usual.step_time_s_band
    # A step waits for the longest of its 16 samples, which is above the mean.
    assert low < 4.95 < 1.2 * high
    assert any("32768 is the longest that one may be" in note for note in usual.notes)
    (longest,) = (note for note in usual.notes if "tokens a sample needs" in note)
    assert longest.endswith("which does not fit")
    packed = _estimated(spec_of, 4700, f"{COMMAND} --packing True")
    assert packed.sequence_length == 32768
    assert packed.rests_on_samples is None


def test_the_longest_sample_is_said_to_fit_where_a_launch_of_such_samples_does(
    spec_of: MakeSpec,
) -> None:
    said, fits = [], []
    for longest in range(9_000, 18_000, 1000):
        command = COMMAND.replace("32768", f"{longest}")
        (note,) = (n for n in _estimated(spec_of, 4700, command).notes if "a sample needs" in n)
        said.append(note.endswith("which fits"))
        fits.append(_estimated(spec_of, longest, command).fits)
    assert said == fits
    assert any(fits)
    assert not all(fits)


def test_a_refusal_says_that_it_rests_on_samples_of_the_longest_length(spec_of: MakeSpec) -> None:
    refused = _estimated(spec_of, 32768)
    assert not refused.fits
    assert refused.rests_on_samples is not None
    assert "--block_size 32768 tokens, the longest of one" in refused.rests_on_samples
    assert f"may be used: {refused.rests_on_samples}" in " ".join(estimate_text(refused).split())
    # Without shards no length makes it fit.
    whole = COMMAND.replace("--fsdp='full_shard auto_wrap' --fsdp_config=fsdp.json ", "")
    assert _estimated(spec_of, 32768, whole).rests_on_samples is None


@each_row(("packing", "tokens"), (("", 1024), (" --packing true", 8192)))
def test_samples_of_megatron_swift_vary_unless_they_are_packed(
    spec_of: MakeSpec, packing: str, tokens: int
) -> None:
    words = "NPROC_PER_NODE=8 megatron sft --model m --max_length 8192 --global_batch_size 8"
    spec = spec_of("qwen2.5-7b", nodes=1, sequence_length=1024)
    launch = swift.read(words + packing, source="run.sh")
    assert launch.samples_vary is (not packing)
    assert predict(spec, launch).sequence_length == tokens
