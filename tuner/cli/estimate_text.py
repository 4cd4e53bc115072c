"""An estimate as text for people: time first, then where it goes, memory, and what to change."""

from collections.abc import Iterator

from tuner.cli.text import breakdown_text, columns, host_lines, labelled
from tuner.config.train_words import MICRO_BATCH, degrees, knobs, stages_words
from tuner.estimate.changes import MOST_KNOBS
from tuner.estimate.records import Change, CheckpointRoom, Estimate, PipelineRankMemory
from tuner.report.checkpoint_levels import interval_doubt
from tuner.report.memory_headroom import lost_starts_words
from tuner.report.printable import shortened
from tuner.units import (
    format_bytes,
    format_counted,
    format_flop_per_s,
    format_number,
    format_ratio,
    format_s,
    format_times,
)

SHOWN_RANKS = 8
CLOSE_RATIO = 0.95
"""Share of the usable memory; published peaks lie as far from the predicted ones."""


def estimate_text(estimate: Estimate) -> str:
    """Describe the launch and what would beat it."""
    return "\n".join(
        [
            *_what(estimate),
            "",
            *_time(estimate),
            "",
            "where a step's time goes",
            breakdown_text(estimate.breakdown_s),
            "  of this, exposed data-parallel communication takes "
            f"{format_ratio(estimate.exposed.data_ratio)} of the step",
            "",
            "highest memory of a device, by pipeline rank",
            _memory(estimate),
            *_verdict(estimate),
            *_doubts(estimate),
            "",
            *_changes(estimate),
            *_checkpoints(estimate),
            "",
            *_flags(estimate),
            *(line for note in estimate.notes for line in labelled("note", note)),
        ]
    )


def _what(estimate: Estimate) -> Iterator[str]:
    decision = estimate.decision
    yield (
        f"{estimate.source}: {estimate.model} with {estimate.engine} on {estimate.devices:,} x"
        f" {estimate.device}"
    )
    yield (
        ", ".join(
            f"{name} {degree}" for name, degree in degrees(decision).items() if name != MICRO_BATCH
        )
        + f"; {_times(estimate.rounds)}{estimate.num_microbatches:,} "
        f"micro-batch{'es' * (estimate.num_microbatches > 1)} of {decision.micro_batch_size} x "
        f"{estimate.sequence_length:,} tokens, batch {estimate.global_batch_size:,}"
    )
    layers = decision.recompute_num_layers
    whole = f"{layers} layers of each stage" if layers else "whole layers"
    by_part = ", ".join(decision.recompute_modules) or "by operation"
    recompute = whole if decision.recompute == "full" else by_part
    chunks = max(decision.chunks)
    yield from labelled(
        "stages",
        f"{stages_words(decision)}, recompute {decision.recompute}"
        f"{f' ({recompute})' if decision.recompute != 'none' else ''}"
        f"{f', {chunks} chunks of MoE layers' if chunks > 1 else ''}",
    )
    yield from labelled("with", ", ".join((estimate.precision, *knobs(decision))))


def _checkpoints(estimate: Estimate) -> Iterator[str]:
    """Say what failures cost as the launch saves, and what would lose less."""
    checkpoints = estimate.checkpoints
    if checkpoints is None:
        return
    yield ""
    if checkpoints.run is None or checkpoints.interval_steps is None:
        yield "checkpoints    none before the end: every failure starts the run again"
    else:
        how = "in the background" if checkpoints.in_background else "while training waits"
        how += " from pinned memory" * checkpoints.from_pinned_memory
        every = format_s(checkpoints.interval_steps * estimate.step_time_s)
        if checkpoints.host_interval_steps is not None:
            how += f", and every {checkpoints.host_interval_steps:,} steps on hosts"
        run = checkpoints.run
        trains = f"{format_ratio(run.effective_time_ratio)} of the time advances training"
        if checkpoints.more_spare_nodes:
            taken = format_ratio(run.time_ratios.get("checkpoints", 0.0))
            trains = f"they take {taken} of the time"
        interval = f"every {checkpoints.interval_steps:,} steps ({every})"
        yield f"checkpoints    {interval}, {how}: {trains}"
        yield f"               {_room(run.checkpoint_bytes, checkpoints.room)}"
        launched_s = checkpoints.interval_steps * estimate.step_time_s
        yield from labelled("", interval_doubt(run, launched_s=launched_s))
        if checkpoints.more_spare_nodes:
            yield from labelled(
                "spares",
                f"{format_ratio(run.time_ratios['waiting'])} of the time waits for a replacement of"
                f" a node, {format_ratio(run.effective_time_ratio)} advances training;"
                f" {format_ratio(checkpoints.spared_time_ratio)} with"
                f" {format_counted(checkpoints.more_spare_nodes, 'more spare node')}"
                " (goal.reliability.spare_nodes)",
            )
    if checkpoints.change is not None:
        share = format_ratio(checkpoints.change.run.effective_time_ratio)
        yield f"               {share} with {' '.join(checkpoints.change.lines)}"


