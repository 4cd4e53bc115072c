"""LoRA on this processor: steps of the reference step, their memory and their seconds.

    python tests/benchmarks/lora_steps.py [FOLDER] [--measure] [--rows]

examples/profiles/epyc-lora/ holds 20 runs of two dense models and two with experts on one and two
ranks, with adapters of rank 4 to 64, several targets, micro-batches and recomputation, and the
profiles of their operations on as many ranks. Others used the machine meanwhile, so that seconds
are judged on timed.jsonl, the same runs once more on an idle machine; those of two ranks took the
middle one of three rounds, with a profile measured right after them. `--measure` runs the trials
that are missing and measures the profiles, which takes 20 minutes. Nothing is fitted to a row: the
factor on a run's seconds is the median ratio of the other models' runs on as many ranks.
Fit or not is in fits.jsonl and fits-seed-5.jsonl there, judged by tests/benchmarks/fit_or_not.py.
Exit code 1: a bound of `BOUNDS` is missed.

loop.csv holds nine runs of examples/finetuning/finetune.py with Transformers and PEFT on one rank
and, sharded by FSDP2, nine on two (tests/benchmarks/lora_loop.py), predicted by the analytic model
on the curves of a profile of what it looks up, and for the rest on the rates that were reached
(tuner/devices/measured.py). Their bytes are those saved when the loss has been computed: the peak
without the loss's gradients.
Those of two ranks are of the loop that keeps freed memory, with the profile measured right after
them; those of one rank are older.

Peaks are those of a whole step, counted by the kernel as under a limit
(profilers/steps/limit.py).
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

os.environ.setdefault("OMP_NUM_THREADS", "1")

from profilers.interpolation import fit_rows
from profilers.records import Case, Record
from profilers.session import measure_profile
from profilers.steps.config import StepConfig, StepReport
from profilers.store import read_profile
from tests.benchmarks.fit_or_not import run_job, workload_and_decision
from tests.benchmarks.lora_trials import memory_of, model_of, read_runs, seconds_of
from tests.benchmarks.lora_trials import name_of as name_of_loop
from tuner.costs.lookups import Lookups
from tuner.costs.ops import Op
from tuner.costs.prices.profile import ProfilePrices
from tuner.costs.reference.operations import embedding_ops, head_ops, layer_ops
from tuner.costs.reference.update import embedding_units, head_units, layer_units, update_ops
from tuner.costs.residuals import residual_for
from tuner.costs.train.shapes import number
from tuner.devices.measured import measured_sheet
from tuner.plans.train import TrainPrediction
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
PROFILE_S: Final = 150.0
MOST_BYTES: Final = 2**40
"""A limit that is never reached, so that peaks are counted."""

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
NETWORK: Final = ("gate_proj", "up_proj", "down_proj")

Fields = Mapping[str, Any]

MODELS: Final[Mapping[str, Fields]] = {
    "dense-256": {
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 4096,
        "layers": ["dense"] * 4,
        "dense_ffn_size": 1024,
    },
    "dense-512": {
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "vocab_size": 2048,
        "layers": ["dense"] * 3,
        "dense_ffn_size": 1536,
    },
    "moe-256": {
        "hidden_size": 256,
        "num_heads": 4,
        "num_kv_heads": 4,
        "vocab_size": 4096,
        "layers": ["moe"] * 4,
        "num_experts": 8,
        "top_k": 2,
        "moe_ffn_size": 512,
    },
    "moe-384": {
        "hidden_size": 384,
        "num_heads": 6,
        "num_kv_heads": 2,
        "vocab_size": 2048,
        "layers": ["dense", "moe", "moe"],
        "dense_ffn_size": 1024,
        "num_experts": 16,
        "top_k": 2,
        "moe_ffn_size": 256,
        "shared_ffn_size": 256,
    },
}

SELECTIVE: Final = {"recompute": "selective", "chunks": 2}
RECOMPUTED: Final = {"recompute": "full", "chunks": 1}
TRIALS: Final[Sequence[tuple[str, int, Sequence[str], int, Fields, Fields]]] = (
    # Model, rank, targets, sequences of a micro-batch, stage, degrees.
    ("dense-256", 4, ATTENTION, 1, {}, {}),
    ("dense-256", 16, (*ATTENTION, *NETWORK), 2, {}, {}),
    ("dense-256", 64, (*ATTENTION, *NETWORK), 2, RECOMPUTED, {}),
    ("dense-256", 16, ("q_proj", "v_proj"), 2, {}, {"data": 2}),
    ("dense-256", 32, NETWORK, 1, {}, {"data": 2, "zero_stage": 3}),
    ("dense-512", 8, ATTENTION, 1, {}, {}),
    ("dense-512", 32, NETWORK, 2, {}, {}),
    ("dense-512", 64, (*ATTENTION, *NETWORK), 1, RECOMPUTED, {}),
    ("dense-512", 16, (*ATTENTION, *NETWORK), 1, {}, {"data": 2, "zero_stage": 1}),
    ("dense-512", 4, ("o_proj",), 2, {}, {"data": 2}),
    ("moe-256", 4, ATTENTION, 1, {}, {}),
    ("moe-256", 16, (*ATTENTION, "experts"), 2, {}, {}),
    ("moe-256", 64, ("experts",), 1, SELECTIVE, {}),
    ("moe-256", 8, (*ATTENTION, "experts"), 1, RECOMPUTED, {"data": 2, "expert": 2}),
    ("moe-256", 16, ("experts",), 2, {}, {"data": 2, "expert": 2, "zero_stage": 1}),
    ("moe-384", 8, ATTENTION, 2, {}, {}),
    ("moe-384", 32, (*ATTENTION, *NETWORK, "experts"), 1, {}, {}),
    ("moe-384", 16, (*NETWORK, "experts"), 2, SELECTIVE, {}),
    ("moe-384", 16, (*ATTENTION, "experts"), 2, {}, {"data": 2, "expert": 2}),
    ("moe-384", 64, ATTENTION, 1, RECOMPUTED, {"data": 2, "zero_stage": 3}),
)


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


def configs() -> Iterator[tuple[str, StepConfig]]:
    """Return the trials with the names of their models."""
    for model, rank, targets, batch, stage, degrees in TRIALS:
        shape = {"head_dim": 64, **MODELS[model]}
        fields = {
            "model": shape,
            "parallelism": dict(degrees),
            "stages": [{"num_layers": len(shape["layers"]), **stage}],
            "sequence_length": 512,
            "global_batch_size": 4,
            "micro_batch_size": batch,
            "precision": "bf16",
            "routing": {"mode": "forced", "balancing": "none"},
            "adapters": {"rank": rank, "alpha": 2.0 * rank, "targets": targets},
            "steps": 10,
            "warmup_steps": 2,
            "device": "cpu",
            "memory_limit_bytes": MOST_BYTES,
        }
        yield model, StepConfig.model_validate(fields)


def name_of(config: StepConfig) -> str:
    """Name a run by its settings."""
    own, degrees, stage = config.adapters, config.parallelism, config.stages[0]
    assert own is not None
    parts = [f"r{own.rank} {'+'.join(own.targets)}", f"b{config.micro_batch_size}"]
    parts += [f"dp{degrees.data} ep{degrees.expert} zero{degrees.zero_stage}"]
    parts += [f"{stage.recompute.value}/{stage.chunks}"] if stage.recompute != "none" else []
    return " ".join(parts)


def wanted(world: int) -> tuple[Case, ...]:
    """Return the operations of all trials on so many ranks."""
    cases: dict[str, Case] = {}
    for _, config in configs():
        if config.parallelism.world == world:
            cases |= {one.id: one for one in map(Op.case, _ops(config))}
    return tuple(cases.values())


def _ops(config: StepConfig) -> Iterator[Op]:
    work, degrees, decision = workload_and_decision(config)
    yield from embedding_ops(work, degrees)
    yield from head_ops(work, degrees)
    units = [*embedding_units(work, degrees), *head_units(work, degrees)]
    for layer in range(work.model.num_layers):
        yield from chain(*layer_ops(work, degrees, layer=layer, chunks=decision.chunks[0]))
        units += layer_units(work, degrees, layer=layer)
    yield from chain(*update_ops(tuple(units), work, degrees))


def measured(folder: Path) -> None:
    """Run the trials that are missing and measure the profiles."""
    # Before the profiles: one is measured in this process, whose memory its children inherit.
    done = {run.config for run in runs(folder)}
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        for number, (model, config) in enumerate(configs()):
            if config in done:
                continue
            report = run_job(Path(scratch) / str(number), config)
            line = Run(model=model, config=config, report=report).model_dump_json()
            with (folder / RUNS).open("a", encoding="utf-8") as out_file:
                out_file.write(line + "\n")
    for world in (1, 2):
        out = folder / f"profile-{world}"
        if not out.is_dir():
            measure_profile(
                out,
                suites=("kernels", "links")[:world],
                budget_s=PROFILE_S,
                ranks=world,
                device="cpu",
                dtypes=("bf16",),
                extra_cases=wanted(world),
            )
    for world, name in LOOP_PROFILES.items():
        if not (folder / name).is_dir():
            measure_profile(
                folder / name,
                suites=("kernels", "links")[:world],
                budget_s=PROFILE_S,
                ranks=world,
                device="cpu",
                dtypes=("bf16",),
                extra_cases=wanted_by_loop(folder, world=world),
            )


def wanted_by_loop(folder: Path, *, world: int) -> tuple[Case, ...]:
    """Return the operations of the fine-tuning loop's runs on so many ranks."""
    device, lookups = measured_sheet(read_profile(folder / f"profile-{world}")), Lookups()
    for row in read_runs(folder / LOOP_RUNS):
        if int(row["ranks"]) == world:
            seconds_of(row, device, lookups=lookups)
    return lookups.wanted().cases


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
        median, largest = float(np.median(errors)), float(np.max(errors))
        missed = missed or (median if what.startswith("seconds") else largest) > bound
        table.append(
            f"{what:36} {len(errors):3} runs  median {median:6.1%}  largest {largest:6.1%}"
            f"  (at most {bound:.0%})"
        )
    return table, missed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and return whether a bound is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--measure", action="store_true", help="what is missing")
    parser.add_argument("--rows", action="store_true", help="every run, too")
    options = parser.parse_args(arguments)
    if options.measure:
        measured(options.folder)
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
    sys.stdout.write("\n".join((of_rows if options.rows else []) + table) + "\n")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
