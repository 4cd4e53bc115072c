"""Models of `examples/models` as serving prices them."""

from typing import Final

from tuner.backtest.known_models import SHIPPED
from tuner.costs.serve.decoder import Decoder, decoder_of
from tuner.spec.huggingface.read import read_model


def shipped(folder: str) -> Decoder:
    """Return a model that ships."""
    return decoder_of(read_model(SHIPPED / folder))


DEEPSEEK_V3: Final = shipped("deepseek-v3")
GLM_45: Final = shipped("glm-4.5")
GLM_5: Final = shipped("glm-5")
LLAMA_8B: Final = shipped("llama-3.1-8b")
LLAMA_70B: Final = shipped("llama-3.1-70b")
MINIMAX_M2: Final = shipped("minimax-m2")
MIXTRAL_8X7B: Final = shipped("mixtral-8x7b")
QWEN3_32B: Final = shipped("qwen3-32b")
QWEN35_397B: Final = shipped("qwen3.5-397b-a17b")
GPT_OSS_120B: Final = shipped("gpt-oss-120b")
