"""An estimate as text for people: time first, then where it goes, memory, and what to change."""

from collections.abc import Iterator

from tuner.cli.text import whole_text
from tuner.config.equal_stages import equal_stages
from tuner.config.train_words import MICRO_BATCH, degrees, knobs, stages_words
from tuner.estimate.changes import MOST_KNOBS
from tuner.estimate.records import CheckpointEstimate, CheckpointRoom, Estimate, TrainingChange
from tuner.report.breakdown import breakdown_table
from tuner.report.content import Block, NamedValues, Paragraph, Table, named, size, word
from tuner.report.memory_headroom import lost_starts_words
from tuner.report.printable import shortened
from tuner.report.run_section import interval_doubt
from tuner.units import (
    format_bytes,
    format_counted,
    format_flop_per_s,
    format_number,
    format_ratio,
    format_s,
    format_times,
)

CLOSE_RATIO = 0.95
"""Share of the usable memory; published peaks lie as far from the predicted ones."""


def estimate_text(estimate: Estimate) -> str:
    """Describe the launch and what would beat it."""
    return whole_text(
        Paragraph(
            text=f"{estimate.source}: {estimate.model} with {estimate.engine} on "
            f"{estimate.devices:,} x {estimate.device}"
        ),
        _launch(estimate),
        _time(estimate),
        breakdown_table({"the launch": estimate.breakdown_s}),
        Paragraph(
            text="Of this, exposed data-parallel communication takes "
            f"{format_ratio(estimate.exposed.data_ratio)} of the step."
        ),
        _memory(estimate),
        _verdict(estimate),
        *_changes(estimate),
        *(
            _checkpoints(estimate, checkpoints)
            for checkpoints in (estimate.checkpoints,)
            if checkpoints is not None
        ),
        named(
            *(("deprecated", flag) for flag in estimate.flags_deprecated),
            *(("manifest", refusal) for refusal in estimate.refused_by),
            ("ignored", shortened(estimate.flags_ignored)),
            *(("note", note) for note in estimate.notes),
        ),
    )


def _launch(estimate: Estimate) -> NamedValues:
    decision, layers = estimate.decision, estimate.decision.recompute_num_layers
    whole = f"{layers} layers of each stage" if layers else "whole layers"
    by_part = ", ".join(decision.recompute_modules) or "by operation"
    what = {"full": f" ({whole})", "none": ""}.get(decision.recompute, f" ({by_part})")
    chunks = max(decision.chunks)
    rounds = f"{estimate.rounds} times " if estimate.rounds > 1 else ""
    return named(
        (
            "degrees",
            ", ".join(
                f"{name} {degree}"
                for name, degree in degrees(decision).items()
                if name != MICRO_BATCH
            ),
        ),
        (
            "batch",
            f"{rounds}{estimate.num_microbatches:,} "
            f"micro-batch{'es' * (estimate.num_microbatches > 1)} of {decision.micro_batch_size} x "
            f"{estimate.sequence_length:,} tokens, batch {estimate.global_batch_size:,}",
        ),
        (
            "stages",
            f"{stages_words(decision)}, recompute {decision.recompute}{what}"
            f"{f', {chunks} chunks of MoE layers' if chunks > 1 else ''}",
        ),
        ("with", ", ".join((estimate.precision, *knobs(decision)))),
    )


def _time(estimate: Estimate) -> NamedValues:
    low, high = estimate.step_time_s_band
    slow, fast = estimate.tokens_per_s_per_device_band
    use, simulated_s = estimate.utilisation, estimate.played_step_time_s
    is_piped = estimate.decision.pipeline_model_parallel_size > 1
    return named(
        (
            "step time",
            f"{format_s(estimate.step_time_s)} (90 % band: {format_s(low)} to {format_s(high)})",
        ),
        (
            "simulated",
            simulated_s is not None
            and is_piped
            and f"{format_s(simulated_s)} with every pass of the pipeline simulated",
        ),
        (
            "tokens/s",
            f"{format_number(estimate.tokens_per_s_per_device)} per device "
            f"({format_number(slow)} to {format_number(fast)})",
        ),
        (
            "MFU",
            f"{format_ratio(use.mfu_ratio)}, HFU {format_ratio(use.hfu_ratio)} of {use.peak_name}; "
            f"{use.convention}",
        ),
        (
            "Megatron's log",
            f"{format_flop_per_s(use.megatron_flop_per_s_per_device)} per GPU by Megatron-LM's own "
            "count",
        ),
    )


