"""Serving by llama.cpp with experts in host memory: launches priced, and a launch chosen.

Rates come from rated bandwidth unless the spec states a measured `read_rate` of the host.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from profilers.files import read_bounded
from profilers.records import Record
from tuner.engines.llama_cpp.choice import (
    LlamaMachine,
    PricedLaunch,
    fewest_layers,
    host_needed_bytes,
    machine_of,
    placed,
    price,
    ranked,
)
from tuner.engines.llama_cpp.memory import Buffers
from tuner.engines.llama_cpp.model import LlamaModel
from tuner.engines.llama_cpp.read import LlamaLaunch, read
from tuner.engines.llama_cpp.settings import BUILD, LlamaSettings
from tuner.engines.llama_cpp.write import FILE_NAME, options, script
from tuner.errors import OutputError, SpecError
from tuner.estimate.serving.registry import launch_text
from tuner.output import write_directory
from tuner.spec.files import LARGEST_FILE_BYTES, shown_path
from tuner.spec.gguf import read_gguf
from tuner.spec.serving.llama_cpp import LlamaGoal, LlamaSpecFile
from tuner.spec.spec_file import read_spec_keys, validate_spec
from tuner.units import format_bytes

MEDIAN_ERROR: Final = 0.22
WORST_ERROR: Final = 2.2
"""Median and largest errors of decode rates from rated bandwidth, over 11 published launches whose
hosts were left out in turn (tests/benchmarks/llama_rates.py)."""
MORE_BYTES: Final = 2**30
TOP: Final = 3


class LlamaSpec(NamedTuple):
    """A spec with its model and machine."""

    path: Path
    file: LlamaSpecFile
    model: LlamaModel
    machine: LlamaMachine
    device: str

    @property
    def goal(self) -> LlamaGoal:
        """The goal of the spec."""
        return self.file.goal


class DeviceMemory(Record):
    """Bytes that a launch allocates on one device, or on the host."""

    name: str
    """Name of the device, or `host`."""
    model_bytes: int
    """Bytes of weights."""
    kv_bytes: int
    """Bytes of the KV cache."""
    compute_bytes: int
    """Bytes of compute buffers."""


class LlamaPrediction(Record):
    """Memory and rates of one launch."""

    options: tuple[str, ...]
    """Options of the launch, each explicit."""
    memory: tuple[DeviceMemory, ...]
    """Buffers by device, the host last."""
    mapped_bytes: int
    """Bytes of host weights in the mapped file."""
    repacked_bytes: int
    """Bytes of host weights in another layout."""
    pinned_bytes: int
    """Bytes of host weights in pinned memory."""
    host_needed_bytes: int
    """Bytes of the host below which pages are read from the disk again and again."""
    device_limit_bytes: int
    """Bytes of the device that a launch may take."""
    host_limit_bytes: int
    """Bytes of the host that a launch may take."""
    misfit: str
    """Reason why the launch does not run; empty where it does."""
    prefill_tokens_per_s: float
    """Prompt tokens per second."""
    decode_tokens_per_s: float
    """Generated tokens per second of all requests together."""
    ttft_s: float
    """Seconds to the first token of a request alone."""
    tpot_s: float
    """Seconds per token of a request."""
    host_s: float
    """Seconds of a decode step on the host."""
    device_s: float
    """Seconds of a decode step on the device."""
    sync_s: float
    """Seconds of a decode step in which device and host wait for each other; assumed."""
    request_s: float
    """Seconds of a request, prompt and tokens."""


class LlamaChange(Record):
    """A launch that differs, with what it gains."""

    words: str
    """Differences, such as `-ncmoe 48 -> 31`."""
    predicted: LlamaPrediction


class LlamaEstimate(Record):
    """Output of `moetune estimate --json` for a launch of llama.cpp."""

    source: str
    """Name of the launch in messages."""
    engine: str
    """Name of the engine with its build."""
    model: str
    """Name of the model."""
    device: str
    """Name of the device."""
    predicted: LlamaPrediction
    median_error_ratio: float
    """Median error of decode rates over published launches, hosts left out in turn."""
    smallest_change: LlamaChange | None
    """Launch with the fewest options changed that runs, or is faster; None: there is none."""
    flags_ignored: tuple[str, ...]
    """Flags without effect on memory and time, or unknown."""
    notes: tuple[str, ...]
    """Remarks on what was assumed."""


class MoreMemory(Record):
    """Gain of one more GiB."""

    memory: Literal["device", "host"]
    """Kind of memory."""
    request_ratio: float
    """Seconds of a request with it, over those without."""


class LlamaPlanGoal(Record):
    """Goal of a plan."""

    kind: Literal["llama.cpp"]
    """Always `llama.cpp`: the plan is no deployment's, and no other command reads it."""
    engine: str
    """Name of the engine with its build."""


