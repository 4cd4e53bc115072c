"""An estimate of a launch of reinforcement learning as blocks: step, phases, memory, changes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tuner.report.content import Block, Notes, Paragraph, Table, named, words_table
from tuner.units import format_bytes, format_ratio, format_s

if TYPE_CHECKING:
    from tuner.estimate.rl.records import RlEstimate

MOMENTS: Final = ("rollout", "train", "switch")


def rl_estimate_blocks(estimate: "RlEstimate") -> Iterator[Block]:
    """Yield the blocks of an estimate."""
    yield Paragraph(text=_title(estimate))
    low, high = estimate.step_time_s_band
    late = f", {estimate.versions:g} versions late" if estimate.versions else ""
    yield named(
        ("step time", f"{format_s(estimate.step_time_s)} ({format_s(low)} to {format_s(high)})"),
        (
            "step",
            f"{estimate.samples:,} responses, {estimate.mean_tokens:,.0f} tokens a sequence, "
            f"{estimate.updates} updates; {estimate.placement}{late}",
        ),
        ("tokens", f"{estimate.tokens_per_s_per_device:,.0f} /s per device"),
        ("bound", estimate.bound_words),
        *((f"{side} idle", format_ratio(ratio)) for side, ratio in estimate.idle_ratio.items()),
        ("KV cache", f"{estimate.kv_tokens:,} tokens a rank"),
    )
    yield words_table(
        "seconds by phase",
        ("", "seconds", "of the step"),
        (
            (name, format_s(seconds), format_ratio(seconds / estimate.step_time_s))
            for name, seconds in estimate.phases_s.items()
            if seconds
        ),
    )
    if estimate.timers:
        yield _timers(estimate)
    yield _memory(estimate)
    if estimate.host_memory is not None:
        yield named(("host memory", estimate.host_memory.words))
    if estimate.misfits:
        yield Notes(notes=("does not run:", *estimate.misfits))
    yield _changes(estimate)
    yield named(
        ("ignored", f"{len(estimate.flags_ignored)} settings; --json lists them"),
        *(("note", note) for note in estimate.notes),
    )


def _title(estimate: "RlEstimate") -> str:
    sides = f"{estimate.train_devices:,} x {estimate.device}"
    if estimate.placement != "colocated":
        sides += f" train, {estimate.rollout_devices:,} roll out"
    return f"{estimate.source}: {estimate.model} with {estimate.framework} on {sides}"


def _timers(estimate: "RlEstimate") -> Table:
    return words_table(
        f"timers of the log, median of {estimate.timed_steps} steps",
        ("", "measured", "predicted", "ratio", ""),
        (
            (
                timer.phase,
                format_s(timer.measured_s),
                format_s(timer.predicted_s),
                f"{timer.ratio:.2f}",
                "slower than the machine explains" if timer.is_off else "",
            )
            for timer in estimate.timers
        ),
    )


def _memory(estimate: "RlEstimate") -> Table:
    capacity = format_bytes(estimate.memory_capacity_bytes)
    return words_table(
        f"memory of the fullest device, which has {capacity}",
        ("", "in all", "largest parts"),
        (
            (moment, format_bytes(sum(parts.values())), _largest(parts))
            for moment in MOMENTS
            for parts in (estimate.device_memory[moment],)
        ),
    )


def _largest(parts: dict[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{what} {format_bytes(size)}" for what, size in ordered if size)


def _changes(estimate: "RlEstimate") -> Block:
    if not estimate.changes:
        lacking = "gains 2 %" if estimate.fits else "makes it fit"
        tried = f"{estimate.num_tried} launches were priced"
        return Paragraph(text=f"No change of one knob {lacking}; {tried}.")
    rows = (
        (
            change.what,
            format_s(change.step_time_s),
            format_ratio(change.gain_ratio),
            format_bytes(change.peak_memory_bytes),
            " ".join(change.lines),
        )
        for change in estimate.changes
    )
    return words_table(
        f"changes of one knob, of {estimate.num_tried} that were priced",
        ("", "step", "gain", "peak", "line"),
        rows,
    )
