"""Compare predicted buffers of llama.cpp with those of its log.

    python -m tests.benchmarks.llama_buffers                 # with the stored logs of b11739
    python -m tests.benchmarks.llama_buffers --engine PYTHON # with new logs, which replace them

PYTHON is an interpreter with llama-cpp-py-sync (tests/benchmarks/llama_engine.py).
"""

import json
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests import gguf_files
from tests.benchmarks.bars import parse, say
from tuner.engines.llama_cpp.memory import memory_of
from tuner.engines.llama_cpp.model import LlamaModel
from tuner.engines.llama_cpp.settings import HOST, LlamaSettings
from tuner.spec.gguf import read_gguf

STORED: Final = Path(__file__).parent / "data" / "llama_buffers.json"
EXPERTS: Final = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
USUAL: Final[dict[str, Any]] = {
    "devices": 1,
    "gpu_layers": 99,
    "host": [],
    "tensor_split": [],
    "context": 4096,
    "micro_batch": 512,
    "parallel": 1,
    "is_unified": False,
    "cache_type": "f16",
    "cache_on_device": True,
    "is_mapped": True,
}
MODELS: Final = ("moe", "dense", "sliding_window", "latent")
PLACEMENTS: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"host": [EXPERTS]},
    {"context": 8192, "micro_batch": 128, "cache_type": "q8_0"},
    {"gpu_layers": 3},
    {"parallel": 4, "is_unified": True},
    {"parallel": 2, "micro_batch": 1024},
    {"host": [rf"blk\.[01]{EXPERTS}"], "context": 16384},
    {"devices": 2, "tensor_split": [3, 1], "host": [r"blk\.0\.ffn_norm"]},
    {"cache_on_device": False},
    {"gpu_layers": 0, "devices": 0},
    {"host": ["ffn_down_exps"], "is_mapped": False},
)
MIB: Final = 2**20


class Compared(NamedTuple):
    """A buffer of the log beside the predicted one."""

    model: str
    placement: dict[str, Any]
    device: str
    kind: str
    logged_mib: float
    predicted_mib: float
    num_logged: int
    """Lines of the log that were added, each rounded."""

    @property
    def is_equal(self) -> bool:
        """Whether both are equal within the rounding of the log, or of an 8 KiB page a line."""
        return abs(self.logged_mib - self.predicted_mib) <= 0.0055 * max(self.num_logged, 1)

    @property
    def error_ratio(self) -> float:
        """Error relative to the logged size; 0 within rounding."""
        if self.is_equal:
            return 0.0
        return abs(self.predicted_mib / self.logged_mib - 1) if self.logged_mib else math.inf


def placements() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each model with each placement that it can have."""
    for model in MODELS:
        for placement in PLACEMENTS:
            if model != "dense" or "exps" not in str(placement):
                yield model, placement


def compared(folder: Path, logs: Sequence[dict[str, Any]]) -> Iterator[Compared]:
    """Predict the buffers of every log; the models are written into a folder."""
    paths = {name: getattr(gguf_files, name)(folder / f"{name}.gguf") for name in MODELS}
    models = {name: LlamaModel(file=read_gguf(path)) for name, path in paths.items()}
    for log in logs:
        placement = USUAL | log["placement"]
        settings = LlamaSettings(
            context=placement["context"],
            parallel=placement["parallel"],
            is_unified=placement["is_unified"],
            micro_batch=placement["micro_batch"],
            gpu_layers=placement["gpu_layers"],
            overrides=tuple((expression, HOST) for expression in placement["host"]),
            tensor_split=tuple(placement["tensor_split"]),
            key_type=placement["cache_type"],
            value_type=placement["cache_type"],
            cache_on_device=placement["cache_on_device"],
            is_mapped=placement["is_mapped"],
        )
        memory = memory_of(
            models[log["model"]], settings, shares=[1.0] * placement["devices"], is_cuda=False
        )
        logged: dict[tuple[str, str], list[float]] = defaultdict(list)
        for device, kind, size in log["buffers"]:
            logged[device, kind].append(size)
        named = {str(number): device for number, device in enumerate(memory.devices)}
        for device, buffers in {**named, "host": memory.host}.items():
            for kind, size in (
                ("model", buffers.model_bytes),
                ("KV", buffers.kv_bytes),
                ("compute", buffers.compute_bytes),
            ):
                lines = logged[device, kind]
                yield Compared(
                    log["model"],
                    log["placement"],
                    device,
                    kind,
                    sum(lines),
                    size / MIB,
                    len(lines),
                )


def is_usual(row: Compared) -> bool:
    """Whether a row is of a device that holds all layers, but for experts, and their cache."""
    placement = USUAL | row.placement
    return (
        row.device != "host"
        and placement["gpu_layers"] >= 99
        and placement["devices"] == 1
        and placement["cache_on_device"]
    )


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


def measured(engine: str, folder: Path) -> list[dict[str, Any]]:
    """Load every placement with the engine and return its logs."""
    script = str(Path(__file__).parent / "llama_engine.py")
    paths = {name: getattr(gguf_files, name)(folder / f"{name}.gguf") for name in MODELS}
    logs = []
    with ExitStack() as stack:
        ports = [_free_port(), _free_port()]
        for port in ports:
            server = subprocess.Popen(
                [engine, script, "serve", str(port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(server.wait)
            stack.callback(server.terminate)
        time.sleep(5)
        for name, placement in placements():
            full = USUAL | placement
            given = {**full, "file": str(paths[name]), "ports": ports[: full["devices"]]}
            run = subprocess.run(
                [engine, script, "load", json.dumps(given)],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            buffers = json.loads(run.stdout.splitlines()[-1])
            logs.append({"model": name, "placement": placement, "buffers": buffers})
    return logs


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors by kind of buffer."""
    options = parse(__doc__, {"--engine": ""}, arguments)
    with tempfile.TemporaryDirectory(prefix="moetune-") as name:
        if options.engine:
            logs = measured(options.engine, Path(name))
            lines = ",\n".join(json.dumps(log) for log in logs)
            STORED.write_text(f"[\n{lines}\n]\n")
        logs = json.loads(STORED.read_text())
        rows = list(compared(Path(name), logs))
    say(f"{len(logs)} placements")
    for kind in ("model", "KV", "compute"):
        of_kind = [
            row for row in rows if row.kind == kind and (row.logged_mib or row.predicted_mib)
        ]
        for what, chosen in (
            ("all", of_kind),
            ("devices that hold all layers", [row for row in of_kind if is_usual(row)]),
        ):
            equal = sum(row.is_equal for row in chosen)
            worst = max(row.error_ratio for row in chosen)
            say(f"{kind:8} {what:29} {equal} of {len(chosen)} equal, worst {worst:.1%} off")
    return 0


if __name__ == "__main__":
    sys.exit(main())
