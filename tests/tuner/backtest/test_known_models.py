"""Which shipped model a published row names."""

from tuner.backtest.known_models import find_model


def test_rows_name_shipped_models() -> None:
    named = {
        "Nemotron_3_Nano": "nemotron-3-nano",
        "Nemotron_3_5_Lightning": "nemotron-3.5-lightning",
        "Nemotron V3 Ultra 550B (26.04)": "nemotron-3-ultra",
        "Qwen2.5 32B 2-node": "qwen2.5-32b",
        "GPT-OSS 20B": "gpt-oss-20b",
        "Llama-3.3-Nemotron-Super-49B": None,
        "GLM-5.5 Air": None,
        "DeepSeek-V2.5 236B": None,
        "Nemotron": None,
        "": None,
    }
    found = {name: find_model(name) for name in named}
    assert {name: one and one.name for name, one in found.items()} == named
