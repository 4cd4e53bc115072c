"""An engine that trains on a CPU against its predictions; run as

    python tests/benchmarks/engine_layouts.py ENGINE [FOLDER] [--launch] [--repeats 5]

ENGINE is deepspeed, megatron-lm or torchtitan: a file `launched_ENGINE.py` beside this one has its
layouts and its command line. FOLDER, by default examples/profiles/epyc-ENGINE, holds `profile/` of
the machine, `routing.json`, the expert loads (see the engine's example), and `steps.json`, the
measured step of every launch. With `--launch` every layout is planned on the profile and launched
with the example's environment, round-robin, so that repeats of a layout are far apart in time; the
machine must be idle. Printed:

    error     of each layout, predicted by the profile and a residual fitted to the other layouts
    spread    of the repeats of a layout: largest over smallest step less 1
    order     of the pairs whose repeats do not overlap, how many are predicted in the right order
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.benchmarks.bars import parse, say
from tests.benchmarks.launched_engine import CHECKOUT, LaunchedEngine
from tests.expect import present
from tuner import api
from tuner.goals.verify import command_trials
from tuner.plans.train import Plan
from tuner.verify.measured_steps import corrected_step_s, factors
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.verification import Effort, Watcher

ENGINES = ("deepspeed", "megatron-lm", "torchtitan")


def engine_of(name: str) -> LaunchedEngine:
    """Return what is known of an engine, from its file."""
    engine = import_module(f"tests.benchmarks.launched_{name.replace('-', '_')}").ENGINE
    assert isinstance(engine, LaunchedEngine)
    return engine


def spec_of(engine: LaunchedEngine, layout: str, folder: Path) -> str:
    """Return the spec that plans one layout."""
    ranks, search = engine.layouts[layout]
    return f"""
schema_version: 1
model: {engine.model}
cluster:
  pools:
    - {{name: here, profile: {folder / "profile"}, nodes: 1, devices_per_node: {ranks}}}
