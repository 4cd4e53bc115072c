"""Activation bytes by number of MLP chunks, measured on Megatron-LM in one process.

    python tests/benchmarks/megatron_activation.py

Plans one rank with recomputed experts in 1, 2, 4 and 8 chunks, launches the emitted files for two
steps and prints what autograd kept at most beside what was predicted. The prediction is of the
reference step, whose attention keeps no scores; Megatron-LM's local layers keep them.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.engine_layouts import engine_of, spec_of
from tests.benchmarks.launched_engine import CHECKOUT
from tests.benchmarks.memfine import active_bytes, fit_active
from tuner import api
from tuner.plans.train import Plan

CHUNKS = (1, 2, 4, 8)
LIMIT_S = 300.0


def launched(chunks: int, folder: Path) -> tuple[int, int]:
    """Plan and launch; return the measured and the predicted bytes."""
    engine = engine_of("megatron-lm")
    spec = folder / f"{chunks}.yaml"
    text = spec_of(engine, "1 rank, MLP chunks 2", engine.stored)
    spec.write_text(text.replace("chunks: [2]", f"chunks: [{chunks}]"), encoding="utf-8")
    made = api.plan(spec)
    api.write(folder / f"{chunks}", made)
    assert isinstance(made.plan, Plan)
    assert made.plan.predicted is not None
    run = folder / f"{chunks}" / "launch" / "megatron-lm" / "run.sh"
    words = engine.arguments.replace("{steps}", "2").split()
    done = subprocess.run(
        ["bash", str(run), *words],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        timeout=LIMIT_S,
        env=os.environ
        | {
            "PATH": f"{engine.programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(CHECKOUT),
            "MEGATRON_LM": str(Path(__file__).parent / "metered_megatron"),
        },
    )
    (peak,) = re.findall(r"peak of saved activations: (\d+)", done.stdout)
    return int(peak), max(made.plan.predicted.activation_bytes)


def main() -> int:
    """Launch every number of chunks and print."""
    with tempfile.TemporaryDirectory(prefix="moetune-chunks-") as scratch:
        rows = [(chunks, *launched(chunks, Path(scratch))) for chunks in CHUNKS]
    constant, divided = fit_active(CHUNKS[:2], [float(seen) for _, seen, _ in rows[:2]])
    sys.stdout.write(
        f"from 1 and 2 chunks: A = {constant / 1e6:.2f} MB, B = {divided / 1e6:.2f} MB\n"
    )
    for chunks, seen, predicted in rows:
        fitted = active_bytes(constant, divided, chunks=chunks)
        sys.stdout.write(
            f"{chunks} chunks: measured {seen / 1e6:.2f} MB, A + B/c {fitted / 1e6:.2f} MB,"
            f" predicted {predicted / 1e6:.2f} MB\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
