"""Which model a published row means, and in which formats its checkpoint is stored."""

from tests.tuner.decoders import KIMI_K2
from tuner.backtest.serving.decoders import FOLDERS, checkpoint_formats, find_decoder


def test_a_path_names_the_longest_match() -> None:
    names = {
        "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
        "nvidia/DeepSeek-R1-0528-FP4-V2": "deepseek-v3",
        "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
        "moonshotai/Kimi-K2.5": "kimi-k2",
        "someone/else": None,
    }
    found = {path: find_decoder(path) for path in names}
    assert {path: one and one.name for path, one in found.items()} == names
    assert all(find_decoder(word) for word in FOLDERS)


def test_checkpoints_keep_what_they_did_not_quantise() -> None:
    result = checkpoint_formats(KIMI_K2, precision="fp4", engine="vllm", is_blackwell=True)
    assert result is not None
    assert (result.attention, result.experts, result.kv) == ("bf16", "nvfp4", "fp8")
    assert checkpoint_formats(KIMI_K2, precision="fp3", engine="vllm", is_blackwell=True) is None
