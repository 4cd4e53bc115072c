"""A Hugging Face model from a folder on this disk: no network, no code of the model's, no pickle.

The folder has `config.json`, safetensors weights, and a tokenizer; without a tokenizer the bytes of
the text are its tokens, which a model of at least 256 tokens takes. Only the decoder is loaded: the
head over the vocabulary has no part in routing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from profilers.errors import MissingLibraryError, ModelUnreadableError
from profilers.routing.capture.gates import GATES
from profilers.routing.capture.text import BYTES, Encode, as_bytes
from profilers.routing.json_file import read_object

CONFIG: Final = "config.json"
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
"""What architectures call the number of experts of a layer."""
UNLOADABLE: Final = (OSError, ValueError, RuntimeError, ImportError, LookupError, TypeError)
"""What transformers raises for a folder that it cannot make a model of."""


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
    encode: Encode


def load_model(folder: Path, *, device: torch.device) -> Loaded:
    """Load a model onto a device.

    Raises:
        MissingLibraryError: transformers is not installed.
        ModelUnreadableError: the folder holds no model of a known architecture.
    """
    model_type = _model_type(folder)
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
    except UNLOADABLE as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelUnreadableError(f"{folder} cannot be loaded: {reason}") from error
    vocabulary = int(config.vocab_size)
    if tokenizer is None and vocabulary < BYTES:
        raise ModelUnreadableError(
            f"{folder} has no tokenizer and {vocabulary} tokens; bytes need {BYTES}"
        )
    return Loaded(
        decoder=decoder.to(device).eval(),
        model_type=model_type,
        name=folder.resolve().name,
        num_layers=int(config.num_hidden_layers),
        num_experts=_num_experts(config.to_dict(), folder),
        top_k=int(config.num_experts_per_tok),
        longest=int(config.max_position_embeddings),
        encode=as_bytes if tokenizer is None else _encoder(tokenizer, vocabulary, folder),
    )


def _model_type(folder: Path) -> str:
    """What config.json says, before anything heavy is imported."""
    try:
        stated = read_object(folder / CONFIG).get("model_type")
    except OSError as error:
        raise ModelUnreadableError(
            f"{folder / CONFIG}: {error.strerror}; --model is a folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise ModelUnreadableError(f"{folder / CONFIG}: {error}") from error
    if stated not in GATES:
        raise ModelUnreadableError(
            f"{folder / CONFIG}: model_type {str(stated)[:40]!r} has no known gates; those that"
            f" have are {', '.join(GATES)}"
        )
    return str(stated)


def _num_experts(config: Mapping[str, Any], folder: Path) -> int:
    for name in EXPERTS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelUnreadableError(f"{folder / CONFIG}: none of {', '.join(EXPERTS)} is a number")


def _encoder(tokenizer: Any, vocabulary: int, folder: Path) -> Encode:
    def encode(text: str) -> list[int]:
        ids = [int(each) for each in tokenizer(text, add_special_tokens=False)["input_ids"]]
        if ids and max(ids) >= vocabulary:
            raise ModelUnreadableError(
                f"{folder}: its tokenizer has token {max(ids)}, its model only {vocabulary}"
            )
        return ids

    return encode
