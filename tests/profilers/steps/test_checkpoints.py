"""Runs go on from their checkpoints as if nothing had happened, whatever happens.

A launch of two ranks takes most of a second, and every test here needs several.
"""

import dataclasses
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from profilers.steps.checkpoints.manifest import facts_of
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
        fields = fields | {"checkpoints": checkpoints}
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
    "adapters, expert 2, bf16": {
        "data": 2,
        "expert": 2,
        "precision": "bf16",
        "adapters": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj", "experts"]},
    },
}


def _resumed_equally(
    run: Callable[[str], Run], name: str, fields: Fields, modes: Iterable[bool]
) -> list[str]:
    """Continue a run of 4 steps to 6, saved beside training or not, and compare with 6 at once."""
    wrong = []
    unbroken = run(f"{name}/unbroken")
    assert not any(unbroken.launch(fields, total=6)), unbroken.log.read_text()
    for asynchronous in modes:
        broken = run(f"{name}/{asynchronous}")
        for total in (4, 6):
            codes = broken.launch(fields, total=total, shared=2, asynchronous=asynchronous)
            assert not any(codes), broken.log.read_text()
        expected = {step: loss for step, loss in unbroken.losses().items() if step > 4}
        if broken.restored() != ("shared", 4) or broken.losses() != expected:
            wrong.append(f"{name}, asynchronous {asynchronous}: {broken.losses()}")
    return wrong


