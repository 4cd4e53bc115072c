"""Output of the commands where llama.cpp serves with experts in host memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tuner.cli.goals import EstimateOptions, PlanOptions
from tuner.cli.text import print_result, whole_text
from tuner.errors import SpecError

if TYPE_CHECKING:
    from tuner.goals.llama_cpp import LlamaEstimate, LlamaPlan, LlamaPrediction
    from tuner.report.content import Block


def estimate(spec: Path, options: EstimateOptions) -> None:
    """Price a launch and print it. Exits with 1 where it does not fit."""
    from tuner.goals.llama_cpp import estimate as estimate_launch

    _refuse_profiles(options.profile)

    result = estimate_launch(spec, launch=options.launch)
    print_result(result, lambda made: whole_text(*_estimate(made)), as_json=options.as_json)
    if result.predicted.misfit:
        raise typer.Exit(1)


def plan(spec: Path, options: PlanOptions) -> None:
    """Choose a launch, write and print it. Exits with 1 where nothing fits."""
    from tuner.goals.llama_cpp import plan as plan_launch

    _refuse_profiles(options.profile)

    result = plan_launch(spec, out=options.out)
    print_result(
        result, lambda made: whole_text(*_plan(made, options.out)), as_json=options.as_json
    )
    if result.decision is None:
        raise typer.Exit(1)


def _refuse_profiles(profiles: list[Path] | None) -> None:
    if profiles:
        raise SpecError(
            f"--profile {profiles[0]}: launches of llama.cpp are priced by rated bandwidth, or by"
            " host.read_rate of the spec; leave it out"
        )


def _estimate(made: "LlamaEstimate") -> Iterator["Block"]:
    from tuner.report.content import NamedValues, Paragraph, word

    yield Paragraph(text=f"{made.source}: {made.model} with {made.engine} on {made.device}")
    yield from _prediction(made.predicted)
    change = made.smallest_change
    if change is not None:
        yield Paragraph(
            text=f"Smallest change: {change.words}: {_speed(change.predicted)} instead of"
            f" {made.predicted.misfit or _speed(made.predicted)}"
        )
    listed = [("ignored", word(flag)) for flag in made.flags_ignored]
    yield NamedValues(facts=(*listed, *(("note", word(note)) for note in made.notes)))


def _plan(made: "LlamaPlan", out: Path) -> Iterator["Block"]:
    from tuner.report.content import NamedValues, Paragraph, word

    yield Paragraph(text=f"{made.model} with {made.goal.engine} on {made.device}")
    if made.decision is None:
        yield Paragraph(text=f"Nothing fits: {made.infeasible}")
        return
    yield Paragraph(text=" ".join(("llama-server", *made.decision.options)))
    yield from _prediction(made.decision)
    facts = [
        (f"next best {place}", word(f"{change.words}: {_speed(change.predicted)}"))
        for place, change in enumerate(made.alternatives, start=1)
    ]
    facts += [
        (f"1 GiB more of {more.memory}", word(f"{more.request_ratio - 1:+.1%} of a request's time"))
        for more in made.more
    ]
    facts += [("note", word(note)) for note in made.notes]
    facts += [("written", word(str(out / name))) for name in made.files]
    yield NamedValues(facts=tuple(facts))


def _speed(predicted: "LlamaPrediction") -> str:
    return (
        f"{predicted.decode_tokens_per_s:.3g} tokens/s, prompts at"
        f" {predicted.prefill_tokens_per_s:.3g} tokens/s"
    )


def _prediction(predicted: "LlamaPrediction") -> Iterator["Block"]:
    from tuner.report.content import NamedValues, Table, word
    from tuner.units import format_bytes, format_s

    sums = {
        device.name: device.model_bytes + device.kv_bytes + device.compute_bytes
        for device in predicted.memory
    }
    fits = f"no: {predicted.misfit}" if predicted.misfit else _room(predicted, sums)
    host = (
        f"{format_bytes(predicted.host_needed_bytes)} of"
        f" {format_bytes(predicted.host_limit_bytes)}:"
        f" {format_bytes(predicted.mapped_bytes)} mapped,"
        f" {format_bytes(predicted.repacked_bytes)} repacked,"
        f" {format_bytes(predicted.pinned_bytes)} pinned"
    )
    facts = {
        "fits": fits,
        "host memory": host,
        "decode": f"{predicted.decode_tokens_per_s:.3g} tokens/s,"
        f" TPOT {format_s(predicted.tpot_s)}: host {format_s(predicted.host_s)},"
        f" device {format_s(predicted.device_s)}, waiting {format_s(predicted.sync_s)}",
        "prompt": f"{predicted.prefill_tokens_per_s:.3g} tokens/s, TTFT"
        f" {format_s(predicted.ttft_s)}",
    }
    yield NamedValues(facts=tuple((name, word(text)) for name, text in facts.items()))
    yield Table(
        caption="Memory",
        header=("device", "model", "KV cache", "compute", "in all"),
        rows=tuple(
            (
                word(device.name),
                *(
                    word(format_bytes(size))
                    for size in (
                        device.model_bytes,
                        device.kv_bytes,
                        device.compute_bytes,
                        sums[device.name],
                    )
                ),
            )
            for device in predicted.memory
        ),
    )


def _room(predicted: "LlamaPrediction", sums: dict[str, int]) -> str:
    from tuner.units import format_bytes

    used = sum(size for name, size in sums.items() if name != "host")
    return f"yes, {format_bytes(predicted.device_limit_bytes - used)} of the device left"
