"""`moetune plan` over pools of unlike devices, as it is typed."""

from pathlib import Path

import pytest

from tests.expect import contains, present
from tests.printed import flat
from tuner.cli import app as frame
from tuner.goals.train_folder import read_plan

ROOT = Path(__file__).parents[3]


def planned(folder: Path, *, memory: str) -> int:
    path = folder / "spec.yaml"
    path.write_text(
        "schema_version: 1\n"
        f"model: {ROOT / 'examples' / 'models' / 'tiny-moe'}\n"
        "cluster:\n"
        "  pools:\n"
        "    - {name: new, device: h100-sxm, nodes: 2, devices_per_node: 2, "
        f"memory_per_device: {memory}, price_per_device_hour: 3}}\n"
        "    - {name: old, device: a100-80gb, nodes: 2, devices_per_node: 2, "
        f"memory_per_device: {memory}, price_per_device_hour: 1}}\n"
        "  links: [{between: [new, old], bandwidth: 400Gbit/s, latency: 20us}]\n"
        "goal:\n"
        "  kind: train\n"
        "  sequence_length: 1024\n"
        "  global_batch_size: 8\n"
        "  tokens: 1.0e9\n"
        "  reliability: {device_mtbf: 50000h, restart: 10min, spare_nodes: 1}\n"
        "search: {tensor_model_parallel_size: [1], micro_batch_size: [1]}\n"
        "emit: [megatron-lm, slurm]\n"
    )
    return frame.run(["plan", str(path), "-o", str(folder / "plan"), "--time-limit", "30s"])


def test_the_whole_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path, memory="80GiB") == 0
    shown = flat(capsys.readouterr().out)
    contains(shown, "whole run ", " failures expected, ", "% of the time trains checkpoints every ")
    assert present(present(read_plan(tmp_path / "plan").predicted).run).cost is not None


def test_nothing_that_fits_is_exit_code_1_with_ways_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(tmp_path, memory="1GiB") == 1
    contains(
        flat(capsys.readouterr().out),
        "Certificate: infeasible (",
        "limit not met memory_per_device: of 4 layers, pool 'new' has room",
        "limit change it would allow step memory_per_device ",
    )
    plan = read_plan(tmp_path / "plan")
    assert plan.decision is None
    assert all(one.decision is not None for one in plan.relaxations)
