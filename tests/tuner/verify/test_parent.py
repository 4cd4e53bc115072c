"""A rank whose verification was killed ends by itself, soon."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.expect import present
from tuner.config.train import TrainDecision
from tuner.engines.reference.step_config import step_config
from tuner.goals.train_folder import read_plan


# Seconds, of importing torch: only a rank of the engine itself looks for its parent.
@pytest.mark.slow
def test_a_rank_ends_soon_after_the_process_that_wanted_its_report(
    planned: Path, tmp_path: Path
) -> None:
    plan = read_plan(planned)
    alone = TrainDecision.model_validate(
        present(plan.decision).model_dump()
        | {"data_parallel_size": 1, "expert_model_parallel_size": 1, "expert_data_parallel_size": 1}
    )
    config = step_config(plan, alone, steps=1_000_000, warmup_steps=0)
    file = tmp_path / "step.json"
    file.write_text(config.model_dump_json())
    wanting = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    options = (f"--report={tmp_path / 'report.json'}", "--deadline=60", f"--parent={wanting.pid}")
    rank = subprocess.Popen(
        [sys.executable, "-P", "-m", "profilers.steps", str(file), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wanting.kill()
        wanting.communicate()
        # Its deadline would end it with SIGALRM, after a minute.
        _, said = rank.communicate(timeout=45.0)
    finally:
        for process in (wanting, rank):
            process.kill()
            process.wait()
    assert (rank.returncode, said) == (1, "")
    assert not (tmp_path / "report.json").exists()
