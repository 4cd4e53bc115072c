"""A Hugging Face model from a folder on this disk: no network, no code of the model's, no pickle.

The folder has `config.json`, safetensors weights, and a tokenizer; without a tokenizer the bytes of
the text are its tokens, which a model of at least 256 tokens takes. Only the decoder is loaded: the
head over the vocabulary has no part in routing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from profilers.errors import MissingLibraryError, ModelUnreadableError
from profilers.routing.capture.gates import GATES
from profilers.routing.json_file import read_object

TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
BYTES: Final = 256
"""Tokens of text without a tokenizer: its bytes."""
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names that architectures give the number of experts of a layer."""
UNLOADABLE: Final = (
    *(OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError, AttributeError),
)
"""Exceptions of transformers for a folder that it cannot make a model of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A model that is ready to read."""

    decoder: torch.nn.Module
    model_type: str
    name: str
    num_layers: int
    """Decoder layers, dense ones included."""
    num_experts: int
    top_k: int
    longest: int
    """Tokens of a sequence at most."""
    vocabulary: int
    encode: Callable[[str], Sequence[int]]


def load_model(folder: Path, *, device: torch.device) -> Loaded:
    """Load a model onto a device.

    Raises:
        MissingLibraryError: transformers is not installed.
        ModelUnreadableError: the folder holds no model of a known architecture.
    """
    model_type = _model_type(folder / "config.json")
    if find_spec("transformers") is None:
        raise MissingLibraryError(
            "capture needs transformers: pip install 'moetune[torch,capture]'"
        )
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **local)
        decoder = AutoModel.from_pretrained(folder, use_safetensors=True, dtype="auto", **local)
        tokenizer = None
        if any((folder / name).exists() for name in TOKENIZERS):
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        stated = next((name for name in EXPERTS if hasattr(config, name)), EXPERTS[0])
        loaded = Loaded(
            decoder=decoder.to(device).eval(),
            model_type=model_type,
            name=folder.resolve().name,
            num_layers=int(config.num_hidden_layers),
            num_experts=int(getattr(config, stated)),
            top_k=int(config.num_experts_per_tok),
            longest=int(config.max_position_embeddings),
            vocabulary=int(config.vocab_size),
            encode=_as_bytes if tokenizer is None else lambda text: _as_tokens(tokenizer, text),
        )
    except UNLOADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelUnreadableError(f"{folder} cannot be loaded: {reason}") from error
    if tokenizer is None and loaded.vocabulary < BYTES:
        raise ModelUnreadableError(
            f"{folder} has no tokenizer and {loaded.vocabulary} tokens; bytes need {BYTES}"
        )
    return loaded


def _model_type(config: Path) -> str:
    """Return the model type of config.json, before anything heavy is imported."""
    try:
        stated = read_object(config).get("model_type")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelUnreadableError(
            f"{config}: {reason}; --model is a folder of a Hugging Face model"
        ) from error
    if stated not in GATES:
        raise ModelUnreadableError(
            f"{config}: model_type {str(stated)[:40]!r} has no known gates; those that have are"
            f" {', '.join(GATES)}"
        )
    return str(stated)


def _as_bytes(text: str) -> Sequence[int]:
    return text.encode("utf-8", errors="surrogatepass")


def _as_tokens(tokenizer: Any, text: str) -> Sequence[int]:
    ids: Sequence[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
