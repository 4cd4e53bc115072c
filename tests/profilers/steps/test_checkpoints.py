"""Runs go on from their checkpoints as if nothing had happened, whatever happens."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.profilers.steps.checkpoint_jobs import Job, Jobs, Kill

Fields = dict[str, Any]
Event = dict[str, Any]

NEVER = 10**6


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """A process that runs jobs one after the other."""
    command = [sys.executable, "-P", "-m", "tests.profilers.steps.checkpoint_jobs"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Jobs(process)
        assert process.stdin is not None
        process.stdin.close()


@dataclass(kw_only=True)
class Run:
    """A run of several launches in a folder."""

    jobs: Jobs
    folder: Path
    launches: int = 0
    events: list[list[Event]] = field(default_factory=list)
    """Of the last launch, by rank."""

    def launch(
        self,
        fields: Fields,
        *,
        total: int,
        shared: int = NEVER,
        host: int | None = None,
        per_node: int | None = None,
        replicas: int = 0,
        kept: int = 2,
        asynchronous: bool = False,
        kill: Kill | None = None,
        largest_file_bytes: int | None = None,
    ) -> list[int]:
        """Run one launch to its end, and return the exit codes of its ranks."""
        checkpoints: Fields = {
            "total_steps": total,
            "shared": {"folder": str(self.shared), "interval_steps": shared},
            "kept": kept,
            "asynchronous": asynchronous,
        }
        if host is not None:
            checkpoints["host"] = {
                "folder": str(self.folder / "host" / "{node}"),
                "interval_steps": host,
                "replicas": replicas,
            }
        fields = fields | {"checkpoints": checkpoints}
        if per_node is not None:
            fields["parallelism"] = fields["parallelism"] | {"ranks_per_node": per_node}
        self.launches += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "step.json"
        config.write_text(json.dumps(fields), encoding="utf-8")
        events = self.folder / f"events{self.launches}.jsonl"
        codes = self.jobs.run(
            Job(
                config=str(config),
                events=str(events),
                log=str(self.log),
                kill=kill,
                largest_file_bytes=largest_file_bytes,
            )
        )
        self.events = [_events(events, rank) for rank in range(len(codes))]
        return codes

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def node(self, node: int) -> Path:
        return self.folder / "host" / str(node)

    def losses(self) -> dict[int, float]:
        """Of the steps of the last launch."""
        return {one["step"]: one["loss"] for one in self.of_kind("step_done")}

    def of_kind(self, kind: str, *, rank: int = 0) -> list[Event]:
        return [one for one in self.events[rank] if one["event"] == kind]

    def restored(self, rank: int = 0) -> tuple[str, int]:
        (one,) = self.of_kind("restored", rank=rank)
        return one["level"], one["step"]


def _events(file: Path, rank: int) -> list[Event]:
    own = file.with_name(f"{file.stem}-{rank}.jsonl")
    if not own.exists():
        return []
    lines = own.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def new_run(jobs: Jobs, tmp_path: Path) -> Callable[[str], Run]:
    return lambda name: Run(jobs=jobs, folder=tmp_path / name)


@pytest.fixture
def config(tiny_config: Callable[..., Fields]) -> Callable[..., Fields]:
    """One dense and one MoE layer, eight micro-batches of one sequence."""

    def made(**changed: Any) -> Fields:
        fields = tiny_config(**{"micro_batch_size": 1} | changed)
        chunks = len(fields["stages"])
        fields["model"]["layers"] = ["dense", "moe"]
        for stage in fields["stages"]:
            stage["num_layers"] = 2 // chunks
        return fields | {"learning_rate": 1e-2}

    return made


LOSS_FREE = {"mode": "learned", "balancing": "loss_free", "coefficient": 0.01}
SAME_LAYOUT: Mapping[str, Fields] = {
    "data 2, expert 2, zero 1, loss-free": {"data": 2, "expert": 2, "routing": LOSS_FREE},
    "tensor 2, bf16": {"tensor": 2, "precision": "bf16"},
    "data 2, zero 0": {"data": 2, "zero": 0},
    "data 2, zero 3": {"data": 2, "zero": 3},
    "pipeline 2": {"pipeline": 2},
}


def _resumed_equally(run: Callable[[str], Run], name: str, fields: Fields) -> list[str]:
    """Continue a run of 4 steps to 6 from each level, and compare with 6 at once."""
    wrong = []
    unbroken = run(f"{name}/unbroken")
    assert not any(unbroken.launch(fields, total=6)), unbroken.log.read_text()
    for level, asynchronous in (
        ("shared", True),
        ("host", False),
        ("shared", False),
        ("host", True),
    ):
        broken = run(f"{name}/{level}-{asynchronous}")
        saves: Fields = {level: 2, "asynchronous": asynchronous}
        for total in (4, 6):
            codes = broken.launch(fields, total=total, **saves)
            assert not any(codes), broken.log.read_text()
        expected = {step: loss for step, loss in unbroken.losses().items() if step > 4}
        if broken.restored() != (level, 4) or broken.losses() != expected:
            wrong.append(f"{name}, {level}, asynchronous {asynchronous}: {broken.losses()}")
    return wrong


def test_the_same_layout_goes_on_to_the_bit(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    name = "data 2, expert 2, zero 1, loss-free"
    assert not _resumed_equally(new_run, name, config(**SAME_LAYOUT[name]))


@pytest.mark.slow
def test_every_layout_goes_on_to_the_bit(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    wrong = []
    for name, changed in SAME_LAYOUT.items():
        wrong += _resumed_equally(new_run, name, config(**changed))
    assert not wrong


UNEVEN = {"data": 3, "microbatches": [3, 3, 2]}
RESHARDED: Mapping[str, tuple[Fields, Fields]] = {
    "4 data ranks to 3": ({"data": 4}, UNEVEN),
    "zero 3, 4 data ranks to 3": ({"data": 4, "zero": 3}, UNEVEN | {"zero": 3}),
    "3 data ranks, zero 0, to 4 of two nodes": (
        UNEVEN | {"zero": 0},
        {"data": 4, "expert": 4, "nodes_of": 2},
    ),
    "expert 2 to tensor 2": ({"data": 2, "expert": 2}, {"tensor": 2, "zero": 0}),
    "expert 2 to pipeline 2": (
        {"data": 2, "expert": 2, "routing": LOSS_FREE},
        {"pipeline": 2, "routing": LOSS_FREE},
    ),
    "tensor 2 to expert 4, zero 3": ({"tensor": 2}, {"data": 4, "expert": 4, "zero": 3}),
    "pipeline 2 of 2 data ranks to zero 3": (
        {"pipeline": 2, "data": 2, "microbatches": [5, 3]},
        {"data": 2, "zero": 3},
    ),
    "zero 3 to one rank": ({"data": 2, "zero": 3}, {"zero": 0}),
    "one rank to uneven experts": ({}, {"data": 2, "expert": 2, "microbatches": [6, 2]}),
}
MOST_RELATIVE = 1e-9


def _resharded_equally(
    run: Callable[[str], Run], config: Callable[..., Fields], names: list[str]
) -> list[str]:
    """Save 10 steps in one layout, go on to 20 in another, and compare with one rank's 20."""
    unbroken: dict[bool, dict[int, float]] = {}
    wrong = []
    for name in names:
        changes = [one | {"precision": "fp64"} for one in RESHARDED[name]]
        is_loss_free = "routing" in changes[0]
        if is_loss_free not in unbroken:
            alone = run(f"unbroken {is_loss_free}")
            routing = {"routing": LOSS_FREE} if is_loss_free else {}
            assert alone.launch(config(precision="fp64", **routing), total=20) == [0]
            unbroken[is_loss_free] = alone.losses()
        broken = run(name)
        losses: dict[int, float] = {}
        for total, changed in zip((10, 20), changes, strict=True):
            codes = broken.launch(config(**changed), total=total, shared=10)
            assert not any(codes), broken.log.read_text()
            losses |= broken.losses()
        assert broken.restored() == ("shared", 10)
        expected = unbroken[is_loss_free]
        error = max(abs(losses[step] / expected[step] - 1) for step in expected)
        if error > MOST_RELATIVE:
            wrong.append(f"{name}: {error}")
    return wrong


