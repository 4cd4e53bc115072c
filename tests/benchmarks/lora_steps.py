"""LoRA on this processor: steps of the reference step, their memory and their seconds.

    python tests/benchmarks/lora_steps.py [FOLDER] [--rows]

examples/profiles/epyc-lora/ holds 20 runs of two dense models and two with experts on one and two
ranks, with adapters of rank 4 to 64, several targets, micro-batches and recomputation, and the
profiles of their operations on as many ranks. Others used the machine meanwhile, so that seconds
are judged on timed.jsonl, the same runs once more on an idle machine; those of two ranks took the
middle one of three rounds, with a profile measured right after them. Nothing is fitted to a row:
the factor on a run's seconds is the median ratio of the other models' runs on as many ranks.
Fit or not is in fits.jsonl and fits-seed-5.jsonl there, judged by tests/benchmarks/fit_or_not.py.
Exit code 1: a bound of `BOUNDS` is missed.

loop.csv holds nine runs of examples/finetuning/finetune.py with Transformers and PEFT on one rank
and, sharded by FSDP2, nine on two, predicted by the analytic model on the curves of a profile of
what it looks up, and for the rest on the rates that were reached (tuner/devices/measured.py). Their
bytes are those saved when the loss has been computed: the peak without the loss's gradients.
Those of two ranks are of the loop that keeps freed memory, with the profile measured right after
them; those of one rank are older.

Peaks are those of a whole step, counted by the kernel as under a limit
(profilers/steps/limit.py).
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from profilers.interpolation import fit_rows
from profilers.records import Record
from profilers.steps.config import StepConfig, StepReport
from profilers.store import read_profile
from tests.benchmarks.bars import errors_line, parse, say
from tests.benchmarks.fit_or_not import workload_and_decision
from tests.benchmarks.lora_trials import memory_of, model_of, read_runs, seconds_of
from tests.benchmarks.lora_trials import name_of as name_of_loop
from tests.expect import present
from tuner.config.shapes import number
from tuner.costs.residuals import residual_for
from tuner.devices.measured import measured_sheet
from tuner.plans.train import TrainPrediction
from tuner.prices.profile import ProfilePrices
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine
from tuner.search.reference.predict import predict

FOLDER: Final = Path(__file__).parents[2] / "examples/profiles/epyc-lora"
RUNS: Final = "runs.jsonl"
TIMED_RUNS: Final = "timed.jsonl"
LOOP_RUNS: Final = "loop.csv"
LOOP_PROFILES: Final = {1: "profile-loop", 2: "profile-loop-2"}
"""By the number of ranks."""
BOUNDS: Final = {"seconds": 0.12, "activations": 0.05, "peak": 0.05, "static": 0.02}
"""Of the median error, and of the largest where it is memory."""


class Run(Record):
    """One run of the reference step."""

    model: str
    config: StepConfig
    report: StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Predicted over measured, less one; of seconds before any factor."""

    name: str
    model: str
    ranks: int
    seconds: float
    activations: float
    peak: float


def name_of(config: StepConfig) -> str:
    """Name a run by its settings."""
    own, degrees, stage = present(config.adapters), config.parallelism, config.stages[0]
    parts = [f"r{own.rank} {'+'.join(own.targets)}", f"b{config.micro_batch_size}"]
    parts += [f"dp{degrees.data} ep{degrees.expert} zero{degrees.zero_stage}"]
    parts += [f"{stage.recompute.value}/{stage.chunks}"] if stage.recompute != "none" else []
    return " ".join(parts)


def runs(folder: Path, name: str = RUNS) -> list[Run]:
    """Read stored runs."""
    file = folder / name
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [Run.model_validate_json(line) for line in lines]


