import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.expect import refused
from tests.rows import each_row
from tests.tuner.estimate.readers.test_megatron import said
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.reading.launch import LaunchSettings
from tuner.errors import SpecError


def read(text: str) -> LaunchSettings:
    return deepspeed.read(text, source="ds.json")


def test_zero_3_with_an_offloaded_optimizer() -> None:
    launch = read((Path(__file__).parents[1] / "launches" / "zero3.json").read_text())

    assert (launch.zero_stage, launch.micro_batch, launch.global_batch) == (3, 2, 512)
    assert launch.optimizer_offload_ratio == 1.0
    assert launch.recompute is Recompute.FULL
    assert "gradient_clipping = 1.0" in launch.ignored
    assert "zero_optimization.stage3_max_live_parameters = 1000000000" in launch.ignored
    assert any("the training script decides" in note for note in launch.notes)


def test_settings_of_the_json_are_read() -> None:
    launch = read('{"train_batch_size": 64, "gradient_accumulation_steps": 4}')

    assert launch.micro_batch_follows
    assert (launch.global_batch, launch.accumulation) == (64, 4)
    launch = read(
        '{"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 4},'
        '"sequence_parallel_size": 2, "expert_parallel": {"enabled": true, "autoep_size": 8}}'
    )

    assert (launch.tensor, launch.context, launch.expert) == (4, 2, 8)
    launch = read('{"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": true}}')

    assert launch.optimizer_offload_ratio == 1.0
    assert "say zero_optimization.offload_optimizer" in launch.deprecated[0]


@each_row(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("[]", "where an object belongs"),
        ('{"a": 1}', "not DeepSpeed's"),
        ('{"bf16": {"enabled": true}}', "neither train_batch_size nor"),
        (
            '{"train_batch_size": "auto"}',
            "'auto' is filled in by Transformers' Trainer: estimate its command",
        ),
        ('{"train_batch_size": 8, "zero_optimization": {"stage": 4}}', "there are 0 to 3"),
        (
            '{"train_batch_size": 8, "bf16": {"enabled": true}, "fp16": {"enabled": true}}',
            "bf16.enabled and fp16.enabled: choose one",
        ),
        (
            '{"train_batch_size": 8, "zero_optimization": '
            '{"stage": 0, "offload_optimizer": {"device": "cpu"}}}',
            "offload_optimizer needs zero_optimization.stage 1, 2 or 3, not 0",
        ),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"train_batch_size": 8, "gradient_acumulation_steps": 2}',
            "gradient_acumulation_steps is no setting; did you mean gradient_accumulation_steps?",
        ),
    ],
)
def test_refuses_in_one_line_what_cannot_be_launched(text: str, part: str) -> None:
    with refused(SpecError, part):
        read(text)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
OBJECTS = st.dictionaries(
    st.sampled_from(
        [
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "zero_optimization",
            "stage",
            "offload_optimizer",
            "device",
            "ratio",
            "bf16",
            "enabled",
            "tensor_parallel",
            "autotp_size",
            "activation_checkpointing",
        ]
    ),
    st.recursive(SCALARS, lambda inner: st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_size=6,
)


@given(OBJECTS, st.dictionaries(st.sampled_from(["stage", "device", "enabled"]), SCALARS))
@settings(deadline=None, max_examples=100)
def test_any_json_gives_settings_or_one_line(
    values: dict[str, object], inner: dict[str, object]
) -> None:
    for whole in (values, values | {"zero_optimization": inner, "bf16": inner}):
        assert "\n" not in said(deepspeed.read, json.dumps(whole))


@given(st.text(max_size=100))
@settings(deadline=None, max_examples=60)
def test_any_text_gives_settings_or_our_error(text: str) -> None:
    with pytest.raises(SpecError):
        read(text)
