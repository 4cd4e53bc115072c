"""Both checkpoint levels of a job: seconds, bytes, failure rates, and what makes one impossible.

Seconds of a checkpoint on hosts, as NVIDIA's resiliency extension saves it, which Megatron-LM uses:

    part       bytes of a node: of the checkpoint, over the nodes that write
    stall      (1 + replicas) copies to the node's memory, its own and those that it holds, and
               replicas * part / bandwidth of the node: replicas are sent before training goes on
    until it   as many files in memory, which each process writes one after the other
    is durable
    memory     (FILES + queued) (1 + replicas) parts: the last complete files, those being written,
               and those of the processes, which wait there for a write to shared storage to end
    restart    reading the files, and a copy back to the devices; a replaced node's part comes over
               its NICs first. Frozen weights that no checkpoint holds come from shared storage

Copies to the host go into memory that was not there before. Rates of that and of the files are a
process's, from the profile or as measured with Megatron-LM (tuner/faults/resolved.py).

Failures of devices and nodes take a node with its memory, a stated share of them its replicas too;
those of processes leave it.

Not covered: writes to hosts that slow down training, replicas within a node.
"""

from typing import Final

from tuner.config.host_memory import STATED_AS
from tuner.faults.levels import FailureClass, FailureRates, Level, RunSeconds
from tuner.faults.reliability import (
    FailureModel,
    HostLevel,
    Jobs,
    copy_s,
    fresh_copy_s,
    loss_rate_per_s,
    process_rate_per_s,
    read_s,
    reread_s,
    stall_s,
    write_s,
)
from tuner.units import format_bytes, format_counted, format_s

FILES: Final = 2
"""Sets of files per copy: the last complete set and the one being written."""


def obstacle(jobs: Jobs, reliability: FailureModel, *, replicas: int, step_s: float) -> str:
    """Say why a number of replicas is not possible; empty where it is."""
    host = reliability.host
    assert host is not None
    nodes, group = round(float(jobs.nodes)), replicas + 1
    if host.obstacle:
        return host.obstacle
    if not loss_rate_per_s(jobs, reliability) > 0.0:
        return (
            "checkpoints on hosts need a rate at which nodes are lost: state node_mtbf, nodes_lost"
            " or device_mtbf"
        )
    if nodes % group:
        return (
            f"{format_counted(replicas, 'replica')} of every node's copy need groups of {group}"
            f" nodes, into which {format_counted(nodes, 'node')} cannot be divided"
        )
    if replicas and float(jobs.devices) % nodes:
        return (
            f"replicas need as many devices on every node, and {float(jobs.devices):,.0f} devices"
            f" are spread over {format_counted(nodes, 'node')}"
        )
    needed = host_bytes(jobs, replicas=replicas)
    if host.memory_bytes is not None and needed > host.memory_bytes:
        return (
            f"checkpoints on hosts with {format_counted(replicas, 'replica')} take"
            f" {format_bytes(needed)} of a node's memory, and {memory_words(host)}"
        )
    if host.interval_s is not None and host.interval_s < step_s:
        return (
            f"host_interval {format_s(host.interval_s)} is shorter than a step of"
            f" {format_s(step_s)}"
        )
    return ""


def host_bytes(jobs: Jobs, *, replicas: int, queued: int = 1) -> float:
    """Bytes that copies take of the memory of a node.

    Args:
        jobs: whose nodes hold the copies.
        replicas: other nodes that hold a copy of a node's.
        queued: copies that processes hold at one time, as they are not written yet.
    """
    return (FILES + queued) * (1 + replicas) * copied_bytes(jobs)


def memory_words(host: HostLevel) -> str:
    """Say what copies may take of a node's memory, where that is known."""
    default = ", half of what was measured" if host.memory_is_assumed else ""
    return f"{format_bytes(host.memory_bytes or 0.0)} may be taken{default} ({STATED_AS})"


def failure_rates(jobs: Jobs, reliability: FailureModel) -> FailureRates:
    """Failures per second by what they take."""
    host = reliability.host
    together = 0.0 if host is None else host.together_ratio
    losses = float(loss_rate_per_s(jobs, reliability))
    return FailureRates(
        process_per_s=float(process_rate_per_s(jobs, reliability)),
        node_per_s=losses * (1.0 - together),
        together_per_s=losses * together,
    )


def run_seconds(
    jobs: Jobs, reliability: FailureModel, *, replicas: int, step_s: float
) -> RunSeconds:
    """Durations of checkpoints and restarts on both levels."""
    host, storage = reliability.host, reliability.storage
    assert host is not None
    copied_s, loaded_s = float(fresh_copy_s(jobs, storage)), float(read_s(jobs, storage))
    sent_s = copied_bytes(jobs) / host.node_bytes_per_s
    writer_bytes = float(jobs.checkpoint_bytes) / float(jobs.writers)
    written_s = writer_bytes / host.save_bytes_per_s
    back_s = writer_bytes / host.load_bytes_per_s + float(copy_s(jobs, storage))
    back_s += float(reread_s(jobs, storage))
    restart_s, shorter_s = reliability.restart_s, reliability.process_restart_s
    return RunSeconds(
        step_s=step_s,
        stall_s={
            Level.HOST: (1 + replicas) * copied_s + replicas * sent_s,
            Level.SHARED: float(stall_s(jobs, storage)) if storage.asynchronous else copied_s,
        },
        durable_after_s={
            Level.HOST: (1 + replicas) * written_s,
            Level.SHARED: float(write_s(jobs, storage)),
        },
        restart_s={
            (Level.HOST, FailureClass.PROCESS): shorter_s + back_s,
            (Level.HOST, FailureClass.NODE): restart_s + sent_s + back_s,
            (Level.SHARED, FailureClass.PROCESS): shorter_s + loaded_s,
            (Level.SHARED, FailureClass.NODE): restart_s + loaded_s,
            (Level.SHARED, FailureClass.TOGETHER): restart_s + loaded_s,
        },
    )


def copied_bytes(jobs: Jobs) -> float:
    """Bytes of a node's memory that one copy of its part of a checkpoint takes."""
    return float(jobs.checkpoint_bytes) / min(float(jobs.nodes), float(jobs.writers))
