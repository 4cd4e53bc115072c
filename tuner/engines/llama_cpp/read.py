"""Reads launches of `llama-server` and `llama-cli`, and Ollama's environment.

Flags:   common/arg.cpp of b11434, the newest sources that a registry's package ships; each also by
         its variable `LLAMA_ARG_*`. Those that change neither memory nor time are passed over.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final

from tuner.engines.llama_cpp.settings import ALL_LAYERS, LlamaSettings
from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_COUNTS: Final = {
    "context": "-c --ctx-size",
    "parallel": "-np --parallel",
    "batch": "-b --batch-size",
    "micro_batch": "-ub --ubatch-size",
    "threads": "-t --threads",
    "batch_threads": "-tb --threads-batch",
    "host_expert_layers": "-ncmoe --n-cpu-moe",
    "gpu_layers": "-ngl --gpu-layers --n-gpu-layers",
    "prompt_cache_bytes": "-cram --cache-ram",
}
_WORDS: Final = {"key_type": "-ctk --cache-type-k", "value_type": "-ctv --cache-type-v"}
_SWITCHES: Final = {
    "is_unified": ("-kvu --kv-unified", "-no-kvu --no-kv-unified"),
    "cache_on_device": ("-kvo --kv-offload", "-nkvo --no-kv-offload"),
    "repacks": ("--repack", "-nr --no-repack"),
    "offloads_batches": ("--op-offload", "--no-op-offload"),
    "whole_windows": ("--swa-full", ""),
}
_TURNED: Final = {"flash_attention": "-fa --flash-attn", "fits_itself": "-fit --fit"}
_ON: Final = ("on", "1", "auto", "true", "enabled")
_OFF: Final = ("off", "0", "false", "disabled")
_VALUED: Final = ("-ot --override-tensor -ts --tensor-split -lm --load-mode",)
_REFUSED: Final = {
    "-sm --split-mode": "row and tensor splits are not priced; take layer",
    "-md --model-draft -hfd --spec-draft-model": "draft models are not priced; leave it out",
    "--override-kv": "it changes the model's sizes; edit the file instead",
    "--rpc": "devices of other hosts are not priced; leave it out",
    "-ncffn --n-cpu-ffn": "dense layers on the host are not priced by it; take -ot",
    "--moe-cache-mib": "the expert cache evicts by a rule that is not described; leave it out",
    "--mmproj -mm": "projectors are not priced; leave it out",
}
_UNREAD_SWITCHES: Final = frozenset(
    """
    --jinja --no-jinja --metrics --props --slots --no-slots --no-webui --webui --no-ui --ui
    --verbose -v --log-disable --no-warmup --warmup -cb --cont-batching -nocb --no-cont-batching
    --no-context-shift --context-shift --offline --cache-prompt --no-cache-prompt --perf --no-perf
    --embedding --embeddings --reranking --no-host --check-tensors --mlock --no-mmap --direct-io
    -cnv -no-cnv -st -sp --special --simple-io --log-prefix --log-timestamps -cmoe --cpu-moe
    --ignore-eos --no-mmproj --agent --lora-init-without-apply --escape -e --no-escape -i
    """.split()  # noqa: SIM905 - a list of words
)
_OLLAMA: Final = {
    "context": "OLLAMA_CONTEXT_LENGTH",
    "parallel": "OLLAMA_NUM_PARALLEL",
}
OLLAMA_DEFAULTS: Final = LlamaSettings(
    context=4096, parallel=1, is_unified=False, batch=512, fits_itself=True, flash_attention=False
)
"""Launch of Ollama's runner without any variable; it places whole layers itself."""
_PROGRAMS: Final = frozenset({"llama-server", "llama-cli", "llama-completion", "server", "main"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLaunch:
    """A launch with what was passed over."""

    program: str
    settings: LlamaSettings
    ignored: tuple[str, ...] = ()
    """Flags that change neither memory nor time, or are not known."""
    notes: tuple[str, ...] = ()


def read(text: str, *, source: str) -> LlamaLaunch:
    """Read a script or command.

    Raises:
        SpecError: it starts no such program, several, or one with a flag that cannot be priced.
    """
    shell = shell_text(text, source=source)
    starts = [start for command in shell.commands if (start := _start(command.words))]
    if len(starts) != 1:
        count = f"{len(starts)} of its programs" if starts else "none"
        raise SpecError(
            f"{source}: starts {count}; give one command of llama-server, llama-cli or ollama serve"
        )
    program, environment, words = starts[0]
    variables = {**shell.environment, **environment}
    try:
        if program == "ollama":
            return _ollama(variables)
        return _server(program, [*_from_environment(variables), *words])
    except SpecError as error:
        raise SpecError(f"{source}: {error}") from error


def _start(words: Sequence[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """Return program, variables and arguments of a command that starts the engine."""
    variables = {}
    for place, word in enumerate(words):
        name = PurePath(word).name
        key, equals, value = word.partition("=")
        if equals and re.fullmatch(r"(LLAMA_ARG|OLLAMA)_\w+", key):
            variables[key] = value
        elif name == "ollama" and words[place + 1 : place + 2] == ("serve",):
            return "ollama", variables, []
        elif name in _PROGRAMS and (name.startswith("llama") or place == 0):
            return name, variables, [*words[place + 1 :]]
        elif "llama.cpp:" in word:
            return "llama-server", variables, [*words[place + 1 :]]
    return None


def _from_environment(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield flags that the variables stand for; those of the command override them."""
    for names in (*_COUNTS.values(), *_WORDS.values()):
        long = next(name for name in names.split() if name.startswith("--"))
        stated = {f"LLAMA_ARG_{long[2:].upper().replace('-', '_')}", _VARIABLES.get(long, "")}
        for name in stated & variables.keys():
            yield from (long, variables[name])


_VARIABLES: Final = {
    "--parallel": "LLAMA_ARG_N_PARALLEL",
    "--batch-size": "LLAMA_ARG_BATCH",
    "--ubatch-size": "LLAMA_ARG_UBATCH",
    "--gpu-layers": "LLAMA_ARG_N_GPU_LAYERS",
}


def _server(program: str, words: Sequence[str]) -> LlamaLaunch:
    is_server = "server" in program
    values: dict[str, Any] = {"parallel": 4 if is_server else 1, "is_unified": is_server}
    overrides: list[tuple[str, str]] = []
    ignored: list[str] = []
    given: set[str] = set()
    rest = [part for word in words if word != "$@" for part in _parts(word)]
    while rest:
        word = rest.pop(0)
        given.add(word)
        _refuse(word, rest)
        if _switch(word, values):
            continue
        if word in ("-cmoe", "--cpu-moe"):
            values["host_expert_layers"] = ALL_LAYERS
        elif word in _UNREAD_SWITCHES or (word.startswith("--") and _lacks_value(word, rest)):
            ignored.append(word)
        elif not word.startswith("-") or not rest:
            raise SpecError(f"{shown_value(word)}: a flag's value is missing, or is no flag")
        else:
            _valued(word, rest.pop(0), values, overrides, ignored)
    slots = values["parallel"]
    if slots < 0:
        values["parallel"] = 4
    elif "-np" in given or "--parallel" in given:
        values["is_unified"] = bool(given & {"-kvu", "--kv-unified"})
    is_placed = bool(overrides) or bool(
        given
        & {"-ngl", "--gpu-layers", "--n-gpu-layers", "-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe"}
    )
    values["fits_itself"] = values.get("fits_itself", True) and not is_placed
    settings = LlamaSettings(**values, overrides=tuple(overrides))
    return LlamaLaunch(program=program, settings=settings, ignored=tuple(ignored))


def _lacks_value(word: str, rest: Sequence[str]) -> bool:
    """Return whether a flag that is not known stands alone."""
    known = " ".join((*_COUNTS.values(), *_WORDS.values(), *_TURNED.values(), *_VALUED)).split()
    return word not in known and (not rest or re.match(r"-\D", rest[0]) is not None)


def _parts(word: str) -> list[str]:
    """Split `--flag=value`, which the engine does not take and wrappers write."""
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("--") else [word]


def _refuse(word: str, rest: Sequence[str]) -> None:
    for names, reason in _REFUSED.items():
        if word in names.split() and not (
            word in ("-sm", "--split-mode") and rest[:1] == ["layer"]
        ):
            raise SpecError(f"{word}: {reason}")


def _switch(word: str, values: dict[str, Any]) -> bool:
    for field, (on, off) in _SWITCHES.items():
        if word in on.split() or word in off.split():
            values[field] = word in on.split()
            return True
    if word in ("--mlock", "--no-mmap"):
        values |= {"is_locked": True} if word == "--mlock" else {"is_mapped": False}
        return True
    return False


def _valued(
    word: str,
    value: str,
    values: dict[str, Any],
    overrides: list[tuple[str, str]],
    ignored: list[str],
) -> None:
    for table, reader in ((_COUNTS, _count), (_WORDS, _word), (_TURNED, _is_on)):
        for field, names in table.items():
            if word in names.split():
                values[field] = reader(word, value)
                return
    if word in ("-ot", "--override-tensor"):
        overrides.extend(_overrides(value))
    elif word in ("-ts", "--tensor-split"):
        values["tensor_split"] = tuple(_share(part) for part in re.split(r"[,/]", value))
    elif word in ("-lm", "--load-mode"):
        if value not in ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"):
            raise SpecError(f"{word} {shown_value(value)}: no load mode")
        values |= {
            "is_mapped": value in ("auto", "mmap", "mmap+mlock"),
            "is_locked": "lock" in value,
        }
    else:
        ignored.append(f"{word} {value}")


def _word(_: str, value: str) -> str:
    return value


def _is_on(word: str, value: str) -> bool:
    if value not in (*_ON, *_OFF):
        raise SpecError(f"{word} {shown_value(value)}: on, off or auto")
    return value in _ON


def _count(word: str, value: str) -> int:
    if word in ("-ngl", "--gpu-layers", "--n-gpu-layers") and value in ("all", "auto", "-1", "-2"):
        return ALL_LAYERS
    try:
        count = int(value)
    except ValueError:
        raise SpecError(f"{word} {shown_value(value)}: no number") from None
    if word in ("-cram", "--cache-ram"):
        return max(count, 0) * 2**20
    if word in ("-np", "--parallel") and count == -1:
        return count
    if word in ("-t", "--threads", "-tb", "--threads-batch") and count < 0:
        return 0
    if not 0 <= count < 2**31:
        raise SpecError(f"{word} {count}: 0 or more")
    return count


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        raise SpecError(f"-ts {shown_value(text)}: no number") from None
    if not 0 <= share < 1e9:
        raise SpecError(f"-ts {shown_value(text)}: a share is 0 or more")
    return share


def _overrides(value: str) -> Iterator[tuple[str, str]]:
    for part in value.split(","):
        expression, equals, device = part.rpartition("=")
        if not equals or len(expression) > 1000:
            raise SpecError(f"-ot {shown_value(part)}: write EXPRESSION=DEVICE")
        try:
            re.compile(expression)
        except re.error as error:
            raise SpecError(f"-ot {shown_value(expression)}: {error}") from error
        yield expression, device


def _ollama(variables: Mapping[str, str]) -> LlamaLaunch:
    values: dict[str, Any] = {
        field: _count(name, variables[name]) for field, name in _OLLAMA.items() if name in variables
    }
    kind = variables.get("OLLAMA_KV_CACHE_TYPE", "f16")
    values |= {"key_type": kind, "value_type": kind}
    values["flash_attention"] = variables.get("OLLAMA_FLASH_ATTENTION", "0") in ("1", "true")
    settings = replace(OLLAMA_DEFAULTS, **values)
    # Ollama multiplies its context, which is that of one request.
    settings = replace(settings, context=settings.context * settings.parallel)
    known = {*_OLLAMA.values(), "OLLAMA_KV_CACHE_TYPE", "OLLAMA_FLASH_ATTENTION"}
    ignored = tuple(f"{name}={value}" for name, value in variables.items() if name not in known)
    note = "Ollama places whole layers itself; the most that fit are assumed on the device"
    return LlamaLaunch(program="ollama", settings=settings, ignored=ignored, notes=(note,))
