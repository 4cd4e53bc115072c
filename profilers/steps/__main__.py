"""Run the reference step: `torchrun --nproc-per-node N -m profilers.steps CONFIG --report REPORT`.

Works without torchrun for one rank. Exit codes: 0 done, 2 unusable configuration or number of
ranks, 77 out of memory, 1 any other error (with its traceback); a run past its deadline is killed
by SIGALRM.
"""

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from pydantic import ValidationError

from profilers.devices import pick_device
from profilers.errors import RankError
from profilers.steps.config import StepConfig
from profilers.steps.run import refusal, run, start

OUT_OF_MEMORY_EXIT = 77
PARENT_POLL_S = 1.0

CPU_OUT_OF_MEMORY = "can't allocate memory"
"""What PyTorch's CPU allocator says; it raises a plain RuntimeError."""


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
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "configuration"
        return _refuse(f"{options.config}: {field}: {first['msg']}")
    reason = refusal(config)
    if reason is not None:
        return _refuse(f"{options.config}: {reason}")
    try:
        _run_and_report(config, options.report)
    except RankError as error:
        return _refuse(str(error))
    except torch.OutOfMemoryError as error:
        return _out_of_memory(error)
    except RuntimeError as error:
        if CPU_OUT_OF_MEMORY not in str(error):
            raise
        return _out_of_memory(error)
    return 0


def _run_and_report(config: StepConfig, report: Path) -> None:
    device = pick_device(config.device, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    layout = start(config, device=device)
    result = run(config, layout)
    if layout.rank == 0:
        partial = report.with_name(f".{report.name}.partial")
        partial.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
        partial.replace(report)
    dist.destroy_process_group()


def _end_without(parent: int) -> None:
    """End this rank when the process that wanted its report is gone."""
    try:
        process = psutil.Process(parent)
        # A zombie is gone too: it waits for somebody to read its exit code, perhaps for ever.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(PARENT_POLL_S)
    except psutil.NoSuchProcess:
        pass
    os._exit(1)


def _refuse(reason: str) -> int:
    print(f"profilers.steps: {reason}", file=sys.stderr)  # noqa: T201 - a command's one line
    return 2


def _out_of_memory(error: RuntimeError) -> int:
    rank = os.environ.get("RANK", "0")
    line = str(error).splitlines()[0]
    print(f"profilers.steps: rank {rank} is out of memory: {line}", file=sys.stderr)  # noqa: T201
    return OUT_OF_MEMORY_EXIT


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="profilers.steps", description=__doc__)
    parser.add_argument("config", type=Path, help="step configuration, JSON")
    parser.add_argument("--report", type=Path, required=True, help="where rank 0 writes")
    parser.add_argument("--deadline", type=float, help="seconds after which the rank is killed")
    parser.add_argument("--parent", type=int, help="process id without which the rank ends")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    # A rank that failed must not wait for its peers while the interpreter shuts down.
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code else sys.exit(0)
