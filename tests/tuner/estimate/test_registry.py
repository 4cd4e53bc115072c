from pathlib import Path

import pytest

from tests.rows import each_row
from tuner.engines.reading.launch import TrainingEngine
from tuner.errors import SpecError
from tuner.estimate.registry import FORMATS, read_launch

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


def test_a_command_can_be_pasted_instead_of_a_file() -> None:
    launch = read_launch("torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2")

    assert (launch.source, launch.micro_batch) == ("the command", 2)


def test_a_format_can_be_named_for_any_ending(tmp_path: Path) -> None:
    path = tmp_path / "config.txt"
    path.write_text((LAUNCHES / "zero3.json").read_text())

    assert read_launch(str(path), format_name="deepspeed").engine is TrainingEngine.DEEPSPEED


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
    with pytest.raises(SpecError) as caught:
        read_launch(launch, format_name=format_name)
    assert part in str(caught.value)


def test_a_large_file_is_not_a_launch(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("#" * 200_001)

    with pytest.raises(SpecError, match="larger than 200000 bytes"):
        read_launch(str(path))


def test_every_format_has_a_reader_that_refuses_nonsense(tmp_path: Path) -> None:
    for _, one in FORMATS:
        path = tmp_path / f"launch{one.suffixes[0] if one.suffixes else '.txt'}"
        path.write_text("nothing: of use")
        with pytest.raises(SpecError):
            read_launch(str(path), format_name=one.name)
