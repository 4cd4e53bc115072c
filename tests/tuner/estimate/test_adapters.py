"""A launch priced with the adapters that the spec names."""

from collections.abc import Callable

import pytest

from tuner.errors import SpecError
from tuner.estimate.estimate import estimate
from tuner.estimate.registry import read_text
from tuner.spec.goal import Reliability
from tuner.spec.spec import Spec
from tuner.spec.tune import Adapters

LAUNCH = (
    "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4"
    " --micro-batch-size 1 --global-batch-size 256 --bf16 --seq-length 4096"
    " --use-distributed-optimizer --hidden-dropout 0 --attention-dropout 0"
)


def test_adapters_take_less_time_and_memory_and_a_note_says_so(
    spec_of: Callable[..., Spec],
) -> None:
    tune = Adapters(method="lora", rank=16, targets=("q_proj", "k_proj", "v_proj"))
    launch = read_text(LAUNCH, format_name="megatron", source="launch.sh")
    full, tuned = (
        estimate(spec_of("llama-3.1-8b", nodes=1, tune=chosen), launch) for chosen in ("full", tune)
    )
    assert tuned.step_time_s < 0.9 * full.step_time_s
    peaks = [max(rank.total_bytes for rank in one.memory) for one in (full, tuned)]
    assert peaks[1] < 0.8 * peaks[0]
    assert any("LoRA adapters of rank 16" in note for note in tuned.notes)
    assert not any("LoRA" in note for note in full.notes)


def test_checkpoints_hold_the_adapters_alone(spec_of: Callable[..., Spec]) -> None:
    tune = Adapters(method="lora", rank=16, targets=("q_proj", "k_proj", "v_proj"))
    launch = f"{LAUNCH} --save /shared --save-interval 500"
    failing = Reliability.model_validate({"device_mtbf": 5e6, "restart": 300.0})
    stated = []
    for chosen in ("full", tune):
        spec = spec_of("llama-3.1-8b", nodes=1, tune=chosen)
        goal = spec.goal.model_copy(update={"reliability": failing})
        read = read_text(launch, format_name="megatron", source="launch.sh")
        told = estimate(spec.model_copy(update={"goal": goal}), read).checkpoints
        assert told is not None
        assert told.run is not None
        stated.append(told.run.checkpoint_bytes)
    # One adapter for the joined projection of 4,096 to 4,096 + 2 x 1,024, in 32 layers.
    assert stated == [14 * 8_030_261_248, 14 * 32 * 16 * (4096 + 6144)]


def test_a_launch_cannot_say_qlora(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, tune=Adapters(method="qlora", rank=16))
    launch = read_text(LAUNCH, format_name="megatron", source="launch.sh")
    with pytest.raises(SpecError, match=r"4 bits \(qlora\) are priced on replicas"):
        estimate(spec, launch)
