"""Loads a model with llama.cpp's library and prints the buffers of its log as JSON.

Runs in an environment of its own with llama-cpp-py-sync 0.11739 (build b11739) and knows nothing of
moetune. RPC servers on loopback stand in for devices.

    python tests/benchmarks/llama_engine.py serve PORT
    python tests/benchmarks/llama_engine.py load '{"file": ..., "ports": [PORT], ...}'
"""

import ctypes
import json
import os
import re
import sys
from importlib import import_module
from typing import Any

TYPES = {"f16": 1, "q4_0": 2, "q8_0": 8}
BUFFER = re.compile(r"(\S+)\s+(model|KV|compute) buffer size =\s*([\d.]+) MiB")


def serve(port: int) -> None:
    """Serve the processor as a device."""
    rpc = import_module("llama_cpp_py_sync.rpc")
    rpc.start_rpc_server(f"127.0.0.1:{port}", devices=["CPU"], n_threads=1)


def load(placement: dict[str, Any]) -> list[list[Any]]:
    """Return device, kind and MiB of every buffer that the log names."""
    bindings = import_module("llama_cpp_py_sync._cffi_bindings")
    rpc = import_module("llama_cpp_py_sync.rpc")
    ffi, library = bindings.get_ffi(), bindings.get_lib()
    lines: list[str] = []

    def note(_level: int, text: Any, _data: Any) -> None:
        lines.append(ffi.string(text).decode(errors="replace"))

    log = ffi.callback("void(int,const char*,void*)", note)
    library.llama_log_set(ffi.cast("ggml_log_callback", log), ffi.NULL)
    ports = placement["ports"]
    devices = rpc.rpc_devices([f"127.0.0.1:{port}" for port in ports]) if ports else []
    kept: list[Any] = []
    model = library.llama_model_default_params()
    model.devices = kept_array(ffi, kept, "ggml_backend_dev_t[]", [*devices, ffi.NULL])
    model.n_gpu_layers = placement["gpu_layers"]
    model.load_mode = 1 if placement["is_mapped"] else 0
    if placement["tensor_split"]:
        shares = [*placement["tensor_split"], *[0.0] * (128 - len(placement["tensor_split"]))]
        model.tensor_split = kept_array(ffi, kept, "float[]", shares)
    expressions = placement["host"]
    if expressions:
        base = ctypes.CDLL("libggml-base.so.0")
        base.ggml_backend_dev_buffer_type.restype = ctypes.c_void_p
        base.ggml_backend_dev_buffer_type.argtypes = [ctypes.c_void_p]
        processor = bindings.get_backend_lib().ggml_backend_dev_by_name(b"CPU")
        host = base.ggml_backend_dev_buffer_type(int(ffi.cast("uintptr_t", processor)))
        kind = "struct llama_model_tensor_buft_override[]"
        overrides = ffi.new(kind, len(expressions) + 1)
        for place, expression in enumerate(expressions):
            text = ffi.new("char[]", expression.encode())
            kept.append(text)
            overrides[place].pattern = text
            overrides[place].buft = ffi.cast("ggml_backend_buffer_type_t", host)
        model.tensor_buft_overrides = overrides
        kept.append(overrides)
    loaded = library.llama_model_load_from_file(placement["file"].encode(), model)
    if loaded == ffi.NULL:
        raise SystemExit("".join(lines)[-2000:])
    context = library.llama_context_default_params()
    context.n_ctx = placement["context"]
    context.n_batch = max(2048, placement["micro_batch"])
    context.n_ubatch = placement["micro_batch"]
    context.n_seq_max = context.n_outputs_max = placement["parallel"]
    context.n_outputs_max_per_seq = 1
    context.kv_unified = placement["is_unified"]
    context.type_k = context.type_v = TYPES[placement["cache_type"]]
    context.offload_kqv = placement["cache_on_device"]
    context.flash_attn_type = 1
    context.swa_full = False
    if library.llama_init_from_model(loaded, context) == ffi.NULL:
        raise SystemExit("".join(lines)[-2000:])
    found = BUFFER.findall("".join(lines))
    return [[_device(name, ports), kind, float(size)] for name, kind, size in found]


def kept_array(ffi: Any, kept: list[Any], kind: str, values: list[Any]) -> Any:
    """Return a C array that lives as long as `kept`."""
    array = ffi.new(kind, values)
    kept.append(array)
    return array


def _device(name: str, ports: list[int]) -> str:
    port = re.search(r":(\d+)\]", name)
    return "host" if port is None else str(ports.index(int(port[1])))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        sys.stdout.write(json.dumps(load(json.loads(sys.argv[2]))) + "\n")
        sys.stdout.flush()
        # The library ends the process with a signal while its threads still run.
        os._exit(0)
