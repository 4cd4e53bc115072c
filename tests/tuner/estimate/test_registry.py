import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.expect import refused
from tests.rows import each_row
from tuner.engines.reading.launch import TrainingEngine
from tuner.errors import SpecError
from tuner.estimate.estimate import estimate
from tuner.estimate.registry import FORMATS, read_launch, read_text
from tuner.spec.spec import Spec

LAUNCHES = Path(__file__).parent / "launches"


@each_row(
    ("name", "engine"),
    [
        ("mixtral.sh", TrainingEngine.MEGATRON),
        ("llama.yaml", TrainingEngine.MEGATRON),
        ("llama3-70b.toml", TrainingEngine.TORCHTITAN),
        ("zero3.json", TrainingEngine.DEEPSPEED),
    ],
)
def test_files_are_read_by_their_ending(name: str, engine: TrainingEngine) -> None:
    launch = read_launch(str(LAUNCHES / name))

    assert launch.engine is engine
    assert launch.source.endswith(name)


def test_commands_and_named_formats_are_read_and_large_files_are_not(tmp_path: Path) -> None:
    launch = read_launch("torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2")

    assert (launch.source, launch.micro_batch) == ("the command", 2)
    path = tmp_path / "config.txt"
    path.write_text((LAUNCHES / "zero3.json").read_text())

    assert read_launch(str(path), format_name="deepspeed").engine is TrainingEngine.DEEPSPEED
    path = tmp_path / "run.sh"
    path.write_text("#" * 200_001)

    with pytest.raises(SpecError, match="larger than 200000 bytes"):
        read_launch(str(path))


@each_row(
    ("launch", "format_name", "part"),
    [
        ("", None, "--launch is empty"),
        ("no-such-file.sh", None, "cannot read the launch"),
        (
            "run.sh",
            "nemo",
            "--format 'nemo' is none of megatron, megatron-bridge, ms-swift, torchtitan, deepspeed",
        ),
        ("--a " + "x" * 300_000, None, "longer than 200000 characters"),
        ("run\0.sh --bf16", None, "null character"),
    ],
)
def test_refuses_what_is_no_launch(launch: str, format_name: str | None, part: str) -> None:
    with refused(SpecError, part):
        read_launch(launch, format_name=format_name)


@each_row("one", (one for _, one in FORMATS))
def test_every_format_has_a_reader_that_refuses_nonsense(tmp_path: Path, one: Any) -> None:
    path = tmp_path / f"launch{one.suffixes[0] if one.suffixes else '.txt'}"
    path.write_text("nothing: of use")
    with pytest.raises(SpecError):
        read_launch(str(path), format_name=one.name)


# Whatever numbers a launch holds: an estimate, or one line.

MakeSpec = Callable[..., Spec]
SIZES = st.sampled_from([1, 1, 1, 1, 2, 2, 4, 8, 3, 32, 4096, 2**31])
BUDGET = settings(
    deadline=None,
    max_examples=20,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def outcome(spec: Spec, format_name: str, text: str) -> str:
    """Return the refusal, or nothing where there is an estimate that makes sense."""
    try:
        result = estimate(spec, read_text(text, format_name=format_name, source="launch"))
    except SpecError as error:
        return str(error)
    assert math.isfinite(result.step_time_s)
    assert result.step_time_s > 0.0
    assert 0.0 < result.utilisation.mfu_ratio < 1.0
    assert all(0.0 <= share <= 1.0 for share in result.exposed.model_dump().values())
    assert result.decision.num_devices == result.devices
    assert sum(result.decision.pipeline_layout) == spec.model.num_layers
    return ""


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "tensor-model-parallel-size",
                "pipeline-model-parallel-size",
                "context-parallel-size",
                "expert-model-parallel-size",
                "expert-tensor-parallel-size",
                "num-layers-per-virtual-pipeline-stage",
                "num-virtual-stages-per-pipeline-rank",
                "decoder-first-pipeline-num-layers",
                "seq-length",
                "global-batch-size",
                "mtp-num-layers",
                "recompute-num-layers",
                "num-distributed-optimizer-instances",
                "mlp-chunks-for-training",
            ]
        ),
        SIZES,
        max_size=5,
    ),
    st.booleans(),
)
@BUDGET
def test_megatron(spec_of: MakeSpec, numbers: dict[str, int], is_moe: bool) -> None:
    spec = spec_of("deepseek-v3" if is_moe else "llama-3.1-8b", nodes=4)
    flags = " ".join(f"--{name} {value}" for name, value in numbers.items())
    text = f"--micro-batch-size 1 --bf16 --sequence-parallel {flags}"

    assert "\n" not in outcome(spec, "megatron", text)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "training.local_batch_size",
                "training.global_batch_size",
                "training.seq_len",
                "parallelism.data_parallel_shard_degree",
                "parallelism.data_parallel_replicate_degree",
                "parallelism.tensor_parallel_degree",
                "parallelism.context_parallel_degree",
                "parallelism.pipeline_parallel_degree",
                "parallelism.pipeline_parallel_layers_per_stage",
                "parallelism.pipeline_parallel_first_stage_less_layers",
                "parallelism.pipeline_parallel_microbatch_size",
                "parallelism.expert_parallel_degree",
                "parallelism.expert_tensor_parallel_degree",
            ]
        ),
        SIZES,
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"]),
)
@BUDGET
def test_torchtitan(spec_of: MakeSpec, numbers: dict[str, int], schedule: str) -> None:
    lines = [f"{name} = {value}" for name, value in numbers.items()]
    text = "\n".join([*lines, f'parallelism.pipeline_parallel_schedule = "{schedule}"'])

    assert "\n" not in outcome(spec_of("deepseek-v2-lite", nodes=4), "torchtitan", text)


@given(st.lists(SIZES, min_size=5, max_size=5), st.integers(min_value=0, max_value=3))
@BUDGET
def test_deepspeed(spec_of: MakeSpec, sizes: list[int], stage: int) -> None:
    batch, micro, tensor, sequence, expert = sizes
    text = (
        f'{{"train_batch_size": {batch}, "train_micro_batch_size_per_gpu": {micro}, '
        f'"zero_optimization": {{"stage": {stage}}}, "tensor_parallel": {{"autotp_size": {tensor}}}'
        f', "sequence_parallel_size": {sequence}, '
        f'"expert_parallel": {{"enabled": true, "autoep_size": {expert}}}}}'
    )

    assert "\n" not in outcome(spec_of("mixtral-8x7b", nodes=1), "deepspeed", text)
