"""For tests: a launcher that starts nothing and answers from a machine that the plan does not know.

The hidden machine is the plan's own with other factors on computation and communication, and steps
that scatter. Its answers are what a perfect model of that machine would predict.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from profilers.steps.config import Dispatcher, RankMemory, StepConfig, StepReport
from tests.expect import present
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.goals.train_folder import read_plan
from tuner.search.reference.decisions import RecomputeOption, decision, degrees_of
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.records import TrialRecord, TrialStatus, Verified
from tuner.verify.search import StudySearch
from tuner.verify.space import TrainSpace
from tuner.verify.termination import TRIAL_MARK
from tuner.verify.verification import Watcher

Record = Callable[..., TrialRecord]
Verify = Callable[..., Verified]
DecisionSpace = Callable[..., TrainSpace]
Join = Callable[..., StudySearch]
Joined = Callable[..., AbstractContextManager[StudySearch]]
SILENT = Watcher(started=lambda _decision, _seconds: None, ended=lambda _record: None)
REPORT = StepReport(
    device="here",
    libraries={},
    step_s=(1.0,),
    losses=(),
    tokens_per_step=1,
    memory=(),
    loads=(),
    chunks_used=(),
)
"""Report of a single step."""
RELEASE = "0.fake"
DEVICE = "a hidden machine"


class FakeLauncher:
    """A `TrialLauncher` that remembers what it was asked to launch."""

    def __init__(
        self,
        work: Workload,
        hidden: PricedMachine,
        *,
        noise_ratio: float = 0.0,
        seed: int = 0,
        ends: Mapping[int, TrialStatus] | None = None,
        otherwise: TrialStatus = "ok",
        interrupt_at: int | None = None,
    ) -> None:
        """Describe the hidden truth.

        Args:
            work: what is trained.
            hidden: the machine that answers.
            noise_ratio: standard deviation of a step around its truth.
            seed: of the noise.
            ends: how launches end that do not end like the others, by their index from 0.
            otherwise: how the others end.
            interrupt_at: index of the launch during which Ctrl-C is pressed.
        """
        self.launched: list[TrainDecision] = []
        self.folders: list[Path] = []
        self._work = work
        self._hidden = hidden
        self._noise_ratio = noise_ratio
        self._rng = np.random.default_rng(seed)
        self._ends = dict(ends or {})
        self._otherwise = otherwise
        self._interrupt_at = interrupt_at

    def __call__(self, launch: Launch) -> LaunchResult:
        """Answer at once; no trial is ended early."""
        config, index = launch.step_config(), len(self.launched)
        self.launched.append(decision_of(config))
        self.folders.append(launch.folder)
        if index == self._interrupt_at:
            raise KeyboardInterrupt
        status: TrialStatus = self._ends.get(index, self._otherwise)
        if status == "ok":
            report = self._report(config)
            wall_s = sum(report.step_s)
            return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)
        wall_s = launch.deadline_s if status == "timeout" else 1.0
        return LaunchResult(status=status, reason=f"fake {status}", report=None, wall_s=wall_s)

    def true_s(self, launched: TrainDecision) -> float:
        """Return the step time of a decision without noise."""
        return self._truth(launched, self._work)[0]

    def _report(self, config: StepConfig) -> StepReport:
        launched = decision_of(config)
        step_s, activation_bytes = self._truth(launched, _work_of(config, self._work))
        scatter = self._rng.normal(scale=self._noise_ratio, size=config.steps)
        per_stage = launched.num_devices // launched.pipeline_model_parallel_size
        return StepReport(
            device=DEVICE,
            libraries={"torch": RELEASE},
            step_s=tuple(float(step_s * max(0.1, 1.0 + noise)) for noise in scatter),
            losses=(),
            tokens_per_step=config.global_batch_size * config.sequence_length,
            memory=tuple(
                RankMemory(
                    rank=rank,
                    parameters=0,
                    gradients=0,
                    optimizer=0,
                    activations=activation_bytes[rank // per_stage],
                )
                for rank in range(launched.num_devices)
            ),
            loads=(),
            chunks_used=(),
        )

    def _truth(self, launched: TrainDecision, work: Workload) -> tuple[float, tuple[int, ...]]:
        costs = CandidateCosts(
            work=work,
            degrees=degrees_of(launched, ranks_per_node=self._hidden.ranks_per_node),
            machine=self._hidden,
        )
        truth = predict(costs, launched)
        return truth.step_time_s, truth.activation_bytes


def _work_of(config: StepConfig, whole: Workload) -> Workload:
    """Return what a configuration trains: fewer layers and sequences where a job is smaller."""
    layers = config.model.layers
    model = whole.model.model_copy(
        update={"num_layers": len(layers), "layers": layers, "windowed": (False,) * len(layers)}
    )
    return replace(
        whole,
        model=model,
        global_batch_size=config.global_batch_size,
        load_ratio=config.routing.load_ratio,
    )


def decision_of(config: StepConfig) -> TrainDecision:
    """Read the decision back that a step configuration was made from."""
    degrees = config.parallelism
    return decision(
        StepDegrees(
            tensor=degrees.tensor,
            pipeline=degrees.pipeline,
            virtual_pipeline=degrees.virtual_pipeline,
            data=degrees.data,
            expert=degrees.expert,
            micro_batch_size=config.micro_batch_size,
            zero_stage=degrees.zero_stage,
            ranks_per_node=(
                degrees.ranks_per_node if degrees.dispatcher is Dispatcher.HIERARCHICAL else None
            ),
        ),
        layers=tuple(stage.num_layers for stage in config.stages),
        options=[
            RecomputeOption(recompute=stage.recompute, chunks=stage.chunks)
            for stage in config.stages
        ],
    )


Launcher = Callable[..., FakeLauncher]


def launch_of(planned: Path, folder: Path) -> Launch:
    """Three steps of a plan's own choice."""
    plan = read_plan(planned)
    return Launch(
        plan=plan,
        decision=present(plan.decision),
        predicted=present(plan.predicted),
        steps=3,
        warmup_steps=2,
        folder=folder,
        deadline_s=60.0,
    )


def marked(where: Path | str) -> list[int]:
    """Find the processes that carry the mark of a trial in a place."""
    place, found = str(where.resolve()) if isinstance(where, Path) else where, []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if place in process.environ().get(TRIAL_MARK, ""):
                found.append(process.pid)
    return found
