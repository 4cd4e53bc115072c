"""Writes `llama-server.sh`: every option that decides memory or time, so that nothing is fitted."""

import shlex
from pathlib import Path

from tuner.engines.llama_cpp.settings import ALL_LAYERS, BUILD, LlamaSettings

FILE_NAME = "llama-server.sh"


def options(settings: LlamaSettings) -> list[str]:
    """Return the options of a launch, each explicit."""
    is_locked, is_mapped = settings.is_locked, settings.is_mapped
    mode = "+".join(name for name, holds in (("mmap", is_mapped), ("mlock", is_locked)) if holds)
    layers = "all" if settings.gpu_layers >= ALL_LAYERS else str(settings.gpu_layers)
    words = {
        "-c": str(settings.context),
        "-np": str(settings.parallel),
        "-b": str(settings.batch),
        "-ub": str(settings.micro_batch),
        "-ngl": layers,
        "-ncmoe": str(settings.host_expert_layers),
        "-sm": "layer",
        "-ctk": settings.key_type,
        "-ctv": settings.value_type,
        "-fa": "on" if settings.flash_attention else "off",
        "-t": str(settings.threads),
        "-tb": str(settings.batch_threads or settings.threads),
        "-lm": mode or "none",
        "-cram": str(settings.prompt_cache_bytes // 2**20),
        "--fit": "off",
    }
    flags = [part for name, value in words.items() if value for part in (name, value)]
    if settings.tensor_split:
        flags += ["-ts", ",".join(f"{share:g}" for share in settings.tensor_split)]
    for expression, device in settings.overrides:
        flags += ["-ot", f"{expression}={device}"]
    return [
        *flags,
        "-kvu" if settings.is_unified else "-no-kvu",
        "-kvo" if settings.cache_on_device else "-nkvo",
        "--repack" if settings.repacks else "--no-repack",
        "--op-offload" if settings.offloads_batches else "--no-op-offload",
    ]


def script(settings: LlamaSettings, model: Path) -> str:
    """Return a shell script that starts the server."""
    words = ["llama-server", "-m", shlex.quote(str(model))]
    lines, rest = [], [shlex.quote(word) for word in options(settings)]
    while rest:
        count = 2 if len(rest) > 1 and not rest[1].startswith("-") else 1
        lines.append(" ".join(rest[:count]))
        rest = rest[count:]
    body = " \\\n  ".join([" ".join(words), *lines, '"$@"'])
    return (
        "#!/usr/bin/env bash\n"
        f"# Options of llama.cpp {BUILD}; not verified by a launch.\n"
        "set -euo pipefail\n"
        f"exec {body}\n"
    )
