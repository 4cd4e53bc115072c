"""Corrupts every kind of input and checks that every command fails cleanly.

    python -m tests.fuzz.run --seed 22 --mutations 2000 [--sound] [--only 17,18] [--kind NAME]

Checked for each mutation: an exit code of 0 to 3, no traceback, at most 10 s of processor time, at
most 1 GB more memory than before, a refusal of one line, no terminal control characters printed,
nothing written outside of the output. The last line is JSON: what was run, and the number of
failures. Commands run in a worker (worker.py), which is restarted when it ends or hangs; a mutation
is determined by the seed and its number.
"""

import argparse
import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from tests.benchmarks.bars import parse, say
from tests.fuzz.inputs import ROOT, Kind, build, kinds
from tests.fuzz.mutations import spoil, text_argument

MOST_S: Final = 10.0
MOST_CPU_S: Final = 20.0
WAITS_S: Final = 10.0
"""Most seconds without processor use."""
MOST_BYTES: Final = 10**9
MOST_CHARACTERS: Final = 2200
TASKS_OF_A_WORKER: Final = 150


class Worker:
    """A process that runs commands; started on demand, ended on exit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._tasks = 0

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def ended(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Run a command and return how it ended."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        if hang := _hang(process):
            self.stop()
            return {"code": 99, "crash": hang}
        line = process.stdout.readline()
        if not line:
            code = process.wait()
            self.stop()
            return {"code": 99, "crash": f"the process died: {code}"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> "subprocess.Popen[str]":
        self._tasks += 1
        if self._process is not None and self._tasks > TASKS_OF_A_WORKER:
            self.stop()
        if self._process is None:
            self._tasks = 1
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return self._process

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            # With all that it has started in its session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None


def _hang(process: "subprocess.Popen[str]") -> str:
    """Wait for a result; return why the wait ended without one.

    Machines may be loaded, so processor time counts, and whether any is used.
    """
    assert process.stdout is not None
    about = psutil.Process(process.pid)
    begun_cpu_s = _cpu_s(about)
    used_s, used_at_s = 0.0, time.monotonic()
    while not select.select([process.stdout], [], [], 1.0)[0]:
        now_s = _cpu_s(about) - begun_cpu_s
        if now_s > used_s + 0.1:
            used_s, used_at_s = now_s, time.monotonic()
        if used_s > MOST_CPU_S:
            return f"takes more than {MOST_CPU_S} s of the processor"
        if time.monotonic() - used_at_s > WAITS_S:
            return f"waits for {WAITS_S} s"
    return ""


def _cpu_s(about: psutil.Process) -> float:
    """Seconds of the processor of a process, those it waited for and those it still runs."""
    total_s = sum(about.cpu_times()[:4])
    for child in about.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total_s += sum(child.cpu_times()[:2])
    return float(total_s)


def tried(number: int, *, seed: int, base: Path, place: Path, worker: Worker) -> dict[str, Any]:
    """Run one mutation; return its description and failures."""
    rng = random.Random(f"{seed}:{number}")
    every = kinds()
    kind = every[number % len(every)]
    text = text_argument(rng, rng.choice(kind.texts)) if kind.texts else ""
    command = rng.choice(kind.commands)

    def spoilt(inputs: Path) -> str:
        return f"argument {text[:80]!r}" if kind.texts else _spoilt(rng, kind, inputs)

    result = _run(kind, command, text, base=base, place=place, worker=worker, spoilt=spoilt)
    return {"number": number} | result


def _filled(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def _spoilt(rng: random.Random, kind: Kind, inputs: Path) -> str:
    files = sorted({file for pattern in kind.files for file in inputs.glob(pattern)})
    file = rng.choice([each for each in files if each.is_file()])
    try:
        how = spoil(rng, file)
    except (ValueError, ArithmeticError, LookupError, TypeError, RuntimeError) as error:
        file.write_bytes(b"")
        how = f"emptied, for {error!r}"[:120]
    return f"{file.relative_to(inputs)}: {how}"


def _listing(folder: Path, kind: Kind) -> dict[str, tuple[int, int]]:
    """Every file with its size and time, outside of the output."""
    if kind.writes_input:
        return {}
    result = {}
    for file in folder.rglob("*"):
        about = file.lstat()
        result[str(file.relative_to(folder))] = (about.st_size, about.st_mtime_ns)
    return result


def _ends_badly(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer.get("crash"):
        yield answer["crash"]
    elif answer["code"] not in (0, 1, 2, 3):
        yield f"exit code {answer['code']}"
    if answer.get("wall_s", 0.0) > MOST_S and answer.get("cpu_s", 0.0) > MOST_S:
        yield f"took {answer['wall_s']:.0f} s"
    if answer.get("grown_bytes", 0) > MOST_BYTES:
        yield f"took {answer['grown_bytes'] / 1e6:.0f} MB"


def _speaks_badly(code: int, said: str) -> Iterator[str]:
    if "Traceback" in said or "Exception ignored" in said:
        yield "a traceback"
    if "no memory is left" in said:
        yield "ran out of memory"
    refusal = [line for line in said.splitlines() if line.startswith("moetune: ")]
    if code in (2, 3) and len(refusal) != 1:
        yield f"{len(refusal)} lines of refusal"
    if any(len(line) > MOST_CHARACTERS for line in refusal):
        yield f"a line of {max(map(len, refusal))} characters"
    if odd := [sign for sign in said if sign != "\n" and not sign.isprintable()]:
        yield f"prints {odd[0]!r}"


def sound(base: Path, place: Path, worker: Worker) -> list[str]:
    """Run every command on the valid inputs; return refusals."""
    refused = []
    for kind in kinds():
        for number, command in enumerate(kind.commands):
            text = kind.texts[0] if kind.texts else ""
            result = _run(kind, command, text, base=base, place=place, worker=worker)
            # Options are tried with one text for all of them, and nothing answers at the URL.
            is_wrong = result["code"] not in (0, 1) and kind.name not in ("options", "storage")
            if result["wrong"] or is_wrong:
                refused.append(f"{kind.name}, command {number}: {result['wrong']} {result['said']}")
    return refused


def _run(
    kind: Kind,
    command: Sequence[str],
    text: str,
    *,
    base: Path,
    place: Path,
    worker: Worker,
    spoilt: Callable[[Path], str] = lambda _inputs: "",
) -> dict[str, Any]:
    """Run a command on a copy of a kind's inputs, and check it."""
    inputs, out, cwd = place / "in", place / "out", place / "cwd"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base / kind.folder, inputs, symlinks=True)
    cwd.mkdir()
    how = spoilt(inputs)
    words = {"{in}": str(inputs), "{out}": str(out), "{plan}": str(inputs), "{text}": text}
    arguments = [_filled(each, words) for each in command]
    before = _listing(inputs, kind)
    task = {"arguments": arguments, "cwd": str(cwd), "said": str(place / "said")}
    answer = worker.ended(task)
    said = (place / "said").read_bytes().decode("utf-8", "replace")
    wrong = [*_ends_badly(answer), *_speaks_badly(answer["code"], said)]
    if (after := _listing(inputs, kind)) != before:
        changed = sorted(set(after.items()) ^ set(before.items()))
        wrong.append(f"wrote into its input: {changed[:4]}")
    if left := [each.name for each in cwd.iterdir()]:
        wrong.append(f"wrote beside its output: {left}")
    return {
        "kind": kind.name,
        "how": how,
        "arguments": [each[:300] for each in arguments],
        "code": answer["code"],
        "wrong": wrong,
        "said": said[-600:],
        "wall_s": round(answer.get("wall_s", 0.0), 2),
        "grown_bytes": answer.get("grown_bytes", 0),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the mutations; return 1 on any failure."""
    options = parse(
        __doc__,
        {
            "--seed": 22,
            "--mutations": 2000,
            "--first": {"type": int, "default": 0, "help": "number of the first mutation"},
            "--only": {"default": "", "help": "numbers of mutations, with commas between"},
            "--kind": {"default": "", "help": "only kinds whose name holds this"},
            "--base": {"type": Path, "help": "where the sound inputs are, or are made"},
            "--sound": {"action": "store_true", "help": "also run what is not spoilt"},
        },
        arguments,
    )
    say(f"seed {options.seed}, {options.mutations} mutations")
    summary = _all_tried(options)
    say(json.dumps(summary))
    return 1 if summary["finds"] else 0


def _all_tried(options: argparse.Namespace) -> dict[str, Any]:
    """Run the requested mutations; return how they ended."""
    start_s = time.monotonic()
    codes, seen = Counter[str](), Counter[str]()
    slowest: list[tuple[float, int, str]] = []
    finds = 0
    with tempfile.TemporaryDirectory(prefix="moetune-fuzz-") as scratch, Worker() as worker:
        base, place = options.base or Path(scratch) / "base", Path(scratch) / "case"
        if not base.exists():
            build(base)
        if options.sound:
            refused = sound(base, place, worker)
            finds += len(refused)
            say(*refused)
        for number in numbers_of(options):
            result = tried(number, seed=options.seed, base=base, place=place, worker=worker)
            codes[str(result["code"])] += 1
            seen[result["kind"]] += 1
            slowest.append((result["wall_s"], number, result["kind"]))
            if result["wrong"] or options.only:
                finds += bool(result["wrong"])
                say(json.dumps(result))
    return {
        "seed": options.seed,
        "mutations": codes.total(),
        "finds": finds,
        "codes": codes,
        "kinds": len(seen),
        "slowest": sorted(slowest, reverse=True)[:5],
        "wall_s": round(time.monotonic() - start_s),
    }


def numbers_of(options: argparse.Namespace) -> list[int]:
    """Return the numbers of the mutations to run."""
    if options.only:
        return [int(each) for each in options.only.split(",")]
    every = kinds()
    wanted = [options.kind in every[number % len(every)].name for number in range(len(every))]
    numbers = range(options.first, options.first + options.mutations)
    return [number for number in numbers if wanted[number % len(every)]]


if __name__ == "__main__":
    # What ends a long run from outside must not leave its worker and folders.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