def _room(size_bytes: int, room: CheckpointRoom | None) -> str:
    """Say what they take of shared storage, and what would bound it."""
    each = f"{format_bytes(size_bytes)} each"
    if room is None or (room.most is None and not room.change):
        return each
    kept = "all of them are kept"
    if room.most is not None:
        kept = f"{format_bytes(room.most * size_bytes)} for {room.most:,} at most"
    if not room.change:
        return f"{each}, {kept}"
    most = room.change_most
    fewer = "fewer" if most is None else f"{format_bytes(most * size_bytes)} for {most:,}"
    return f"{each}, {kept}; {fewer} with {room.change}"


def _times(rounds: int) -> str:
    return f"{rounds} times " if rounds > 1 else ""


def _time(estimate: Estimate) -> Iterator[str]:
    low, high = estimate.step_time_s_band
    slow, fast = estimate.tokens_per_s_per_device_band
    use = estimate.utilisation
    yield (
        f"step time      {format_s(estimate.step_time_s)} "
        f"(90 % band: {format_s(low)} to {format_s(high)})"
    )
    if (
        estimate.played_step_time_s is not None
        and estimate.decision.pipeline_model_parallel_size > 1
    ):
        yield (
            f"               {format_s(estimate.played_step_time_s)} with every pass of the "
            "pipeline simulated"
        )
    yield (
        f"tokens/s       {format_number(estimate.tokens_per_s_per_device)} per device "
        f"({format_number(slow)} to {format_number(fast)})"
    )
    yield (
        f"MFU            {format_ratio(use.mfu_ratio)}, HFU {format_ratio(use.hfu_ratio)} "
        f"of {use.peak_name}"
    )
    yield from labelled("", use.convention)
    yield (
        f"Megatron's log {format_flop_per_s(use.megatron_flop_per_s_per_device)} per GPU by "
        "Megatron-LM's own count"
    )


def _memory(estimate: Estimate) -> str:
    ranks = estimate.memory
    shown = list(ranks[:SHOWN_RANKS])
    if estimate.fullest_pipeline_rank >= SHOWN_RANKS:
        shown[-1] = ranks[estimate.fullest_pipeline_rank]
    rows = [_memory_row(rank, is_peak=rank is _peak_rank(estimate)) for rank in shown]
    header = ("  rank", "layers", "weights", "gradients", "optimizer", "activations", "buffers")
    table = columns(rows, header=(*header, "reserve", "total", ""))
    left = len(ranks) - len(shown)
    return f"{table}\n  and {left} more in --json" if left else table


def _peak_rank(estimate: Estimate) -> PipelineRankMemory:
    return estimate.memory[estimate.fullest_pipeline_rank]


def _memory_row(rank: PipelineRankMemory, *, is_peak: bool) -> tuple[object, ...]:
    sizes = (
        rank.weight_bytes,
        rank.gradient_bytes,
        rank.optimizer_bytes,
        rank.activation_bytes,
        rank.buffer_bytes,
        rank.reserve_bytes,
        rank.total_bytes,
    )
    return (
        f"  {rank.pipeline_rank}",
        rank.layers,
        *(format_bytes(size) for size in sizes),
        "highest" if is_peak else "",
    )


def _verdict(estimate: Estimate) -> Iterator[str]:
    peak, limit = (
        format_bytes(size) for size in (estimate.peak_memory_bytes, estimate.memory_limit_bytes)
    )
    on_device = estimate.peak_memory_bytes <= estimate.memory_limit_bytes
    is_narrow = on_device and estimate.memory_limit_bytes - estimate.peak_memory_bytes <= 1
    room = "more than a plan would use" if is_narrow else f"{limit} may be used"
    where = f"pipeline rank {estimate.fullest_pipeline_rank} needs {peak}, {room}"
    where += f": {estimate.rests_on_samples}" if estimate.rests_on_samples else ""
    yield from labelled("fits" if on_device else "DOES NOT FIT", where)
    yield from host_lines(estimate.host_memory)
    risk = (
        f"{format_ratio(estimate.out_of_memory_probability)} chance of running out of the "
        f"{format_bytes(estimate.memory_capacity_bytes)} that a device has "
        f"({format_ratio(estimate.out_of_memory_at_start_probability)} at the start)"
    )
    if estimate.fits:
        lost_s, run_s = estimate.out_of_memory_loss_s, estimate.assumed_run_s
        risk += f"; {lost_starts_words(lost_s, assumed_run_s=run_s)}"
    yield from labelled("OOM risk", risk)


