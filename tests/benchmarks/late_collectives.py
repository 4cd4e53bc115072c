"""How often single collectives are late: `python tests/benchmarks/late_collectives.py`.

Two ranks over gloo, each call right after a barrier. Printed are the quantiles of the slower rank's
time, the mean, and the share of calls that took more than twice the median; a rank that leaves the
barrier late counts among them. Used by profilers/stalls.py.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from profilers.heap import keep_heap
from profilers.links.collectives import BUILDERS, prepare

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.99)


def rank(number: int, meet: Path, kinds: Sequence[str], sizes: Sequence[int], calls: int) -> None:
    """Time every kind and size; the first rank prints."""
    torch.set_num_threads(1)
    keep_heap()
    dist.init_process_group("gloo", init_method=meet.as_uri(), rank=number, world_size=2)
    group = dist.group.WORLD
    assert group is not None
    for kind in kinds:
        for size in sizes:
            run = prepare(kind, size=size, group=group, device=torch.device("cpu"))
            seconds = torch.empty(calls, dtype=torch.float64)
            for call in range(calls):
                dist.barrier()
                start_s = time.perf_counter()
                run()
                seconds[call] = time.perf_counter() - start_s
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if number == 0:
                _say(line(kind, size, 1e3 * seconds.numpy()))
    dist.destroy_process_group()


def line(kind: str, size: int, milliseconds: NDArray[np.float64]) -> str:
    """One line of the table."""
    result = np.quantile(milliseconds, QUANTILES)
    late = np.mean(milliseconds > 2.0 * np.median(milliseconds))
    cells = "".join(f"{value:8.2f}" for value in [*result, milliseconds.mean()])
    return f"{kind:16}{size:10d}{cells}{late:8.0%}"


def main() -> int:
    """Start two ranks and wait for them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--bytes", type=int, nargs="+", default=[2**12, 2**20])
    options = parser.parse_args()
    kinds = tuple(kind for kind in BUILDERS if kind != "all_to_all_uneven")
    titles = "".join(f"{f'P{100 * share:.0f}':>8}" for share in QUANTILES)
    _say(f"{'kind':16}{'bytes':>10}{titles}{'mean':>8}{'late':>8}   (ms)")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        arguments = (Path(scratch) / "meet", kinds, options.bytes, options.calls)
        ranks = [context.Process(target=rank, args=(number, *arguments)) for number in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
