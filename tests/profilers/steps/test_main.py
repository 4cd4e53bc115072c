"""The program as it is started: its report, and what it says when it cannot run."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.config import StepReport
from tests.rows import each_row

Fields = dict[str, Any]
Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_config(tmp_path: Path, start_ranks: Start) -> Start:
    def started(fields: Fields, *options: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        config = tmp_path / "step.json"
        config.write_text(json.dumps(fields), encoding="utf-8")
        report = str(tmp_path / "report.json")
        return start_ranks(
            "profilers.steps", str(config), "--report", report, *options, ranks=ranks
        )

    return started


@pytest.fixture(scope="module")
def several_steps(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Callable[..., Fields],
    start_ranks: Start,
) -> Path:
    """The folder of a run that tells its progress."""
    folder = tmp_path_factory.mktemp("steps")
    fields = tiny_config(steps=8, precision="bf16", learning_rate=1e-2)
    (folder / "step.json").write_text(json.dumps(fields), encoding="utf-8")
    files = (f"--report={folder / 'report.json'}", f"--progress={folder / 'progress.jsonl'}")
    done = start_ranks("profilers.steps", str(folder / "step.json"), *files, ranks=1)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def report_of(folder: Path) -> StepReport:
    return StepReport.model_validate_json((folder / "report.json").read_text("utf-8"))


def test_the_report_holds_every_timed_step_and_the_loss_falls(several_steps: Path) -> None:
    report = report_of(several_steps)
    assert len(report.step_s) == len(report.losses) == len(report.loads) == 8
    assert report.losses[-1] < 0.8 * report.losses[0]
    (memory,) = report.memory
    # Two moments of four bytes per parameter of four bytes.
    assert memory.optimizer == 2 * memory.parameters
    assert memory.gradients >= memory.parameters
    files = ["progress.jsonl", "report.json", "step.json"]
    assert [path.name for path in sorted(several_steps.iterdir())] == files


@pytest.mark.slow
def test_sharding_divides_what_a_rank_owns(
    tmp_path: Path, tiny_config: Callable[..., Fields], run_config: Start
) -> None:
    done = run_config(tiny_config(data=2, zero=3, steps=2), ranks=2)
    assert done.returncode == 0, done.stderr
    report = report_of(tmp_path)
    model = 2 * 256 * 32 + 32  # embedding, head, last norm
    model += 4 * (2 * 32 + 8 * 8 * 32 + 32 * 32)  # norms, qkv, output
    model += 3 * 48 * 32 + 3 * (8 * 32 + 8 * 3 * 16 * 32 + 3 * 16 * 32)  # dense; router, experts
    assert [memory.parameters for memory in report.memory] == [model * 4 // 2] * 2


@each_row(
    ("changed", "said"),
    [
        ({"sequence_length": 0}, "sequence_length: Input should be greater than or equal to 1"),
        ({"sequence_lenght": 8}, "sequence_lenght: Extra inputs are not permitted"),
        ({"global_batch_size": 7}, "global_batch_size 7"),
    ],
)
def test_a_malformed_configuration_is_one_line(
    tiny_config: Callable[..., Fields], refused: Callable[..., str], changed: Fields, said: str
) -> None:
    assert said in refused(tiny_config(**changed))


def test_what_cannot_run_is_one_line(
    tiny_config: Callable[..., Fields], refused: Callable[..., str], tmp_path: Path
) -> None:
    said = refused(tiny_config(data=2))
    assert "1 ranks were started, the configuration needs 2" in said
    fields = tiny_config(pipeline=2)
    fields["model"]["tie_embeddings"] = True
    assert "tie_embeddings needs pipeline 1" in refused(fields)
    said = refused(tiny_config(steps=1), "--progress", str(tmp_path / "absent" / "progress"))
    assert said.endswith("absent/progress: No such file or directory")


@pytest.mark.slow
def test_running_out_of_memory_has_an_exit_code_of_its_own(
    tiny_config: Callable[..., Fields], run_config: Start
) -> None:
    fields = tiny_config()
    # An attention projection of 2^50 bytes, which no machine of today has.
    fields["model"] |= {"hidden_size": 2**24, "num_heads": 2**18, "num_kv_heads": 2**18}
    done = run_config(fields)
    assert done.returncode == 77
    assert len(done.stderr.splitlines()) == 1
    assert "out of memory" in done.stderr


def test_a_run_past_its_deadline_is_killed(
    tmp_path: Path, tiny_config: Callable[..., Fields], run_config: Start
) -> None:
    assert run_config(tiny_config(steps=100_000), "--deadline", "1").returncode == -14
    assert not (tmp_path / "report.json").exists()


def test_steps_are_written_one_by_one_as_they_are_timed(several_steps: Path) -> None:
    lines = (several_steps / "progress.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step_s"] for line in lines] == list(report_of(several_steps).step_s)


@pytest.mark.slow
def test_a_step_that_needs_more_than_its_limit_runs_out_of_memory(
    tiny_config: Callable[..., Fields], run_config: Start
) -> None:
    # Blocks of 128 KiB, which are mapped one by one: smaller ones may find room that is left.
    done = run_config(tiny_config(steps=1, sequence_length=512), "--memory-limit", "64KiB")
    assert done.returncode == 77
    assert "is out of memory" in done.stderr