def _doubts(estimate: Estimate) -> Iterator[str]:
    """Name what of the verdict does not hold, and the setting that is the reason."""
    for one in estimate.unpriced:
        yield from labelled("DOES NOT HOLD", f"the {one.changes}: {one.said}: {one.how}")


def _changes(estimate: Estimate) -> Iterator[str]:
    if estimate.smallest_change is None:
        yield (
            f"smallest change that beats it: none of {estimate.num_tried} changes of one or two "
            f"knobs is more than {format_ratio(estimate.least_gain_ratio)} better"
            if estimate.fits
            else f"no change of up to {MOST_KNOBS} knobs ({estimate.num_tried} tried) makes it fit "
            "on these devices; moetune plan says what would"
        )
        return
    smallest = estimate.smallest_change
    yield f"{_best(estimate, smallest)}: {_described(smallest, estimate)}"
    yield _sure(smallest, fits=estimate.fits)
    yield from _lines(smallest)
    if estimate.best_pair is not None:
        is_tie = estimate.best_pair.within_band and estimate.fits
        beats = "may bring more (a tie)" if is_tie else "bring more"
        yield f"two changes {beats}: {_described(estimate.best_pair, estimate)}"
        yield _sure(estimate.best_pair, fits=estimate.fits)
        yield from _lines(estimate.best_pair)
    others = [one for one in estimate.changes if one != smallest]
    if others:
        yield f"other {'single ' * estimate.fits}changes"
        rows = [
            (
                f"  {', '.join((_joined(one.what), *_set(one)))}",
                _gain(one),
                format_times(one.ratio_band),
                format_bytes(one.peak_memory_bytes),
                _remark(one, estimate),
            )
            for one in others
        ]
        yield columns(rows, header=("  change", "time", "of the launch", "memory", ""))


def _remark(change: Change, estimate: Estimate) -> str:
    if change.within_band and estimate.fits:
        return "tie"
    is_close = change.peak_memory_bytes > CLOSE_RATIO * estimate.memory_limit_bytes
    return "close to the limit" if is_close else ""


def _best(estimate: Estimate, change: Change) -> str:
    """Title of the smallest change; one that ties with the launch does not beat it."""
    if not estimate.fits:
        return "smallest change that makes it fit"
    if not change.within_band:
        return "smallest change that beats it"
    return f"best {'single change' if len(change.what) == 1 else 'two changes'} (a tie)"


def _described(change: Change, estimate: Estimate) -> str:
    remark = "" if estimate.fits else _remark(change, estimate)
    return (
        f"{_joined(change.what)} ({_gain(change)}: {format_s(change.step_time_s)} a step, "
        f"{format_bytes(change.peak_memory_bytes)}{f', {remark}' * bool(remark)})"
    )


def _joined(words: tuple[str, ...]) -> str:
    return " and ".join((", ".join(words[:-1]), words[-1]) if words[1:] else words)


def _sure(change: Change, *, fits: bool) -> str:
    """The band of the change's gain; a tie is within the error of the model."""
    band = f"    {format_times(change.ratio_band)} the launch's time (80 % band of such pairs)"
    return f"{band}: a tie, measure both" if change.within_band and fits else band


def _gain(change: Change) -> str:
    word = "less" if change.gain_ratio >= 0 else "more"
    return f"{format_ratio(abs(change.gain_ratio))} {word}"


def _lines(change: Change) -> Iterator[str]:
    yield from (f"    {line}" for line in change.lines)
    for line in change.environment:
        assignment, _, why = line.partition("  # ")
        yield f"    {assignment}"
        yield f"      because {why}"


def _set(change: Change) -> Iterator[str]:
    """Yield the variables that a change needs, e.g. `with CUDA_DEVICE_MAX_CONNECTIONS=32`."""
    for line in change.environment:
        yield line.partition("  # ")[0].replace("export", "with", 1)


def _flags(estimate: Estimate) -> Iterator[str]:
    for flag in estimate.flags_deprecated:
        yield from labelled("deprecated", flag)
    for refusal in estimate.refused_by:
        yield from labelled("manifest", refusal)
    if estimate.flags_ignored:
        yield from labelled("ignored", shortened(estimate.flags_ignored))