goal: {{kind: train, {engine.goal}, routing: {{path: {folder / "routing.json"}}}}}
search: {{{search}}}
emit: [{engine.name}]
"""


def launched(engine: LaunchedEngine, layout: str, stored: Path, folder: Path) -> TrialRecord:
    """Plan a layout and launch it once."""
    folder.mkdir()
    spec = folder / "spec.yaml"
    spec.write_text(spec_of(engine, layout, stored), encoding="utf-8")
    api.write(folder / "plan", api.plan(spec))
    api.verify(
        folder / "plan",
        effort=Effort(trials=1, steps=engine.steps),
        resume=False,
        watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
        by=command_trials(
            command=f"bash {{launch}}/run.sh {engine.arguments}",
            metrics=engine.metrics,
        ),
    )
    (record,) = read_trials(folder / "plan" / "trials")
    return record


def launches(
    engine: LaunchedEngine, stored: Path, *, repeats: int
) -> Iterator[tuple[str, TrialRecord]]:
    """Launch every layout, round-robin."""
    os.environ["PATH"] = f"{engine.programs}{os.pathsep}{os.environ['PATH']}"
    os.environ |= engine.environment
    with tempfile.TemporaryDirectory(prefix="moetune-layouts-") as scratch:
        for number, layout in itertools.product(range(repeats), engine.layouts):
            yield layout, launched(engine, layout, stored, Path(scratch) / f"{number} {layout}")


def predicted(engine: LaunchedEngine, stored: Path) -> dict[str, TrialRecord]:
    """Return a trial of every layout with the prediction of the uncorrected profile."""
    result = {}
    with tempfile.TemporaryDirectory(prefix="moetune-layouts-") as scratch:
        for number, layout in enumerate(engine.layouts):
            spec = Path(scratch) / "spec.yaml"
            spec.write_text(spec_of(engine, layout, stored), encoding="utf-8")
            made = api.plan(spec).plan
            assert isinstance(made, Plan)
            result[layout] = TrialRecord(
                number=number,
                origin="plan",
                decision=present(made.decision),
                status="ok",
                predicted_step_s=present(made.predicted).step_time_s,
                predicted_communication_s=present(made.predicted).communication_s,
                predicted_activation_bytes=(),
                measured_steps_s=(),
                measured_step_s=None,
                measured_activation_bytes=(),
                wall_s=0.0,
                engine=engine.name,
                release="",
                device="",
            )
    return result


def figures(engine: LaunchedEngine, folder: Path) -> dict[str, Any]:
    """Compute errors from the other layouts, spreads and orders."""
    steps_s: dict[str, list[float]] = json.loads((folder / "steps.json").read_text())
    measured = {layout: statistics.median(of) for layout, of in steps_s.items()}
    plain = {
        layout: record.model_copy(update={"measured_step_s": measured[layout]})
        for layout, record in predicted(engine, folder).items()
    }
    from_others = {
        layout: corrected_step_s(
            record, factors([other for name, other in plain.items() if name != layout])
        )
        for layout, record in plain.items()
    }
    spread = {layout: max(of) / min(of) - 1.0 for layout, of in steps_s.items()}
    pairs = [
        (one, other)
        for one, other in itertools.combinations(plain, 2)
        if max(steps_s[one]) < min(steps_s[other]) or max(steps_s[other]) < min(steps_s[one])
    ]
    wrong = [
        (one, other)
        for one, other in pairs
        if (from_others[one] < from_others[other]) != (measured[one] < measured[other])
    ]
    error = {name: abs(from_others[name] / measured[name] - 1.0) for name in plain}
    return {
        "rows": [
            {
                "layout": name,
                "repeats": len(steps_s[name]),
                "measured_s": measured[name],
                "plain_s": plain[name].predicted_step_s,
                "predicted_s": from_others[name],
                "error": error[name],
                "spread": spread[name],
            }
            for name in plain
        ],
        "factors": factors(list(plain.values())),
        "median_error": statistics.median(error.values()),
        "median_spread": statistics.median(spread.values()),
        "pairs": len(pairs),
        "wrong": wrong,
    }


def main() -> int:
    """Launch if requested, then print the figures."""
    options = parse(
        __doc__,
        {
            "engine": {"choices": ENGINES},
            "folder": (Path, None),
            "--launch": False,
            "--repeats": 5,
        },
    )
    engine = engine_of(options.engine)
    folder = (options.folder or engine.stored).resolve()
    if options.launch:
        subprocess.run(["bash", "-ec", engine.setup], check=True, cwd=CHECKOUT)
        steps_s: dict[str, list[float]] = {layout: [] for layout in engine.layouts}
        for layout, record in launches(engine, folder, repeats=options.repeats):
            if record.status != "ok" or not record.measured_step_s:
                raise SystemExit(f"{layout}: {record.status}: {record.reason}")
            steps_s[layout].append(record.measured_step_s)
            (folder / "steps.json").write_text(json.dumps(steps_s, indent=1) + "\n")
            say(f"{layout}: {record.measured_step_s:.3f} s")
    result = figures(engine, folder)
    for row in result["rows"]:
        sys.stdout.write(
            f"{row['layout']:<30} {row['repeats']} x {row['measured_s']:.3f} s, profile"
            f" {row['plain_s']:.3f} s, from the others {row['predicted_s']:.3f} s,"
            f" error {row['error']:.1%}, spread {row['spread']:.1%}\n"
        )
    computation, communication = result["factors"]
    sys.stdout.write(
        f"factors of all: computation {computation:.2f}, communication {communication:.2f}\n"
        f"median error {result['median_error']:.1%}, median spread {result['median_spread']:.1%};"
        f" {result['pairs'] - len(result['wrong'])} of {result['pairs']} pairs are ordered right\n"
    )
    sys.stdout.writelines(f"wrong: {one} against {other}\n" for one, other in result["wrong"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
