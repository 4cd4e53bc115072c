"""`moetune estimate` as a user types it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli.estimate_text import estimate_text
from tuner.estimate.records import Estimate

ROOT = Path(__file__).parents[3]
LAUNCHES = ROOT / "tests" / "tuner" / "estimate" / "launches"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {ROOT / 'examples' / 'models' / 'mixtral-8x7b'}\n"
        "cluster:\n"
        "  pools: [{name: h100, device: h100-sxm, nodes: 8, devices_per_node: 8}]\n"
        "goal: {kind: train, sequence_length: 4096, global_batch_size: 256}\n"
        "emit: [megatron-lm]\n"
    )
    return path


def shown(capsys: Captured, spec: Path, launch: str | Path, *options: str, code: int = 0) -> str:
    return output(capsys, ["estimate", spec, "--launch", launch, *options], code=code)


def test_a_person_reads_time_utilisation_memory_and_what_to_change(
    spec: Path, capsys: Captured
) -> None:
    text = shown(capsys, spec, LAUNCHES / "mixtral.sh")
    for part in (
        "step time ",
        "MFU  ",
        "model FLOPs: 3 x forward",
        "Megatron's log ",
        "pipeline bubble",
        "exposed all-to-all",
        "Highest memory of a device",
        "fits  ",
        "smallest change that beats it: ",
        "\n  --",
        "ignored        --lr 1e-4, --normalization RMSNorm",
        "note           routing is assumed balanced",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) < 160
    assert "of a run of 7.00 d, assumed as goal.tokens is not stated" in " ".join(text.split())


def test_json_holds_a_record_whose_text_calls_no_tie_a_gain(spec: Path, capsys: Captured) -> None:
    spec.write_text(spec.read_text().replace("kind: train,", "kind: train, tokens: 1e12,"))
    result = Estimate.model_validate_json(shown(capsys, spec, LAUNCHES / "mixtral.sh", "--json"))
    assert result.devices == 64
    assert result.decision.pipeline_model_parallel_size == 4
    assert " of the run smallest change" in " ".join(estimate_text(result).split())
    for what, ties, begins in (
        (("PP 4",), False, "smallest change that beats it: PP 4"),
        (("PP 4",), True, "best single change (a tie): PP 4"),
        (("PP 4", "TP 2"), True, "best two changes (a tie): PP 4 and TP 2"),
    ):
        own = present(result.smallest_change).model_copy(update={"what": what, "within_band": ties})
        pair = own.model_copy(update={"what": ("PP 8", "TP 4")})
        lines = estimate_text(
            result.model_copy(update={"smallest_change": own, "best_pair": pair})
        ).splitlines()
        assert any(line.startswith(begins) for line in lines), begins
        more = "two changes may bring more (a tie): " if ties else "two changes bring more: "
        assert any(line.startswith(more) for line in lines), more
        assert any("a tie, measure both" in line for line in lines) == ties
        assert any("beats" in line for line in lines) != ties


def test_a_pasted_command_is_priced(spec: Path, capsys: Captured) -> None:
    command = (
        "torchrun --nnodes 8 --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 1 --bf16 "
        "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 "
        "--use-distributed-optimizer --moe-token-dispatcher-type alltoall --expert-tensor-"
        "parallel-size 1 --global-batch-size 256"
    )
    text = shown(capsys, spec, command)
    assert "the command: mixtral-8x7b with megatron on 64 x h100-sxm" in text


def test_what_does_not_fit_is_a_negative_result(spec: Path, capsys: Captured) -> None:
    launch = "--micro-batch-size 4 --global-batch-size 256 --bf16"
    assert "DOES NOT FIT" in shown(capsys, spec, launch, code=1)


@each_row(
    ("launch", "line"),
    [
        (
            "--micro-batch-size 1 --expert-model-parallel-size 16",
            "moetune: the command: --expert-model-parallel-size 16 exceeds the 8 experts of "
            "mixtral-8x7b; the most is 8",
        ),
        ("run.toml", "moetune: run.toml: cannot read the launch: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    spec: Path, capsys: Captured, launch: str, line: str
) -> None:
    assert refusal(capsys, ["estimate", spec, "--launch", launch]) == line


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom tuner.cli.app import run\nassert run(['estimate', '--help']) == 0\n"
        "assert not {'numpy', 'pandas', 'torch', 'ortools', 'pulp'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert "--launch" in done.stdout


def test_an_estimate_without_a_profile_imports_no_solver_and_no_tables(spec: Path) -> None:
    launch = "--micro-batch-size 1 --global-batch-size 256 --bf16"
    code = (
        "import sys\nfrom tuner.cli.app import run\n"
        f"run(['estimate', {str(spec)!r}, '--launch', {launch!r}])\n"
        "heavy = {'pandas', 'pyarrow', 'torch', 'ortools', 'pulp', 'optuna', 'tuner.plans.serve',"
        " 'tuner.plans.place', 'tuner.goals.plan', 'tuner.search.train.search'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)

    assert done.returncode == 0, done.stderr
