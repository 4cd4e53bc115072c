"""Launches of llama.cpp and Ollama."""

from pathlib import Path

from tests.expect import refused
from tests.rows import each_row
from tuner.engines.llama_cpp.read import read
from tuner.engines.llama_cpp.settings import ALL_LAYERS, LlamaSettings
from tuner.engines.llama_cpp.write import script
from tuner.errors import SpecError


@each_row(
    "text, stated",
    [
        (
            "llama-server -m a.gguf -c 8192 -np 1 -ngl 99 --n-cpu-moe 20 -ub 2048 -t 8",
            {"context": 8192, "parallel": 1, "gpu_layers": 99, "host_expert_layers": 20},
        ),
        ("llama-server -hf a/b --new-switch -c 512 --new 1", {"context": 512}),
        ("llama-server -m a.gguf", {"parallel": 4, "is_unified": True, "fits_itself": True}),
        ("llama-server -m a.gguf -np 2 -cmoe", {"parallel": 2, "is_unified": False}),
        ("llama-server -m a.gguf -cmoe", {"host_expert_layers": ALL_LAYERS, "fits_itself": False}),
        (
            "llama-cli -m a.gguf -ot 'exps=CPU,x=CUDA0' --no-mmap -ctk q8_0 -ctv q8_0 -fa on",
            {"overrides": (("exps", "CPU"), ("x", "CUDA0")), "is_mapped": False, "parallel": 1},
        ),
        ("LLAMA_ARG_CTX_SIZE=4096 llama-server -m a.gguf -c 8192", {"context": 8192}),
        (
            "docker run ghcr.io/ggml-org/llama.cpp:server-cuda -m a.gguf -lm none",
            {"is_mapped": False},
        ),
        (
            "export OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_NUM_PARALLEL=2\nollama serve",
            {"context": 16384, "parallel": 2, "batch": 512, "fits_itself": True},
        ),
    ],
)
def test_reads_settings(text: str, stated: dict[str, object]) -> None:
    settings = read(text, source="the command").settings
    assert {name: getattr(settings, name) for name in stated} == stated


@each_row(
    "text, words",
    [
        ("vllm serve a", "starts none"),
        ("llama-server -m a.gguf\nllama-server -m b.gguf", "starts 2"),
        ("llama-server -c many", "no number"),
        ("llama-server -c", "value is missing"),
        ("llama-server -ot '(=CPU'", "-ot"),
        ("llama-server -ot exps", "EXPRESSION=DEVICE"),
        ("llama-server -sm row", "not priced"),
        ("llama-server --moe-cache-mib 100", "expert cache"),
        ("llama-server -md draft.gguf", "draft models"),
        ("llama-server -ctv q8_0 -fa off", "flash attention"),
        ("llama-server -ctk q9", "KV type 'q9'"),
        ("llama-server -np 0", "1 or more"),
    ],
)
def test_refuses_what_it_cannot_price(text: str, words: str) -> None:
    with refused(SpecError, "the command", words):
        read(text, source="the command")


def test_a_written_script_is_read_as_what_was_written() -> None:
    settings = LlamaSettings(
        context=8192,
        parallel=2,
        is_unified=False,
        micro_batch=1024,
        host_expert_layers=7,
        overrides=((r"blk\.8\.ffn_down_exps", "CPU"),),
        key_type="q8_0",
        value_type="q8_0",
        threads=8,
        batch_threads=16,
        is_mapped=False,
        prompt_cache_bytes=0,
        tensor_split=(3.0, 1.0),
    )
    text = script(settings, Path("/models/a b.gguf"))
    assert read(text, source="llama-server.sh").settings == settings
