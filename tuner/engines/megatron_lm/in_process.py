"""Restarts of Megatron-LM's training function inside its processes, by NVIDIA's extension.

Written where the plan chose such a restart over one of all processes. Read from
`inprocess_restart.py` and the parsers of core_v0.16.1 to core_v0.19.0, which have the same flags,
and from the usage guide and `Wrapper` of nvidia-resiliency-ext 0.7:

- A rank is taken to hang when its main thread runs no Python for `soft_timeout`, and is killed
  after `hard_timeout`. The defaults, 60 and 90 s, are shorter than some steps, checkpoints and
  loads are: here twice the longest of the plan. The Wrapper demands soft < hard < barrier, and
  PyTorch's own timeout (--distributed-timeout-minutes, 10) must be longer than the hard one.
- torchrun ends a node's ranks when one process ends, so that exceptions and hangs are survived in
  place and a process that dies is not: whatever started the job starts it again.
- `--inprocess-max-iterations` is parsed and never used: restarts in place have no bound.
- The end that `--exit-duration-in-mins` asks for raises SystemExit in every rank, after the last
  checkpoint is finished. `Wrapper` lets it through once all ranks have raised it; one that is some
  seconds behind the others may be interrupted first, and the exit code is then not 0.
- All ranks work (`--inprocess-active-world-size` is their number by default), none is a reserve.
- Groups of Megatron-FSDP are not among those that a restart destroys (`destroy_global_state`), and
  gloo cannot abort a collective, so neither is started so.
"""

import math
from collections.abc import Iterator
from typing import Final

from tuner.engines.launchers.shape import LaunchShape
from tuner.engines.targets import programs
from tuner.faults.forecast import RunForecast
from tuner.plans.train import VerifiedPlan

Argument = tuple[str, ...]

SOFT_TIMEOUT_S: Final = 60
HARD_TIMEOUT_S: Final = 90
BARRIER_TIMEOUT_S: Final = 120
DISTRIBUTED_TIMEOUT_MINUTES: Final = 10
"""Defaults of the parser."""
LEEWAY: Final = 2.0
"""Times the longest that a rank is known to wait; the extension's guide asks for more than that and
names no number."""

NOTES: Final = (
    "Exceptions and hangs restart the training inside its processes, which needs the package",
    "nvidia-resiliency-ext, PyTorch 2.5.1 and NCCL 2.26.2, and turns NVLink SHARP off. A process",
    "that ends takes the others along. Nothing bounds these restarts: Megatron-LM ignores its flag",
    "--inprocess-max-iterations.",
)

ENVIRONMENT: Final = """\
# A restart in place aborts NCCL, which NVLink SHARP does not survive, and the watchdog of PyTorch
# must not end the process for it.
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_NCCL_RETHROW_CUDA_ERRORS="${TORCH_NCCL_RETHROW_CUDA_ERRORS:-0}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-error}"
"""


def restarts_in_process(verified: VerifiedPlan, shape: LaunchShape) -> bool:
    """Return whether the plan chose to restart in process and Megatron-LM can.

    Plans from before the choice was recorded restart in process if the spec stated it.
    """
    run, stated = verified.predicted.run, verified.plan.goal.reliability
    if run is None or run.checkpoint_interval_steps is None:
        return False
    if run.process_restart is not None:
        is_chosen = run.process_restart.decision == "in_process"
    else:
        is_chosen = stated is not None and stated.in_process_restart is not None
    return is_chosen and not programs(("megatron-lm",)).in_process_restart_obstacle(
        zero_stage=verified.decision.zero_stage, device_kind=shape.device_kind
    )


def arguments(verified: VerifiedPlan, shape: LaunchShape) -> Iterator[Argument]:
    """Yield the flags, defaults left out; none where the plan does not restart so."""
    run = verified.predicted.run
    if run is None or not restarts_in_process(verified, shape):
        return
    yield ("--inprocess-restart",)
    # A plan fills memory: what an aborted step leaves in the allocator must not stay.
    yield ("--inprocess-empty-cuda-cache",)
    if shape.devices_per_node < min(pool.devices_per_node for pool in verified.plan.cluster.pools):
        # Megatron-LM expects a rank for every device of a node otherwise.
        yield ("--inprocess-granularity", "rank")
    soft_s = math.ceil(LEEWAY * _longest_wait_s(verified, run))
    if soft_s > SOFT_TIMEOUT_S:
        hard_s = soft_s + HARD_TIMEOUT_S - SOFT_TIMEOUT_S
        yield ("--inprocess-soft-timeout", str(soft_s))
        yield ("--inprocess-hard-timeout", str(hard_s))
        barrier_s = soft_s + BARRIER_TIMEOUT_S - SOFT_TIMEOUT_S
        yield ("--inprocess-barrier-timeout", str(barrier_s))
        yield ("--inprocess-completion-timeout", str(barrier_s))
        minutes = hard_s // 60 + 1
        if minutes > DISTRIBUTED_TIMEOUT_MINUTES:
            yield ("--distributed-timeout-minutes", str(minutes))


def _longest_wait_s(verified: VerifiedPlan, run: RunForecast) -> float:
    """Return the longest of a step, and of writing or reading a checkpoint, in seconds."""
    # The mean restart has the shorter one of processes and the longer one of nodes in it.
    shorter_s = 0.0 if run.process_restart is None else run.process_restart.in_process_s
    read_s = max(0.0, (run.restart_s or 0.0) - shorter_s)
    write_s = max(run.checkpoint_stall_s or 0.0, run.checkpoint_write_s or 0.0)
    return max(verified.predicted.step_time_s_band[1], write_s, read_s)