def test_three_data_ranks_go_on_from_four(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    assert not _resharded_equally(new_run, config, ["4 data ranks to 3"])


@pytest.mark.slow
def test_any_layout_goes_on_from_any(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    assert not _resharded_equally(new_run, config, [*RESHARDED])


PHASES: Mapping[str, tuple[str, float | None]] = {
    "began": ("save_began", None),
    "copying": ("save_began", 0.002),
    "writing": ("training_resumed", 0.02),
    "written, not yet renamed": ("written", None),
    "renaming": ("written", 0.005),
    "renamed": ("durable", None),
    "removing": ("durable", 0.003),
    "any time": ("step_done", 0.05),
}
"""The event, and the longest time after it; None: at it."""


def _survives_kills(
    run: Run, fields: Fields, *, kills: int, seed: int, **saves: Any
) -> tuple[int, list[str]]:
    """Kill the ranks of a run in every phase of a save in turn; each launch goes on from there."""
    draw = random.Random(seed)
    total = 6 * kills
    unbroken = Run(jobs=run.jobs, folder=run.folder / "unbroken")
    assert not any(unbroken.launch(fields, total=total)), unbroken.log.read_text()
    expected, wrong, durable, killed = unbroken.losses(), [], 0, 0
    for number in range(kills):
        name, (event, longest_s) = [*PHASES.items()][number % len(PHASES)]
        kill = Kill(
            event=event,
            level=None if event == "step_done" else draw.choice(["host", "shared"]),
            rank=draw.randrange(2),
            times=draw.randint(1, 2),
            delay_s=None if longest_s is None else draw.uniform(0, longest_s),
        )
        codes = run.launch(fields, total=total, kill=kill, **saves)
        killed += set(codes) == {-9}
        level, step = run.restored() if run.of_kind("restored") else ("none", durable)
        if step < durable:
            wrong.append(f"{number}, {name}: step {step} ({level}) after {durable} was durable")
        wrong += _differences(f"{number}, {name}", run, expected)
        own = [one["step"] for rank in range(2) for one in run.of_kind("durable", rank=rank)]
        durable = max([durable, *own])
    codes = run.launch(fields, total=total, **saves)
    assert not any(codes), run.log.read_text()
    return killed, wrong + _differences("the last launch", run, expected)


def _differences(name: str, run: Run, expected: Mapping[int, float]) -> list[str]:
    return [
        f"{name}: loss of step {step} is {loss}, not {expected[step]}"
        for step, loss in run.losses().items()
        if loss != expected[step]
    ]


def _kill_every_phase(run: Callable[[str], Run], fields: Fields, *, kills: int) -> None:
    """Kill in every phase, written while training waits and beside it."""
    wrong, killed = [], 0
    for seed, asynchronous in enumerate((True, False)):
        one, lines = _survives_kills(
            run(f"asynchronous {asynchronous}"),
            fields,
            kills=kills,
            seed=seed,
            shared=2,
            host=1,
            per_node=1,
            replicas=1,
            asynchronous=asynchronous,
        )
        killed += one
        wrong += lines
    assert not wrong
    assert killed == 2 * kills


def test_a_run_survives_kills_in_every_phase_of_a_save(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    _kill_every_phase(new_run, config(data=2, expert=2), kills=len(PHASES))


@pytest.mark.slow
def test_a_run_survives_a_hundred_kills(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    _kill_every_phase(new_run, config(data=2, expert=2), kills=56)
