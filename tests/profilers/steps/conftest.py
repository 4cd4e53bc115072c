"""Configurations of a tiny model, and one job per number of ranks that runs them all."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from profilers.local_ranks import LOOPBACK_ONLY
from profilers.steps.__main__ import main as run_rank
from tests.patience import patient_s
from tests.profilers.steps.testing import main

Fields = dict[str, Any]
Observed = dict[str, dict[str, Any]]


def tiny(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    virtual: int = 1,
    data: int = 1,
    expert: int = 1,
    zero: int = 1,
    nodes_of: int | None = None,
    stage: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Fields:
    """One dense and three MoE layers; any top-level field can be changed.

    With `nodes_of` ranks on a node, dispatch is hierarchical.
    """
    chunks = pipeline * virtual
    fields: Fields = {
        "model": {
            "hidden_size": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 256,
            "layers": ["dense", "moe", "moe", "moe"],
            "dense_ffn_size": 48,
            "num_experts": 8,
            "top_k": 2,
            "moe_ffn_size": 16,
            "shared_ffn_size": 16,
        },
        "parallelism": {
            "tensor": tensor,
            "pipeline": pipeline,
            "virtual_pipeline": virtual,
            "data": data,
            "expert": expert,
            "zero_stage": zero,
        },
        "stages": [{"num_layers": 4 // chunks, **(stage or {})} for _ in range(chunks)],
        "sequence_length": 32,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "precision": "fp32",
        "steps": 3,
        "warmup_steps": 1,
        "device": "cpu",
    }
    if nodes_of:
        fields["parallelism"] |= {"dispatcher": "hierarchical", "ranks_per_node": nodes_of}
    return fields | changed


def launch(*arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    """Start a module on some ranks; plain Python for one, which needs no launcher."""
    starter = ["-m"]
    if ranks > 1:
        starter += ["profilers.local_ranks", "--ranks", str(ranks)]
    return subprocess.run(
        [sys.executable, *starter, *arguments],
        capture_output=True,
        text=True,
        timeout=patient_s(200),
        check=False,
        env=_environment(),
    )


def observe_all(
    directory: Path, cases: Mapping[int, Mapping[str, Fields]], *, metered: Collection[str] = ()
) -> Observed:
    """Run the cases of each number of ranks in one job; a rank alone runs them in this process."""
    named = directory / "metered.json"
    named.write_text(json.dumps(sorted(metered)), encoding="utf-8")
    for ranks, fields in cases.items():
        (directory / f"cases{ranks}.json").write_text(json.dumps(dict(fields)), encoding="utf-8")
    if 1 in cases:
        main(directory / "cases1.json", directory / "results1.pt", named)
    several = [str(ranks) for ranks in cases if ranks > 1]
    if several:
        starter = (str(named), str(directory), *several)
        done = launch("tests.profilers.steps.testing", *starter, ranks=1)
        assert done.returncode == 0, done.stderr[-4000:]
    observed: Observed = {}
    for ranks in cases:
        observed |= torch.load(directory / f"results{ranks}.pt", weights_only=True)
    return observed


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Fields]:
    return tiny


@pytest.fixture(scope="session")
def start_ranks() -> Callable[..., subprocess.CompletedProcess[str]]:
    return launch


@pytest.fixture(scope="session")
def observe_cases() -> Callable[..., Observed]:
    return observe_all


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


@pytest.fixture
def refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Run what must be refused in this process: refused(fields, *options) -> its one line."""
    for name, card in LOOPBACK_ONLY.items():
        monkeypatch.setenv(name, card)

    def line(fields: Fields, *options: str) -> str:
        config = tmp_path / "step.json"
        config.write_text(json.dumps(fields), encoding="utf-8")
        assert run_rank([str(config), "--report", str(tmp_path / "report.json"), *options]) == 2
        if dist.is_initialized():
            dist.destroy_process_group()
        (said,) = capsys.readouterr().err.splitlines()
        return said

    return line
