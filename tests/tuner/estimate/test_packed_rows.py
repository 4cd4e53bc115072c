"""Launches that pack documents, priced with the documents of the spec."""

from collections.abc import Callable

import pytest

from tests.tuner.estimate.conftest import predict
from tuner.engines.megatron_bridge.read import read_container
from tuner.estimate.registry import read_launch, read_text
from tuner.spec.documents import documents_of_law
from tuner.spec.serving.lengths import LengthKind, LengthLaw
from tuner.spec.spec import Spec

TRL = (
    "trl sft --accelerate_config zero3 --num_processes 8 --model_name_or_path m --packing true"
    " --max_length 32768 --per_device_train_batch_size 1 --attn_implementation flash_attention_2"
)


def packing(text: str, **given: str) -> str:
    return read_text(text, source="launch", **given).packing


def test_the_rule_is_that_of_the_launch() -> None:
    assert read_launch(TRL).packing == "best_fit_decreasing"
    assert read_launch(f"{TRL} --packing_strategy bfd_split").packing == "best_fit_decreasing"
    # Documents that attend to each other are one.
    assert read_launch(f"{TRL} --packing_strategy wrapped").packing == ""
    assert read_launch(TRL.replace("flash_attention_2", "sdpa")).packing == ""
    assert read_launch(TRL.replace("--packing true", "")).packing == ""
    torchtitan = "[training]\nseq_len = 4096\nlocal_batch_size = 1\n"
    assert packing(torchtitan, format_name="torchtitan") == "wrapped"
    head = "_target_: megatron.bridge.training.config.ConfigContainer\n"
    head += "model: {num_layers: 2}\ntrain: {global_batch_size: 8, micro_batch_size: 1}\n"
    for dataset, rule in (
        ("{seq_length: 4096, packed_sequence_specs: {packed_sequence_size: 4096}}", True),
        ("{enable_offline_packing: true, offline_packing_specs: {packed_sequence_size: 8}}", True),
        ("{seq_length: 4096, packed_sequence_specs: null}", False),
    ):
        read = read_container(f"{head}dataset: {dataset}\n", source="run_config.yaml").packing
        assert read == ("first_fit_shuffle" if rule else ""), dataset
    line = "model.tensor_model_parallel_size=2\ntrain.micro_batch_size=1\n"
    for text, rule in (
        (f"{line}dataset.packed_sequence_specs.packed_sequence_size=4096\n", True),
        (f"{line}dataset.enable_offline_packing=true\n", True),
        (f"{line}dataset.packed_sequence_specs=null\n", False),
    ):
        read = packing(text, format_name="megatron-bridge")
        assert read == ("first_fit_shuffle" if rule else ""), text


def test_attention_is_that_of_the_documents(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    law = LengthLaw(kind=LengthKind.LOGNORMAL, mean=500, cv=1.5)
    packed = spec.model_copy(update={"documents": documents_of_law(law)})
    whole, short, crossed = (
        predict(stated, read_launch(command))
        for stated, command in (
            (spec, TRL), (packed, TRL), (packed, f"{TRL} --packing_strategy wrapped")
        )
    )  # fmt: skip
    assert short.step_time_s < 0.8 * whole.step_time_s
    # Recomputation repeats the forward pass, a third of it all, but for the head.
    for estimate in (whole, short):
        used = estimate.utilisation
        assert used.hfu_ratio / used.mfu_ratio == pytest.approx(4 / 3, rel=0.03)
    assert crossed.step_time_s == pytest.approx(whole.step_time_s)
    assert any("documents and is" in note for note in short.notes)
    assert any("has no effect" in note for note in crossed.notes)