def _memory(estimate: Estimate) -> Table:
    rows = [
        (
            word(rank.layers),
            *map(size, (rank.weight_bytes, rank.gradient_bytes, rank.optimizer_bytes)),
            *map(size, (rank.activation_bytes, rank.buffer_bytes, rank.reserve_bytes)),
            size(rank.total_bytes),
        )
        for rank in estimate.memory
    ]
    equal = equal_stages([tuple(cell.text for cell in row) for row in rows])
    parts = ("weights", "gradients", "optimizer", "activations", "buffers", "reserve", "total")
    return Table(
        caption="Highest memory of a device, by pipeline rank",
        header=("ranks", "layers", *parts),
        rows=tuple((word(group.label), *rows[group.stages[0]]) for group in equal),
    )


def _verdict(estimate: Estimate) -> NamedValues:
    peak, limit = estimate.peak_memory_bytes, estimate.memory_limit_bytes
    is_narrow = 0 <= limit - peak <= 1
    room = "more than a plan would use" if is_narrow else f"{format_bytes(limit)} may be used"
    rests = f": {estimate.rests_on_samples}" if estimate.rests_on_samples else ""
    run_s, host = estimate.assumed_run_s, estimate.host_memory
    lost = lost_starts_words(estimate.out_of_memory_loss_s, assumed_run_s=run_s)
    return named(
        (
            "fits" if peak <= limit else "DOES NOT FIT",
            f"pipeline rank {estimate.fullest_pipeline_rank} needs {format_bytes(peak)}, "
            f"{room}{rests}",
        ),
        *((("host memory" if host.fits else "DOES NOT FIT", host.words),) if host else ()),
        (
            "OOM risk",
            f"{format_ratio(estimate.out_of_memory_probability)} chance of running out of the "
            f"{format_bytes(estimate.memory_capacity_bytes)} that a device has "
            f"({format_ratio(estimate.out_of_memory_at_start_probability)} at the start)"
            f"{f'; {lost}' * estimate.fits}",
        ),
        *(
            ("DOES NOT HOLD", f"the {setting.changes}: {setting.said}: {setting.how}")
            for setting in estimate.unpriced
        ),
    )


def _changes(estimate: Estimate) -> Iterator[Block]:
    smallest, pair, fits = estimate.smallest_change, estimate.best_pair, estimate.fits
    if smallest is None:
        none = (
            f"smallest change that beats it: none of {estimate.num_tried} changes of one or two "
            f"knobs is more than {format_ratio(estimate.least_gain_ratio)} better"
            if fits
            else f"no change of up to {MOST_KNOBS} knobs ({estimate.num_tried} tried) makes it fit "
            "on these devices; moetune plan says what would"
        )
        yield Paragraph(text=none)
        return
    best = "smallest change that beats it"
    if not fits:
        best = "smallest change that makes it fit"
    elif smallest.within_band:
        best = f"best {'single change' if len(smallest.what) == 1 else 'two changes'} (a tie)"
    yield _change(best, smallest, estimate)
    if pair is not None:
        beats = "may bring more (a tie)" if pair.within_band and fits else "bring more"
        yield _change(f"two changes {beats}", pair, estimate)
    others = [change for change in estimate.changes if change != smallest]
    if others:
        yield Table(
            caption=f"other {'single ' * fits}changes",
            header=("change", "time", "of the launch", "memory", ""),
            rows=tuple(
                (
                    word(f"{_joined(change.what)}{_environment(change)}"),
                    word(_gain(change)),
                    word(format_times(change.ratio_band)),
                    size(change.peak_memory_bytes),
                    word(_remark(change, estimate)),
                )
                for change in others
            ),
        )


