"""Run the reference step on this rank: `python -P -m profilers.steps CONFIG --report REPORT`.

Several ranks of one host are started by `python -P -m profilers.local_ranks --ranks N` before
`profilers.steps`, those of several nodes by torchrun; one rank needs neither. Exit codes: 0 done,
2 unusable configuration or number of ranks, 77 out of memory, 1 any other error (with its
traceback); a run past its deadline is killed by SIGALRM. `--memory-limit 2GiB` holds every rank to
that much for model and step, as a smaller device would (profilers/steps/limit.py); `--progress
FILE` writes every timed step as it is done.
"""

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
import torch.distributed as dist
from pydantic import ValidationError

from profilers.devices import is_out_of_memory, pick_device
from profilers.errors import RankError, first_problem
from profilers.heap import map_blocks
from profilers.local_ranks import LOOPBACK_ONLY, RENDEZVOUS
from profilers.steps.config import StepConfig
from profilers.steps.run import refusal, run, start

OUT_OF_MEMORY_EXIT = 77
PARENT_POLL_S = 1.0

SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB|TiB)")
UNITS: Final = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class _UnwritableError(Exception):
    """A file that this rank has to write cannot be opened."""


def main(arguments: list[str] | None = None) -> int:
    """Run the configuration on this rank and return its exit code."""
    options = _parse(arguments)
    if options.deadline is not None:
        # The default action ends the process even inside a collective that never returns.
        signal.setitimer(signal.ITIMER_REAL, options.deadline)
    if options.parent is not None:
        threading.Thread(target=_end_without, args=(options.parent,), daemon=True).start()
    try:
        config = StepConfig.model_validate_json(options.config.read_text(encoding="utf-8"))
    except OSError as error:
        return _refuse(f"{options.config}: {error.strerror}")
    except ValidationError as error:
        return _refuse(f"{options.config}: {first_problem(error)}")
    if options.memory_limit is not None:
        config = config.model_copy(update={"memory_limit_bytes": options.memory_limit})
    reason = refusal(config)
    if reason is not None:
        return _refuse(f"{options.config}: {reason}")
    try:
        _run_and_report(config, options.report, options.progress)
    except (RankError, _UnwritableError) as error:
        return _refuse(str(error))
    except (MemoryError, RuntimeError) as error:
        lack = _lack_of_memory(error)
        if lack is None:
            raise
        return _out_of_memory(lack)
    return 0


def _run_and_report(config: StepConfig, report: Path, progress: Path | None) -> None:
    if not dist.is_torchelastic_launched() and RENDEZVOUS not in os.environ:
        # gloo opens a socket even for a single rank. profilers/local_ranks.py has named a device.
        os.environ.update(LOOPBACK_ONLY)
    device = pick_device(config.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    if config.memory_limit_bytes is not None and device.type == "cpu":
        map_blocks()
    layout = start(config, device=device)
    with _progress_of(progress if layout.rank == 0 else None) as on_step:
        result = run(config, layout, on_step=on_step)
    if layout.rank == 0:
        partial = report.with_name(f".{report.name}.partial")
        partial.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(report)
    dist.destroy_process_group()


@contextmanager
def _progress_of(file: Path | None) -> Iterator[Callable[[float], None]]:
    """Return a function that writes a line for every timed step, or does nothing without a file."""
    if file is None:
        yield lambda _seconds: None
        return
    try:
        lines = file.open("w", encoding="utf-8", buffering=1)
    except OSError as error:
        raise _UnwritableError(f"{file}: {error.strerror}") from error

    def write_step(seconds: float) -> None:
        # A disk that is full loses the line, not the step.
        with suppress(OSError):
            print(json.dumps({"step_s": seconds}), file=lines)

    try:
        yield write_step
    finally:
        with suppress(OSError):
            lines.close()


def _end_without(parent: int) -> None:
    """End this rank when the process that wanted its report is gone."""
    try:
        process = psutil.Process(parent)
        # A zombie has ended too: it waits for its parent to read its exit code, perhaps forever.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(PARENT_POLL_S)
    except psutil.NoSuchProcess:
        pass
    os._exit(1)


def _refuse(reason: str) -> int:
    print(f"profilers.steps: {reason}", file=sys.stderr)  # noqa: T201 - a command's one line
    return 2


def _lack_of_memory(error: BaseException | None) -> Exception | None:
    """Find what the device or the host had no room for; a pipeline wraps it in its own error."""
    while isinstance(error, Exception):
        if is_out_of_memory(error):
            return error
        error = error.__cause__
    return None


def _out_of_memory(error: Exception) -> int:
    rank = os.environ.get("RANK", "0")
    line = (str(error) or type(error).__name__).splitlines()[0]
    print(f"profilers.steps: rank {rank} is out of memory: {line}", file=sys.stderr)  # noqa: T201
    return OUT_OF_MEMORY_EXIT


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="profilers.steps", description=__doc__)
    parser.add_argument("config", type=Path, help="step configuration, JSON")
    parser.add_argument("--report", type=Path, required=True, help="where rank 0 writes")
    parser.add_argument("--deadline", type=float, help="seconds after which the rank is killed")
    parser.add_argument("--parent", type=int, help="process id without which the rank ends")
    parser.add_argument("--memory-limit", type=_size, help="of each rank, e.g. 2GiB")
    parser.add_argument("--progress", type=Path, help="where rank 0 writes each step, JSON lines")
    return parser.parse_args(arguments)


def _size(text: str) -> int:
    size_match = SIZE.fullmatch(text)
    size = round(float(size_match[1]) * UNITS[size_match[2]]) if size_match else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 2GiB; units: {[*UNITS]}")
    return size


if __name__ == "__main__":
    # A rank that failed must not wait for its peers while the interpreter shuts down.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