class LlamaPlan(Record):
    """`plan.json` of a server of llama.cpp."""

    goal: LlamaPlanGoal
    model: str
    """Name of the model."""
    device: str
    """Name of the device."""
    spec_sha256: str
    """Hash of the spec."""
    decision: LlamaPrediction | None
    """Chosen launch; None where nothing runs."""
    infeasible: str
    """Reason why nothing runs; empty where something does."""
    alternatives: tuple[LlamaChange, ...]
    """Next best launches."""
    more: tuple[MoreMemory, ...]
    """Gains of one more GiB of each memory."""
    num_priced: int
    """Launches that were compared."""
    median_error_ratio: float
    """Median error of decode rates over published launches, hosts left out in turn."""
    notes: tuple[str, ...]
    """Remarks on what was assumed."""
    files: tuple[str, ...]
    """Files written beside this."""


def read_llama_spec(path: Path) -> LlamaSpec:
    """Read a spec whose engine is llama.cpp, and the header of its model.

    Raises:
        SpecError: one line: the file, the field's path, its value, the rule.
    """
    file = validate_spec(read_spec_keys(path), path, LlamaSpecFile)
    version = file.goal.engine.version
    if version not in ("", BUILD):
        raise SpecError(
            f"{shown_path(path)}: goal.engine.version {version:.40}: {BUILD} is described; leave it"
            " out to price by that"
        )
    model = LlamaModel(file=read_gguf(file.model))
    if file.goal.slot_tokens > model.longest_tokens:
        raise SpecError(
            f"{shown_path(path)}: goal: requests of {file.goal.slot_tokens:,} tokens, and the model"
            f" has {model.longest_tokens:,}; lower max_model_len or the traffic"
        )
    pool = file.cluster.pools[0]
    return LlamaSpec(path, file, model, machine_of(pool), pool.sheet.name)


def estimate(spec_path: Path, *, launch: str) -> LlamaEstimate:
    """Price a launch of llama-server, llama-cli or Ollama.

    Raises:
        SpecError: the spec or the launch is unusable.
    """
    spec = read_llama_spec(spec_path)
    source, text, _ = launch_text(launch)
    stated = read(text, source=source)
    if (
        stated.settings.threads > spec.machine.rates.cores
        or stated.settings.batch_threads > spec.machine.rates.cores
    ):
        raise SpecError(
            f"{source}: more threads than the {spec.machine.rates.cores} physical cores of"
            " cluster.pools.host, which makes decode many times slower; state fewer"
        )
    if stated.settings.host_expert_layers and not spec.model.expert_layers:
        raise SpecError(f"{source}: -ncmoe of a dense model, which has no experts; leave it out")
    now = _launched(stated, spec)
    better = next(_changes(now, spec), None)
    return LlamaEstimate(
        source=source,
        engine=f"llama.cpp {BUILD}",
        model=_model_name(spec),
        device=spec.device,
        predicted=_prediction(now, spec),
        median_error_ratio=MEDIAN_ERROR,
        smallest_change=better,
        flags_ignored=stated.ignored,
        notes=(*stated.notes, *_notes(spec)),
    )


def _launched(stated: LlamaLaunch, spec: LlamaSpec) -> PricedLaunch:
    """Price the launch, where the engine places something itself as it does by bytes."""
    cores = spec.machine.rates.cores
    settings = replace(stated.settings, threads=stated.settings.threads or cores)
    if not settings.fits_itself or not spec.machine.device_bytes:
        return price(spec.model, settings, spec.machine, spec.goal)
    by = fewest_layers if stated.program == "ollama" else placed
    return by(spec.model, settings, spec.machine, spec.goal)


def _changes(now: PricedLaunch, spec: LlamaSpec) -> Iterator[LlamaChange]:
    """Yield launches with few options changed that run where this does not, or are faster."""
    settings, model, machine = now.settings, spec.model, spec.machine
    copied = replace(settings, is_mapped=False)
    refitted = (
        settings,
        *(
            replace(settings, micro_batch=size, batch=max(settings.batch, size))
            for size in (1024, 2048, 4096)
        ),
        copied,
        replace(settings, context=spec.goal.slot_tokens * settings.parallel),
    )
    others = [placed(model, variant, machine, spec.goal) for variant in refitted]
    others.append(price(model, copied, machine, spec.goal))
    runs = [
        launch
        for launch in others
        if not launch.misfit and (now.misfit or launch.request_s < 0.97 * now.request_s)
    ]
    for launch in sorted(runs, key=lambda launch: (_num_changed(now, launch), launch.request_s)):
        yield LlamaChange(words=_differences(now, launch), predicted=_prediction(launch, spec))


def _pairs(settings: LlamaSettings) -> dict[str, str]:
    words = options(settings)
    return {
        word: following if not following.startswith("-") else ""
        for word, following in zip(words, [*words[1:], "-"], strict=True)
        if word.startswith("-")
    }


def _num_changed(first: PricedLaunch, second: PricedLaunch) -> int:
    return len(set(_pairs(first.settings).items()) - set(_pairs(second.settings).items()))


