"""DeepSpeed itself on this CPU against its predictions; run as

    python tests/benchmarks/deepspeed_layouts.py RECORDS.json [--launch PROFILE] [--repeats 5]

Layouts are ZeRO 1 to 3 on one and two ranks, two micro-batch sizes, and AutoEP (`LAYOUTS`). With
`--launch` each is planned on PROFILE and launched with `examples/engines/deepspeed`, one after
the other, as often as asked: repeats of one layout are as far apart as can be. Records are added to
RECORDS.json. Then, and without `--launch` only then, the figures are worked out:

    error     of each layout, predicted by the profile and a residual fitted to the other layouts
    spread    of the repeats of a layout, largest over smallest less 1; medians of both
    order     pairs of layouts whose repeats differ by more than their spread, and how many of them
              are predicted in the right order

The machine must be quiet for the launches.
"""

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner import api
from tuner.verify.recalibration import corrected_step_s, factors
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.verification import Effort, Watcher
from tuner.verify_api import command_trials

CHECKOUT = Path(__file__).parents[2]
EXAMPLE = CHECKOUT / "examples" / "engines" / "deepspeed"
MODEL = CHECKOUT / "examples" / "models" / "tiny-moe" / "config.json"
SEQUENCE = 256
LAYOUTS: Mapping[str, tuple[int, str]] = {
    "1 rank, ZeRO 1": (1, "zero_stage: [1], micro_batch_size: [4]"),
    "1 rank, ZeRO 1, micro-batch 8": (1, "zero_stage: [1], micro_batch_size: [8]"),
    "ZeRO 1": (2, "zero_stage: [1], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 2": (2, "zero_stage: [2], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 3": (2, "zero_stage: [3], expert_model_parallel_size: [1], micro_batch_size: [4]"),
    "ZeRO 1, micro-batch 8": (
        2,
        "zero_stage: [1], expert_model_parallel_size: [1], micro_batch_size: [8]",
    ),
    "ZeRO 3, micro-batch 2": (
        2,
        "zero_stage: [3], expert_model_parallel_size: [1], micro_batch_size: [2]",
    ),
    "ZeRO 1, AutoEP 2": (
        2,
        "zero_stage: [1], expert_model_parallel_size: [2], micro_batch_size: [4]",
    ),
    "ZeRO 2, AutoEP 2": (
        2,
        "zero_stage: [2], expert_model_parallel_size: [2], micro_batch_size: [4]",
    ),
}
"""Ranks, and what the search is held to."""


def spec_of(layout: str, profile: Path) -> str:
    """Return the spec that plans one layout."""
    ranks, search = LAYOUTS[layout]
    return f"""
schema_version: 1
model: {MODEL}
cluster: {{pools: [{{name: here, profile: {profile}, nodes: 1, devices_per_node: {ranks}}}]}}
goal: {{kind: train, sequence_length: {SEQUENCE}, global_batch_size: 16, precision: bf16}}
search: {{pipeline_model_parallel_size: [1], tensor_model_parallel_size: [1], {search}}}
emit: [deepspeed]
"""


def launched(layout: str, profile: Path, folder: Path) -> TrialRecord:
    """Plan a layout and launch it once."""
    folder.mkdir()
    spec = folder / "spec.yaml"
    spec.write_text(spec_of(layout, profile), encoding="utf-8")
    api.write(folder / "plan", api.plan(spec))
    words = f"--model {shlex.quote(str(MODEL))} --sequence {SEQUENCE} --steps {{steps}}"
    api.verify(
        folder / "plan",
        effort=Effort(trials=1, steps=8, repeats=0),
        resume=False,
        watcher=Watcher(started=lambda *_: None, ended=lambda _: None),
        by=command_trials(
            command=f"bash {{launch}}/run.sh {words}", metrics="deepspeed", folder=folder / "plan"
        ),
    )
    (record,) = read_trials(folder / "plan" / "trials")
    return record


def launches(profile: Path, *, repeats: int) -> Iterator[dict[str, Any]]:
    """Launch every layout, all of them once before any again."""
    os.environ["PATH"] = f"{CHECKOUT / '.venv-deepspeed' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    os.environ |= {"DS_ACCELERATOR": "cpu", "TRAIN": str(EXAMPLE / "train.py")}
    with tempfile.TemporaryDirectory(prefix="moetune-layouts-") as scratch:
        for number, layout in itertools.product(range(repeats), LAYOUTS):
            folder = Path(scratch) / f"{number} {layout}"
            record = launched(layout, profile, folder)
            yield {"layout": layout, "record": json.loads(record.model_dump_json())}


def medians(records: Sequence[Mapping[str, Any]]) -> dict[str, TrialRecord]:
    """Return a record of each layout with the median of its repeats as the measured step."""
    found: dict[str, TrialRecord] = {}
    for layout in dict.fromkeys(one["layout"] for one in records):
        own = repeats_of(records, layout)
        if own:
            middle = statistics.median(one.measured_step_s or 0.0 for one in own)
            found[layout] = own[-1].model_copy(update={"measured_step_s": middle})
    return found


def repeats_of(records: Sequence[Mapping[str, Any]], layout: str) -> list[TrialRecord]:
    """Return what ran of a layout."""
    all_of = (TrialRecord.model_validate(one["record"]) for one in records)
    own = (one for one, kept in zip(all_of, records, strict=True) if kept["layout"] == layout)
    return [one for one in own if one.status == "ok" and one.measured_step_s]


def spread_of(repeats: Sequence[TrialRecord]) -> float:
    """Return the largest step of repeats over the smallest, less 1."""
    steps_s = [one.measured_step_s or 0.0 for one in repeats]
    return max(steps_s) / min(steps_s) - 1.0


def figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Work out errors from the other layouts, spreads and orders."""
    middle = medians(records)
    predicted = {
        layout: corrected_step_s(
            record, factors([other for name, other in middle.items() if name != layout])
        )
        for layout, record in middle.items()
    }
    measured = {layout: record.measured_step_s or 0.0 for layout, record in middle.items()}
    spread = {layout: spread_of(repeats_of(records, layout)) for layout in middle}
    pairs = [
        (one, other)
        for one, other in itertools.combinations(middle, 2)
        if _are_apart(repeats_of(records, one), repeats_of(records, other))
    ]
    right = [
        (predicted[one] < predicted[other]) == (measured[one] < measured[other])
        for one, other in pairs
    ]
    error = {name: abs(predicted[name] / measured[name] - 1.0) for name in middle}
    return {
        "rows": [
            {
                "layout": name,
                "repeats": len(repeats_of(records, name)),
                "measured_s": measured[name],
                "plain_s": middle[name].predicted_step_s,
                "predicted_s": predicted[name],
                "error": error[name],
                "spread": spread[name],
            }
            for name in middle
        ],
        "median_error": statistics.median(error.values()),
        "median_spread": statistics.median(spread.values()),
        "pairs": len(pairs),
        "right": sum(right),
        "failed": [
            f"{one['layout']}: {one['record']['reason']}"
            for one in records
            if one["record"]["status"] != "ok"
        ],
    }


def _are_apart(one: Sequence[TrialRecord], other: Sequence[TrialRecord]) -> bool:
    """Whether every repeat of one layout is faster than every repeat of another."""
    own, others = ([each.measured_step_s or 0.0 for each in each_of] for each_of in (one, other))
    return max(own) < min(others) or max(others) < min(own)


def main() -> int:
    """Launch where that is asked, then print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--launch", type=Path, metavar="PROFILE", help="of this machine")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    records = json.loads(options.records.read_text()) if options.records.exists() else []
    if options.launch is not None:
        setup = 'source "$1/examples/setup.sh"; source "$1/examples/engines/deepspeed/setup.sh"'
        subprocess.run(
            ["bash", "-c", f"set -e; {setup}; setup_deepspeed", "_", str(CHECKOUT)], check=True
        )
        for one in launches(options.launch.resolve(), repeats=options.repeats):
            records.append(one)
            options.records.write_text(json.dumps(records, indent=1) + "\n")
            took = one["record"]["measured_step_s"] or 0.0
            sys.stdout.write(f"{one['layout']}: {one['record']['status']}, {took:.3f} s\n")
            sys.stdout.flush()
    found = figures(records)
    for row in found["rows"]:
        sys.stdout.write(
            f"{row['layout']:<24} {row['repeats']} x {row['measured_s']:.3f} s, profile"
            f" {row['plain_s']:.3f} s, from the others {row['predicted_s']:.3f} s,"
            f" error {row['error']:.1%}, spread {row['spread']:.1%}\n"
        )
    sys.stdout.write(
        f"median error {found['median_error']:.1%}, median spread {found['median_spread']:.1%};"
        f" {found['right']} of {found['pairs']} pairs that differ are ordered right\n"
    )
    sys.stdout.writelines(f"failed: {line}\n" for line in found["failed"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
