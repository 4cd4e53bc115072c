"""A profile of emulated nodes is planned on, and layouts run there in the order that it foretells.

Kept with `--basetemp`, the folder of the test holds the profile and `runs.json`, which
examples/profiles/emulated-2x2 was made of.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.config import StepConfig, StepReport
from profilers.store import read_profile
from tests.expect import present
from tests.tuner.search.testing import LayoutRuns, MeasuredLayouts, compare_predictions
from tuner.api import machine_of, plan, work_of
from tuner.config.train import TrainDecision
from tuner.config.train_words import short_decision
from tuner.engines.reference.step_config import step_config
from tuner.plans.train import Plan

EXAMPLE = Path(__file__).parents[3] / "examples/profiles/emulated-2x2"
GIGABIT_BYTES_PER_S = 1.25e8
DELAY_S = 1e-3
ROUNDS, STEPS = 2, 3
BUDGET = "110s"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def _profiled(cluster: Any, spec: Path, out: Path) -> Path:
    command = (sys.executable, "-P", "-m", "tuner", "profile", "-o", str(out), "--for", str(spec))
    for ended in cluster.run(
        (*command, "--suite", "kernels,links", "--budget", BUDGET), ranks_per_node=2
    ):
        assert ended.returncode == 0, ended.stderr[-2000:]
    return out


def _stepped(cluster: Any, config: StepConfig, folder: Path) -> StepReport:
    folder.mkdir()
    (folder / "step.json").write_text(config.model_dump_json(), encoding="utf-8")
    starter = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes 2 --nproc-per-node 2"
        " --node-rank $GROUP_RANK"
        ' --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
        ' --log-dir "$2" -m profilers.steps "$0" --report "$1"'
    )
    files = [str(folder / name) for name in ("step.json", "report.json", "logs")]
    command = ("sh", "-c", starter, *files)
    for ended in cluster.run(command):
        assert ended.returncode == 0, ended.stderr[-2000:]
    return StepReport.model_validate_json((folder / "report.json").read_text(encoding="utf-8"))


def _decisions() -> list[TrainDecision]:
    """The stored layouts: stages on nodes of their own; experts inside nodes; over nodes hop by hop
    and at once; tensor ranks inside nodes, experts there and over nodes.

    The alternatives of a plan on the new profile may lack some of them.
    """
    stored = (EXAMPLE / "runs.json").read_text(encoding="utf-8")
    return [one.decision for one in MeasuredLayouts.model_validate_json(stored).layouts]


def _taking_turns(cluster: Any, made: Plan, folder: Path) -> MeasuredLayouts:
    """The layouts in rounds."""
    decisions = _decisions()
    reports = [
        [
            _stepped(
                cluster,
                step_config(made, decision, steps=STEPS, warmup_steps=1),
                folder / f"{turn}-{index}",
            )
            for index, decision in enumerate(decisions)
        ]
        for turn in range(ROUNDS)
    ]
    runs = MeasuredLayouts(
        origin=reports[0][0].device,
        link_bytes_per_s=GIGABIT_BYTES_PER_S,
        link_delay_s=DELAY_S,
        layouts=tuple(
            LayoutRuns(
                decision=decision,
                step_s=tuple(round_[index].step_s for round_ in reports),
                inter_node_bytes=reports[0][index].inter_node_bytes[0],
            )
            for index, decision in enumerate(decisions)
        ),
    )
    (folder / "runs.json").write_text(runs.model_dump_json(indent=1), encoding="utf-8")
    return runs


def test_layouts_run_in_the_order_that_the_plan_predicts(
    emulated_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    cluster = emulated_cluster(nodes=2, rate="1gbit", delay_s=DELAY_S)
    spec = EXAMPLE / "spec.yaml"
    profile = _profiled(cluster, spec, tmp_path / "profile")
    made = plan(spec, profiles=[profile]).plan
    assert present(made.decision).expert_model_parallel_size > 1
    assert present(made.predicted).inter_node_bytes == 0.0
    runs = _taking_turns(cluster, made, tmp_path)
    found = compare_predictions(
        runs,
        work=work_of(made),
        machine=machine_of(made.cluster.pools[0], read_profile(profile)),
    )
    lines = [
        f"{short_decision(one.decision)}: {one.median_s:.3f} s,"
        f" predicted {said.step_time_s:.3f} s\n"
        for one, said in zip(runs.layouts, found.predicted, strict=True)
    ]
    sys.stdout.write("".join(lines))
    for one, said in zip(runs.layouts, found.predicted, strict=True):
        assert said.inter_node_bytes == pytest.approx(one.inter_node_bytes, rel=0.05)
    assert found.rank_correlation >= 0.9
    assert found.regret_ratio <= 0.05
