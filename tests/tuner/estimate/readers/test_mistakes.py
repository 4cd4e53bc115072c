"""A launch with several mistakes is refused once, with all of them."""

from collections.abc import Callable

import pytest

from tests.expect import refused
from tuner.engines.reading.mistakes import MOST_SAID
from tuner.errors import SpecError
from tuner.estimate.estimate import estimate
from tuner.estimate.registry import read_text
from tuner.spec.spec import Spec

MEGATRON = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 64"


def refusal(text: str, *, engine: str = "megatron") -> str:
    with pytest.raises(SpecError) as refused:
        read_text(text, format_name=engine, source="launch")
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_unusable_flags_are_named_together_and_one_alone() -> None:
    said = refusal(
        f"{MEGATRON} --bf16 --fp16 --recompute-granularity foo --expert-model-parallel-size 3.5"
        " --hidden-dropout 2"
    )

    assert said.startswith("launch: 4 mistakes: (1) ")
    assert said.count("launch:") == 1
    for part in (
        "--fp16 and --bf16: choose one",
        "--recompute-granularity 'foo' is none of full, selective",
        "--expert-model-parallel-size '3.5' is not a whole number",
        "--hidden-dropout 2 is outside 0..1",
    ):
        assert part in said
    said = refusal(f"{MEGATRON} --hidden-dropout 2")

    assert said == "launch: --hidden-dropout 2 is outside 0..1; the nearest is 1"
    said = refusal(
        '[training]\nlocal_batch_size = "8"\nseq_len = 0\n[activation_checkpoint]\nmode = "all"\n',
        engine="torchtitan",
    )

    assert said.startswith("launch: 3 mistakes: ")
    assert "training.local_batch_size '8'" in said
    assert "training.seq_len 0" in said
    assert "activation_checkpoint.mode 'all'" in said


def test_consequences_of_a_mistake_are_not_said() -> None:
    # Without its size the launch would lack a micro-batch, and without its method all the rest.
    text = MEGATRON.replace("--micro-batch-size 1", "--micro-batch-size x")
    said = refusal(f"{text} --recompute-granularity full --recompute-method all --seq-length 0")

    assert said.startswith("launch: 3 mistakes")
    assert "missing" not in said
    assert "--recompute-method 'all' is none of uniform, block" in said
    assert "--seq-length 0 is outside" in said


def test_a_long_list_is_cut() -> None:
    names = ("seq-length", "global-batch-size", "mtp-num-layers", "save-interval")
    flags = (*names, "recompute-num-layers", "ddp-bucket-size", "context-parallel-size")
    said = refusal(f"{MEGATRON} {' '.join(f'--{name} x' for name in flags)}")

    assert f"({MOST_SAID})" in said
    assert f"({MOST_SAID + 1})" not in said
    assert said.endswith("more")


def test_mistakes_beside_a_model_are_named_together(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    launches = {
        "--num-layers 47 --global-batch-size 63": ("--num-layers 47", "--global-batch-size 63"),
        "--tp-comm-overlap --expert-model-parallel-size 3": (
            "--tp-comm-overlap needs",
            "--expert-model-parallel-size 3 does not divide",
        ),
    }
    for flags, parts in launches.items():
        launch = read_text(f"{MEGATRON} --bf16 {flags}", format_name="megatron", source="launch")
        with refused(SpecError, *parts):
            estimate(spec, launch)