@cache
def predictor(folder: Path) -> "Predictor":
    """Read both profiles."""
    prices = {
        world: ProfilePrices.from_profile(read_profile(folder / f"profile-{world}"))
        for world in (1, 2)
    }
    return Predictor(prices=prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """What the planner predicts of a run, without any residual."""

    prices: Mapping[int, ProfilePrices]

    def of(self, config: StepConfig) -> TrainPrediction:
        """Predict a run on a machine of as many ranks."""
        work, degrees, decision = workload_and_decision(config)
        machine = PricedMachine(
            num_devices=degrees.world,
            memory_limit_bytes=2**62,
            prices=self.prices[degrees.world],
            residual=residual_for("reference", device="", device_kind="cpu"),
        )
        return predict(CandidateCosts(work=work, degrees=degrees, machine=machine), decision)


def judge(run: Run, predicted: TrainPrediction) -> Judged:
    """Compare one run."""
    memory = run.report.memory
    peak = max(one.allocator_peak or 0 for one in memory)
    activations = max(one.activations for one in memory)
    return Judged(
        name=name_of(run.config),
        model=run.model,
        ranks=run.config.parallelism.world,
        seconds=predicted.step_time_s / float(np.median(run.report.step_s)) - 1.0,
        activations=max(predicted.activation_bytes) / activations - 1.0,
        peak=max(predicted.peak_memory_bytes) / peak - 1.0,
    )


def loop_runs(folder: Path) -> list[Judged]:
    """Compare the runs of the fine-tuning loop."""
    profiles = {world: read_profile(folder / name) for world, name in LOOP_PROFILES.items()}
    devices = {world: measured_sheet(profile) for world, profile in profiles.items()}
    curves = {world: fit_rows(profile.measurements) for world, profile in profiles.items()}
    judged = []
    for row in read_runs(folder / LOOP_RUNS):
        world = int(row["ranks"])
        predicted_s = seconds_of(row, devices[world], curves=curves[world])
        memory, model = memory_of(row), model_of(row["model"])
        gradients = 2.0 * 4.0 * model.vocab_size * int(row["batch"]) * int(row["sequence"])
        static = number(memory.weights_PC) + number(memory.optimizer_PC)
        saved = number(memory.activations_PC) - gradients
        judged.append(
            Judged(
                name=name_of_loop(row),
                model=row["model"],
                ranks=world,
                seconds=predicted_s / float(row["step_s"]) - 1.0,
                activations=saved / float(row["saved_bytes"]) - 1.0,
                peak=static / float(row["static_bytes"]) - 1.0,
            )
        )
    return judged


def held_out(judged: Sequence[Judged]) -> list[float]:
    """Return the errors of seconds after the factor of the other models on as many ranks."""
    errors = []
    for one in judged:
        others = [
            other.seconds + 1.0
            for other in judged
            if other.model != one.model and other.ranks == one.ranks
        ]
        errors.append((one.seconds + 1.0) / float(np.median(others)) - 1.0)
    return errors


def lines(found: Mapping[str, Sequence[float]]) -> tuple[list[str], bool]:
    """Return the table of some errors, and whether a bound is missed."""
    table, missed = [], False
    for what, signed in found.items():
        errors, bound = np.abs(signed), BOUNDS[what.split(",")[0]]
        judged = np.median(errors) if what.startswith("seconds") else np.max(errors)
        missed = missed or bool(judged > bound)
        table.append(errors_line(what, signed, bound))
    return table, missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return whether a bound is missed."""
    options = parse(__doc__, {"folder": (Path, FOLDER), "--rows": False}, arguments)
    known = predictor(options.folder)
    judged, timed = (
        [judge(run, known.of(run.config)) for run in runs(options.folder, name)]
        for name in (RUNS, TIMED_RUNS)
    )
    loop = loop_runs(options.folder)
    seconds = {
        f"seconds, {what}, {ranks} rank{'s' * (ranks > 1)}": held_out(
            [one for one in some if one.ranks == ranks]
        )
        for what, some in (("reference step", timed), ("fine-tuning loop", loop))
        for ranks in (1, 2)
    }
    table, missed = lines(
        {
            **seconds,
            "activations, reference step": [one.activations for one in judged],
            "peak, reference step": [one.peak for one in judged],
            "activations, fine-tuning loop": [one.activations for one in loop],
            "static, fine-tuning loop": [one.peak for one in loop],
        }
    )
    of_rows = [
        f"{one.model:13} {one.name:78} {error:+7.1%} {one.activations:+7.2%} {one.peak:+7.1%}"
        for some in (judged, timed, loop)
        for one, error in zip(some, held_out(some), strict=True)
    ]
    say(*(of_rows if options.rows else []), *table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