def test_the_same_layout_goes_on_to_the_bit(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    name = "data 2, expert 2, zero 1, loss-free"
    assert not _resumed_equally(new_run, name, config(**SAME_LAYOUT[name]), [True])


@pytest.mark.slow
def test_every_layout_goes_on_to_the_bit(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    wrong = []
    for name, changed in SAME_LAYOUT.items():
        wrong += _resumed_equally(new_run, name, config(**changed), [True, False])
    assert not wrong


FORCED = {"mode": "forced", "load_ratio": [[0.3, 0.25, 0.15, 0.1, 0.1, 0.05, 0.05, 0.0]]}
UNEVEN = {"data": 3, "microbatches": [3, 3, 2]}
RESHARDED: Mapping[str, tuple[Fields, Fields]] = {
    "4 data ranks to 3": ({"data": 4}, UNEVEN),
    "zero 3, 4 data ranks to 3": ({"data": 4, "zero": 3}, UNEVEN | {"zero": 3}),
    "3 data ranks, zero 0, to 4 of two nodes": (
        UNEVEN | {"zero": 0},
        {"data": 4, "expert": 4, "nodes_of": 2, "microbatches": [3, 2, 2, 1]},
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
    "one rank to uneven experts, forced": (
        {"routing": FORCED},
        {"data": 2, "expert": 2, "microbatches": [6, 2], "routing": FORCED},
    ),
    "uneven with tensor 2, zero 3 to uneven with full recomputation": (
        {"data": 2, "tensor": 2, "zero": 3, "microbatches": [5, 3]},
        {
            "data": 2,
            "tensor": 2,
            "expert": 4,
            "microbatches": [3, 5],
            "stage": {"recompute": "full", "chunks": 2},
        },
    ),
}
MOST_RELATIVE = 1e-9


def _resharded_equally(
    run: Callable[[str], Run], config: Callable[..., Fields], names: list[str]
) -> list[str]:
    """Save 10 steps in one layout, go on to 20 in another, and compare with one rank's 20."""
    unbroken: dict[str, dict[int, float]] = {}
    wrong = []
    for name in names:
        changes = [one | {"precision": "fp64"} for one in RESHARDED[name]]
        routing = changes[0].get("routing", {})
        key = json.dumps(routing)
        if key not in unbroken:
            alone = run(f"unbroken {len(unbroken)}")
            fields = config(precision="fp64", routing=routing)
            assert alone.launch(fields, total=20) == [0], alone.log.read_text()
            unbroken[key] = alone.losses()
        broken = run(name)
        losses: dict[int, float] = {}
        for total, changed in zip((10, 20), changes, strict=True):
            codes = broken.launch(config(**changed), total=total, shared=10)
            assert not any(codes), broken.log.read_text()
            losses |= broken.losses()
        assert broken.restored() == ("shared", 10)
        expected = unbroken[key]
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
    "writing": ("save_began", 0.04),
    "writing beside the next steps": ("training_resumed", 0.04),
    "written, not yet renamed": ("written", None),
    "renaming": ("written", 0.005),
    "renamed": ("durable", None),
    "removing": ("durable", 0.003),
    "any time": ("step_done", 0.05),
}
"""The event, and the longest time after it; None: at it."""


def _kill_often(
    new_run: Callable[[str], Run], fields: Fields, *, kills: int, modes: Iterable[bool]
) -> None:
    """Kill a run in every phase of a save in turn, in each mode of writing."""
    unbroken, total = new_run("unbroken"), 5 * kills + 5
    assert not any(unbroken.launch(fields, total=total)), unbroken.log.read_text()
    wrong, left = [], 0
    for seed, asynchronous in enumerate(modes):
        left += kills
        run = new_run(f"asynchronous {asynchronous}")
        saves: Fields = {"shared": 2, "total": total, "asynchronous": asynchronous}
        for is_killed, lines in _killed(
            run, fields, saves, unbroken.losses(), kills=kills, seed=seed
        ):
            left -= is_killed
            wrong += lines
    assert not wrong
    assert not left


def _killed(
    run: Run,
    fields: Fields,
    saves: Fields,
    expected: Mapping[int, float],
    *,
    kills: int,
    seed: int,
) -> Iterator[tuple[bool, list[str]]]:
    """Kill launch after launch, and give what is wrong with each."""
    draw, durable = random.Random(seed), 0
    for number in range(kills):
        name, (event, longest_s) = [*PHASES.items()][number % len(PHASES)]
        kill = Kill(
            event=event,
            level=None if event == "step_done" else "shared",
            rank=draw.randrange(2),
            times=draw.randint(1, 2),
            delay_s=None if longest_s is None else draw.uniform(0, longest_s),
        )
        codes = run.launch(fields, kill=kill, **saves)
        level, step = run.restored() if run.of_kind("restored") else ("none", durable)
        wrong = _differences(f"{number}, {name}", run, expected)
        if step < durable:
            wrong.append(f"{number}, {name}: step {step} ({level}) after {durable} was durable")
        saved = [one["step"] for rank in range(2) for one in run.of_kind("durable", rank=rank)]
        durable = max([durable, *saved])
        # Whoever lost its peer may have left before it was killed.
        yield -9 in codes, wrong
    codes = run.launch(fields, **saves)
    assert not any(codes), run.log.read_text()
    wrong = _differences("the last launch", run, expected)
    names = sorted(each.name for each in run.shared.iterdir())
    last = saves["total"] - saves["total"] % saves["shared"]
    if names != [f"step-{step:08d}" for step in (last - saves["shared"], last)]:
        wrong.append(f"{run.shared} holds {names}")
    yield False, wrong


def _differences(name: str, run: Run, expected: Mapping[int, float]) -> list[str]:
    return [
        f"{name}: loss of step {step} is {loss}, not {expected[step]}"
        for step, loss in run.losses().items()
        if loss != expected[step]
    ]


def test_a_run_survives_kills_while_it_saves(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    _kill_often(new_run, config(data=2, expert=2), kills=3, modes=[True])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_survives_a_hundred_kills_in_every_phase_of_a_save(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    _kill_often(new_run, config(data=2, expert=2), kills=7 * len(PHASES), modes=[True, False])


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    fields, wrong = config(data=2), []
    for asynchronous in (True, False):
        run = new_run(f"{asynchronous}")
        codes = run.launch(
            fields, total=6, largest_file_bytes=2**16, shared=2, asynchronous=asynchronous
        )
        assert not any(codes), run.log.read_text()
        failed = [one["step"] for one in run.of_kind("save_failed", rank=1)]
        durable = [one["step"] for one in run.of_kind("durable", rank=1)]
        names = {each.name for each in run.shared.glob("*")}
        (said,) = run.log.read_text().splitlines()
        if (failed, durable, names) != ([2], [4, 6], {"step-00000004", "step-00000006"}):
            wrong.append(f"{asynchronous}: {failed} failed, {durable} durable, left {names}")
        if "checkpoint of step 2 failed: " not in said:
            wrong.append(f"{asynchronous}: said {said}")
    assert not wrong


def test_other_programs_read_what_is_saved(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    run = new_run("read")
    codes = run.launch(config(data=2, expert=2), total=2, shared=2)
    assert not any(codes), run.log.read_text()
    (folder,) = run.shared.iterdir()
    whole = run.folder / "whole.pt"
    dcp_to_torch_save(folder, whole)
    tensors = torch.load(whole, weights_only=True)
    assert tensors["model.layers.1.ffn.routed.gate_up"].shape == (8, 32, 32)
    assert tensors["model.layers.0.attention.qkv.k"].shape == (16, 32)
    assert tensors["optimizer.step.head"].item() == 2
    assert tensors["optimizer.exp_avg_sq.head"].gt(0).all()


class _Ends:
    """What must never run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (9,)


def _edit_metadata(folder: Path, edit: Callable[[Any], object] | None) -> None:
    """Change `.metadata`, or forge it, and the manifest with it, as whoever means harm would."""
    path, manifest = folder / ".metadata", folder / "checkpoint.json"
    stored = pickle.loads(path.read_bytes()) if edit else _Ends()
    if edit:
        edit(stored)
    path.write_bytes(pickle.dumps(stored))
    fields = json.loads(manifest.read_text())
    fields["files"][".metadata"] = facts_of(path)
    manifest.write_text(json.dumps(fields))


def _lead_outside(stored: Any) -> None:
    index, place = next(iter(stored.storage_data.items()))
    stored.storage_data[index] = dataclasses.replace(place, relative_path="../outside")


def _flip_a_bit(path: Path) -> None:
    values = bytearray(path.read_bytes())
    values[len(values) // 2] ^= 1
    path.write_bytes(values)


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "__0_0.distcp has ": lambda one: os.truncate(one / "__0_0.distcp", 5000),
    "__0_0.distcp has another checksum": lambda one: _flip_a_bit(one / "__0_0.distcp"),
    "checkpoint.json is missing": lambda one: (one / "checkpoint.json").unlink(),
    "checkpoint.json: ": lambda one: (one / "checkpoint.json").write_text("[]"),
    ".metadata is refused: it asks for posix._exit": lambda one: _edit_metadata(one, None),
    "describes tensors that its files cannot hold": lambda one: _edit_metadata(one, _lead_outside),
    "has no tensor model.head": lambda one: _edit_metadata(
        one, lambda stored: stored.state_dict_metadata.pop("model.head")
    ),
    "parts of model.head are missing": lambda one: _edit_metadata(
        one, lambda stored: stored.state_dict_metadata["model.head"].chunks.clear()
    ),
}


def test_a_damaged_checkpoint_is_skipped_and_none_left_is_refused(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    fields, run = config(), new_run("damaged")
    assert run.launch(fields, total=4, shared=2) == [0]
    expected = {step: loss for step, loss in run.losses().items() if step > 2}
    newest, spare = run.shared / "step-00000004", run.folder / "spare"
    shutil.copytree(newest, spare)
    wrong = []
    for said, damage in DAMAGES.items():
        damage(newest)
        assert run.launch(fields, total=4) == [0], run.log.read_text()
        (skipped,) = run.of_kind("checkpoint_skipped")
        if said not in skipped["reason"] or "\n" in skipped["reason"]:
            wrong.append(f"{said!r} expected, not {skipped['reason']!r}")
        if run.restored() != ("shared", 2) or run.losses() != expected:
            wrong.append(f"{said}: {run.restored()}, {run.losses()}")
        shutil.rmtree(newest)
        shutil.copytree(spare, newest)
    assert not wrong

    shutil.rmtree(run.shared / "step-00000002")
    (newest / "checkpoint.json").unlink()
    assert run.launch(fields, total=4, shared=2) == [2]
    last = run.log.read_text().splitlines()[-1]
    assert last.startswith("none of 1 checkpoints can be restored")


def test_another_runs_checkpoint_is_refused(
    new_run: Callable[[str], Run], config: Callable[..., Fields]
) -> None:
    run = new_run("another")
    assert run.launch(config(), total=2, shared=2) == [0], run.log.read_text()
    larger = config()
    larger["model"] |= {"moe_ffn_size": 32}
    wrong = []
    for fields, said in (
        (larger, "model.moe_ffn_size is 16 there, 32 here"),
        (config(seed=1), "seed is 0 there, 1 here"),
        (config(precision="fp64"), "state is fp32 there, fp64 here"),
    ):
        run.log.unlink(missing_ok=True)
        assert run.launch(fields, total=4, shared=2) == [2], run.log.read_text()
        (line,) = run.log.read_text().splitlines()
        if said not in line:
            wrong.append(f"{said!r} expected, not {line!r}")
    assert not wrong
