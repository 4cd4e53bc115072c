"""Time that a trial takes to start and end: `python tests/benchmarks/trial_start.py`.

The reference step of a tiny model with one timed step, on two ranks, started in turn by `torchrun
--standalone` and as verification does (profilers/local_ranks.py). Printed are the medians of wall
and processor time of all processes, and the number of addresses reachable from outside and of
leftover temporary folders.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil

from profilers.steps.config import Parallelism, Stage, StepConfig, TransformerShape

RANKS = 2
LOOK_S = 0.2
LAUNCHERS = {
    "torchrun --standalone": (
        *("torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *("--no-python", sys.executable, "-P", "-m"),
    ),
    "profilers.local_ranks": ("profilers.local_ranks", f"--ranks={RANKS}"),
}


def main() -> None:
    """Print a line for each launcher."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="of each")
    repeats: int = parser.parse_args().repeats
    rows: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in LAUNCHERS}
    for _ in range(repeats):
        for name, starter in LAUNCHERS.items():
            rows[name].append(_run(starter))
    for name, result in rows.items():
        wall_s, cpu_s, doors, folders = zip(*result, strict=True)
        sys.stdout.write(
            f"{name:22} {statistics.median(wall_s):6.2f} s wall  {statistics.median(cpu_s):6.2f} s"
            f" of processors  {max(doors)} addresses beyond loopback  {max(folders)} folders left\n"
        )


def _run(starter: Sequence[str]) -> tuple[float, float, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        config, scratch = Path(folder) / "step.json", Path(folder) / "tmp"
        scratch.mkdir()
        config.write_text(_config().model_dump_json(), encoding="utf-8")
        step = ("profilers.steps", str(config), f"--report={config.with_name('report.json')}")
        before, begun_s = _cpu_s(), time.perf_counter()
        doors: set[tuple[int, int]] = set()
        with subprocess.Popen(
            [sys.executable, "-P", "-m", *starter, *step],
            env=os.environ | {"TMPDIR": str(scratch)},
            stderr=subprocess.DEVNULL,
        ) as process:
            looking = threading.Thread(target=_look, args=(process, doors))
            looking.start()
            if process.wait():
                raise SystemExit(f"{starter} ended with {process.returncode}")
            wall_s = time.perf_counter() - begun_s
            looking.join()
        left = [one for one in scratch.iterdir() if not one.name.startswith("torchinductor")]
        return wall_s, _cpu_s() - before, len(doors), len(left)


def _look(process: "subprocess.Popen[bytes]", doors: set[tuple[int, int]]) -> None:
    while process.poll() is None:
        with suppress(psutil.Error):
            own = psutil.Process(process.pid)
            for one in (own, *own.children(recursive=True)):
                for each in one.net_connections("inet"):
                    if each.status == psutil.CONN_LISTEN and each.laddr.ip != "127.0.0.1":
                        doors.add((one.pid, each.laddr.port))
        time.sleep(LOOK_S)


def _cpu_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def _config() -> StepConfig:
    return StepConfig(
        model=TransformerShape.model_validate(
            {
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 8,
                "vocab_size": 256,
                "layers": ["dense", "moe"],
                "dense_ffn_size": 48,
                "num_experts": 8,
                "top_k": 2,
                "moe_ffn_size": 16,
            }
        ),
        parallelism=Parallelism(tensor=1, pipeline=1, data=RANKS, expert=RANKS),
        stages=(Stage(num_layers=2),),
        sequence_length=32,
        global_batch_size=RANKS,
        micro_batch_size=1,
        precision="fp32",
        steps=1,
        warmup_steps=0,
        device="cpu",
    )


if __name__ == "__main__":
    main()
