"""What a launch's own environment forbids is not recommended without saying what must change.

The rules are those of `validate_args` in core_v0.16.1 to core_v0.19.0 of NVIDIA/Megatron-LM.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.estimate.configuration import build_configuration
from tuner.estimate.environment import lines_to_set
from tuner.estimate.estimate import estimate, pricing_setup, shipped_residuals
from tuner.estimate.knobs import knob_changes
from tuner.estimate.records import Estimate, TrainingChange
from tuner.estimate.registry import read_launch
from tuner.spec.spec import Spec

LAUNCH = """\
#!/bin/bash
{environment}
torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size {tensor} \\
  {more} --expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 256 \\
  --seq-length 4096 --bf16 --use-distributed-optimizer --moe-token-dispatcher-type alltoall \\
  --expert-tensor-parallel-size 1 --hidden-dropout 0 --attention-dropout 0 --overlap-grad-reduce
"""


def _found(
    folder: Path,
    spec_of: Callable[..., Spec],
    environment: str,
    *,
    tensor: int = 1,
    more: str = "",
    device: str = "h100-sxm",
) -> Estimate:
    path = folder / "launch.sh"
    sharing = "--sequence-parallel" if tensor > 1 else ""
    path.write_text(LAUNCH.format(environment=environment, tensor=tensor, more=f"{sharing} {more}"))
    spec = spec_of("qwen3-30b-a3b", nodes=4, device=device)
    return estimate(spec, read_launch(str(path)), residuals=shipped_residuals())


def _overlaps(result: Estimate) -> list[TrainingChange]:
    every = [*result.changes, result.smallest_change, result.best_pair]
    return [one for one in every if one is not None and "overlap the all-to-all" in one.what]


def test_an_overlap_that_one_queue_hinders_says_what_must_change(
    tmp_path: Path, spec_of: Callable[..., Spec]
) -> None:
    # Hopper with TP 2 in one hardware queue, as Megatron-LM asserts: the overlap wants 32.
    result = _overlaps(_found(tmp_path, spec_of, "export CUDA_DEVICE_MAX_CONNECTIONS=1", tensor=2))
    assert result, "the overlap is not offered, so this test says nothing"
    for change in result:
        (line,) = change.environment
        assert line.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=32  # ")
        assert "tensor and context parallelism, which want 1, then overlap less" in line


@each_row("export", ("export CUDA_DEVICE_MAX_CONNECTIONS=1", "CUDA_DEVICE_MAX_CONNECTIONS=1 \\"))
def test_without_tensor_parallelism_nothing_is_lost_by_more_queues(
    tmp_path: Path, spec_of: Callable[..., Spec], export: str
) -> None:
    result = _overlaps(_found(tmp_path, spec_of, export))
    assert result
    for change in result:
        (line,) = change.environment
        assert line.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=32")
        assert "overlap less" not in line


@each_row("environment", ("", "export CUDA_DEVICE_MAX_CONNECTIONS=${CONNECTIONS:-32}"))
def test_an_environment_that_has_the_value_needs_no_change(
    tmp_path: Path, spec_of: Callable[..., Spec], environment: str
) -> None:
    result = _overlaps(_found(tmp_path, spec_of, environment))
    assert result
    assert {change.environment for change in result} == {()}


@each_row(
    ("device", "environment", "arguments"),
    (
        ("h100-sxm", "", True),
        ("h100-sxm", "export CUDA_DEVICE_MAX_CONNECTIONS=8", True),
        ("h100-sxm", "export CUDA_DEVICE_MAX_CONNECTIONS=1", False),
        ("a100-80gb-sxm", "export CUDA_DEVICE_MAX_CONNECTIONS=8", True),
        ("b200-sxm", "export CUDA_DEVICE_MAX_CONNECTIONS=8", False),
        ("rtx-pro-6000-server", "export CUDA_DEVICE_MAX_CONNECTIONS=8", False),
    ),
)
def test_tensor_parallelism_before_blackwell_needs_one_queue(
    *, tmp_path: Path, spec_of: Callable[..., Spec], device: str, environment: str, arguments: bool
) -> None:
    path = tmp_path / "launch.sh"
    path.write_text(LAUNCH.format(environment=environment, tensor=1, more=""))
    spec = spec_of("qwen3-30b-a3b", nodes=4, device=device)
    launch = read_launch(str(path))
    own, _ = build_configuration(launch, spec)
    setup = pricing_setup(spec, None, measured=None)
    turned = {
        knob_change.words: knob_change.apply(own)
        for knob_change in knob_changes(own, spec.model, setup.sheet.generation)
    }
    after = turned["tensor parallelism 2 instead of 1"]
    lines = lines_to_set(own, after, launch.environment, setup.sheet.generation)
    expected = ["export CUDA_DEVICE_MAX_CONNECTIONS=1"] if arguments else []
    assert [line.partition("  #")[0] for line in lines] == expected, (device, environment)


def test_graphs_with_expandable_segments_ask_for_unregistered_buffers(
    tmp_path: Path, spec_of: Callable[..., Spec]
) -> None:
    segments = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    unregistered = f"{segments}\nexport NCCL_GRAPH_REGISTER=0"
    graphs = "--cuda-graph-impl transformer_engine"
    _found(tmp_path, spec_of, unregistered, more=graphs)
    _found(tmp_path, spec_of, "", more=graphs)
    with pytest.raises(SpecError, match="NCCL_GRAPH_REGISTER is not set: CUDA graphs with"):
        _found(tmp_path, spec_of, segments, more=graphs)


def test_a_launch_that_its_engine_stops_at_is_refused_and_an_overlap_noted(
    tmp_path: Path, spec_of: Callable[..., Spec]
) -> None:
    with refused(
        SpecError,
        "Megatron-LM stops at CUDA_DEVICE_MAX_CONNECTIONS=8",
        "set CUDA_DEVICE_MAX_CONNECTIONS=1",
    ):
        _found(tmp_path, spec_of, "export CUDA_DEVICE_MAX_CONNECTIONS=8", tensor=2)
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    with pytest.raises(SpecError, match="Megatron-FSDP needs more than one hardware queue"):
        _found(tmp_path, spec_of, "export CUDA_DEVICE_MAX_CONNECTIONS=1", more=sharded)
    overlap = "--overlap-moe-expert-parallel-comm"
    result = _found(tmp_path, spec_of, "export CUDA_DEVICE_MAX_CONNECTIONS=1", more=overlap)
    assert any(note.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1, but") for note in result.notes)
    assert not any(
        "CUDA_DEVICE" in note for note in _found(tmp_path, spec_of, "", more=overlap).notes
    )