def _change(title: str, change: TrainingChange, estimate: Estimate) -> Table:
    """Describe a change, with what to write into the launch and why."""
    remark = "" if estimate.fits else _remark(change, estimate)
    tie = ": a tie, measure both" if change.within_band and estimate.fits else ""
    environment = (line.partition("  # ") for line in change.environment)
    return Table(
        caption=f"{title}: {_joined(change.what)} ({_gain(change)}: {format_s(change.step_time_s)}"
        f" a step, {format_bytes(change.peak_memory_bytes)}{f', {remark}' * bool(remark)});"
        f" {format_times(change.ratio_band)} the launch's time (80 % band of such pairs){tie}",
        header=("", ""),
        rows=(
            *((word(line), word("")) for line in change.lines),
            *((word(line), word(why)) for line, _, why in environment),
        ),
    )


def _remark(change: TrainingChange, estimate: Estimate) -> str:
    if change.within_band and estimate.fits:
        return "tie"
    is_close = change.peak_memory_bytes > CLOSE_RATIO * estimate.memory_limit_bytes
    return "close to the limit" if is_close else ""


def _joined(words: tuple[str, ...]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1]) if words[1:] else words)


def _gain(change: TrainingChange) -> str:
    word = "less" if change.gain_ratio >= 0 else "more"
    return f"{format_ratio(abs(change.gain_ratio))} {word}"


def _environment(change: TrainingChange) -> str:
    """Name the variables that a change needs, e.g. `, with CUDA_DEVICE_MAX_CONNECTIONS=32`."""
    lines = (line.partition("  # ")[0] for line in change.environment)
    return "".join(f", {line.replace('export', 'with', 1)}" for line in lines)


def _checkpoints(estimate: Estimate, checkpoints: CheckpointEstimate) -> NamedValues:
    """Say what failures cost as the launch saves, and what would lose less."""
    run, steps, change = checkpoints.run, checkpoints.interval_steps, checkpoints.change
    instead = change and (
        f"{format_ratio(change.run.effective_time_ratio)} of the time advances training with"
        f" {' '.join(change.lines)}"
    )
    if run is None or steps is None:
        never = "none before the end: every failure starts the run again"
        return named(("checkpoints", never), ("instead", instead))
    interval_s, hosts = steps * estimate.step_time_s, checkpoints.host_interval_steps
    how = "in the background" if checkpoints.in_background else "while training waits"
    how += " from pinned memory" * checkpoints.from_pinned_memory
    how += "" if hosts is None else f", and every {hosts:,} steps on hosts"
    trains = f"{format_ratio(run.effective_time_ratio)} of the time advances training"
    waits = (
        f"{format_ratio(run.time_ratios['waiting'])} of the time waits for a replacement of a node,"
        f" {trains.replace(' of the time', '')}; {format_ratio(checkpoints.spared_time_ratio)} with"
        f" {format_counted(checkpoints.more_spare_nodes, 'more spare node')}"
        " (goal.reliability.spare_nodes)"
        if checkpoints.more_spare_nodes
        else ""
    )
    if waits:
        trains = f"they take {format_ratio(run.time_ratios.get('checkpoints', 0.0))} of the time"
    return named(
        ("checkpoints", f"every {steps:,} steps ({format_s(interval_s)}), {how}: {trains}"),
        ("their size", _room(run.checkpoint_bytes, checkpoints.room)),
        ("doubtful", interval_doubt(run, launched_s=interval_s)),
        ("spares", waits),
        ("instead", instead),
    )


def _room(size_bytes: int, room: CheckpointRoom | None) -> str:
    """Say what they take of shared storage, and what would bound it."""
    checkpoint_size = f"{format_bytes(size_bytes)} each"
    if room is None or (room.most is None and not room.change):
        return checkpoint_size
    kept = "all of them are kept"
    if room.most is not None:
        kept = f"{format_bytes(room.most * size_bytes)} for {room.most:,} at most"
    max_kept = room.change_most
    fewer = (
        "fewer" if max_kept is None else f"{format_bytes(max_kept * size_bytes)} for {max_kept:,}"
    )
    return f"{checkpoint_size}, {kept}" + (f"; {fewer} with {room.change}" if room.change else "")
