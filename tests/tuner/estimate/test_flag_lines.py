from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tuner.engines.deepspeed import read as deepspeed
from tuner.engines.megatron_lm import read as megatron
from tuner.engines.reading.launch import StageContent, TokenDispatcher
from tuner.engines.reading.pipeline_layout import layout_text, pipeline_layout
from tuner.engines.torchtitan import read as torchtitan
from tuner.estimate.configuration import build_configuration, with_degrees
from tuner.estimate.division import balanced
from tuner.estimate.flag_lines import flag_lines
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"
MakeSpec = Callable[..., Spec]


def test_lines_state_what_changed_alone(spec_of: MakeSpec) -> None:
    launch = megatron.read((LAUNCHES / "mixtral.sh").read_text(), source="m")
    own, _ = build_configuration(launch, spec_of("mixtral-8x7b", nodes=8))

    assert flag_lines(launch, own, own) == ()
    launch = megatron.read((LAUNCHES / "deepseek-v3.sh").read_text(), source="m")
    own, _ = build_configuration(launch, spec_of("deepseek-v3", nodes=128))
    after = own.changed(
        recompute=Recompute.NONE,
        recompute_modules=(),
        a2a_overlap=True,
        dispatcher=TokenDispatcher.HYBRIDEP,
    )

    assert flag_lines(launch, own, after) == (
        "--overlap-moe-expert-parallel-comm",
        "--moe-flex-dispatcher-backend hybridep",
        "remove --recompute-granularity",
        "remove --recompute-modules",
        "remove --moe-enable-deepep",
    )
    text = "--micro-batch-size 1 --global-batch-size 64 --bf16 --recompute-activations"
    launch = megatron.read(text, source="args")
    own, _ = build_configuration(launch, spec_of("mixtral-8x7b", nodes=2))

    assert flag_lines(launch, own, own.changed(recompute_modules=("moe_act",))) == (
        "--recompute-granularity selective",
        "--recompute-modules moe_act",
        "remove --recompute-activations",
    )
    launch = megatron.read((LAUNCHES / "deepseek-v3.sh").read_text(), source="m")
    own, _ = build_configuration(launch, spec_of("deepseek-v3", nodes=128))
    after = with_degrees(own, virtual_pipeline=1)

    assert flag_lines(launch, own, after) == (
        '--pipeline-model-parallel-layout "Et*7|(t*8|)*4t*8|t*7|t*7mL"'.replace(
            "(t*8|)*4t*8|", "(tttttttt|)*5"
        ),
    )
    text = "--micro-batch-size 1 --global-batch-size 64 --bf16"
    launch = megatron.read(text, source="args")
    own, _ = build_configuration(launch, spec_of("mixtral-8x7b", nodes=2))

    assert flag_lines(launch, own, with_degrees(own, tensor=2)) == (
        "--tensor-model-parallel-size 2",
        "--sequence-parallel",
        "--expert-tensor-parallel-size 1",
    )


def test_toml_and_json_have_words_of_their_own(spec_of: MakeSpec) -> None:
    titan = torchtitan.read((LAUNCHES / "deepseek-16b.toml").read_text(), source="t")
    own, _ = build_configuration(titan, spec_of("deepseek-v2-lite", nodes=2))
    plain = own.model_copy(
        update={"recompute": Recompute.NONE, "recompute_ratio": 0.0, "micro_batch": 2}
    )
    assert flag_lines(titan, own, plain) == (
        'activation_checkpoint.mode = "none"',
        "parallelism.pipeline_parallel_microbatch_size = 2",
        "remove activation_checkpoint.selective_ac_option",
    )

    zero = deepspeed.read((LAUNCHES / "zero3.json").read_text(), source="d")
    own, _ = build_configuration(zero, spec_of("llama-3.1-8b", nodes=8))
    assert flag_lines(zero, own, own.changed(micro_batch=4, zero_stage=2)) == (
        '"train_micro_batch_size_per_gpu": 4',
        '"gradient_accumulation_steps": 2',
        '"zero_optimization": {"stage": 2}',
    )


@given(
    st.integers(min_value=1, max_value=130),
    st.integers(min_value=1, max_value=40),
    st.integers(min_value=0, max_value=2),
)
def test_layouts_are_read_back_as_they_were_written(layers: int, stages: int, mtp: int) -> None:
    placed = balanced(layers, stages, mtp_layers=mtp)
    assert pipeline_layout(layout_text(placed), said="x") == placed


@given(st.lists(st.integers(min_value=0, max_value=4), min_size=1, max_size=12))
def test_any_counts_survive_writing_and_reading(counts: list[int]) -> None:
    last = len(counts) - 1
    placed = tuple(
        StageContent(layers=count, embedding=index == 0, loss=index == last)
        for index, count in enumerate(counts)
    )

    assert pipeline_layout(layout_text(placed), said="x") == placed