def _differences(first: PricedLaunch, second: PricedLaunch) -> str:
    before, after = _pairs(first.settings), _pairs(second.settings)
    changed = [
        f"{name} {before.get(name, 'absent')} -> {value}" if value else name
        for name, value in after.items()
        if before.get(name) != value
    ]
    return ", ".join(changed) or "nothing"


def plan(spec_path: Path, *, out: Path) -> LlamaPlan:
    """Choose a launch, and write its script and the plan.

    Raises:
        SpecError: the spec or the model is unusable.
        OutputError: the folder cannot be written.
    """
    spec = read_llama_spec(spec_path)
    launches = ranked(spec.model, spec.machine, spec.goal)
    best = launches[0]
    runs = [launch for launch in launches[1:] if not launch.misfit][:TOP]
    files = {} if best.misfit else {FILE_NAME: script(best.settings, spec.file.model.absolute())}
    made = LlamaPlan(
        goal=LlamaPlanGoal(kind="llama.cpp", engine=f"llama.cpp {BUILD}"),
        model=_model_name(spec),
        device=spec.device,
        spec_sha256=hashlib.sha256(
            read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES)
        ).hexdigest(),
        decision=None if best.misfit else _prediction(best, spec),
        infeasible=best.misfit,
        alternatives=tuple(
            LlamaChange(words=_differences(best, launch), predicted=_prediction(launch, spec))
            for launch in runs
        ),
        more=() if best.misfit else tuple(_more(best, spec)),
        num_priced=len(launches),
        median_error_ratio=MEDIAN_ERROR,
        notes=_notes(spec),
        files=tuple(files),
    )
    if best.misfit:
        drop_launch(out)
    write_directory(
        out, {**files, "plan.json": made.model_dump_json(indent=2) + "\n"}, executable=tuple(files)
    )
    return made


def drop_launch(folder: Path) -> None:
    """Remove the script of a plan that stood there before.

    Raises:
        OutputError: it cannot be removed.
    """
    try:
        (folder / FILE_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"cannot remove {str(folder / FILE_NAME)!r}: {error.strerror}") from error


def _more(best: PricedLaunch, spec: LlamaSpec) -> Iterator[MoreMemory]:
    for kind, machine in (
        ("device", spec.machine.with_more(device_bytes=MORE_BYTES)),
        ("host", spec.machine.with_more(host_bytes=MORE_BYTES)),
    ):
        then = ranked(spec.model, machine, spec.goal)[0]
        yield MoreMemory.model_validate(
            {"memory": kind, "request_ratio": then.request_s / best.request_s}
        )


def _prediction(launch: PricedLaunch, spec: LlamaSpec) -> LlamaPrediction:
    memory, rates, traffic = launch.memory, launch.rates, spec.goal.traffic
    named = [(f"{spec.device} {n}", device) for n, device in enumerate(memory.devices)]
    running = min(traffic.concurrency, launch.settings.parallel)
    return LlamaPrediction(
        options=tuple(options(launch.settings)),
        memory=tuple(_device_memory(*item) for item in (*named, ("host", memory.host))),
        mapped_bytes=memory.mapped_bytes,
        repacked_bytes=memory.repacked_bytes,
        pinned_bytes=memory.pinned_bytes,
        host_needed_bytes=host_needed_bytes(spec.model, launch.settings, memory),
        device_limit_bytes=int(spec.machine.device_bytes),
        host_limit_bytes=int(spec.machine.host_bytes),
        misfit=launch.misfit,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_tokens_per_s=running / rates.decode_s,
        ttft_s=traffic.input_tokens / rates.prefill_tokens_per_s + rates.decode_s,
        tpot_s=rates.decode_s,
        host_s=rates.host_s,
        device_s=rates.device_s,
        sync_s=rates.sync_s,
        request_s=launch.request_s,
    )


def _device_memory(name: str, buffers: Buffers) -> DeviceMemory:
    return DeviceMemory(
        name=name,
        model_bytes=buffers.model_bytes,
        kv_bytes=buffers.kv_bytes,
        compute_bytes=buffers.compute_bytes,
    )


def _model_name(spec: LlamaSpec) -> str:
    return str(spec.model.file.values.get("general.name", spec.file.model.name))[:80]


def _notes(spec: LlamaSpec) -> tuple[str, ...]:
    host = spec.file.cluster.pools[0].host
    assert host is not None
    notes = [
        "the copies of host weights in the device's compute buffer follow the engine's sources; no"
        " CUDA device checked them",
    ]
    if host.read_rate is None:
        notes.insert(
            0,
            f"rates are those of rated bandwidth: half of 11 published ones lie within"
            f" {MEDIAN_ERROR:.0%}, the worst of seven hosts ran at {1 / (1 + WORST_ERROR):.0%};"
            " state host.read_rate, as llama-bench measures it",
        )
    if spec.machine.is_unified:
        notes.append(f"device and host share one memory of {format_bytes(spec.machine.host_bytes)}")
    return tuple(notes)
