"""A GGUF model as llama.cpp sees it: layers, attention and experts.

Source:  src/llama-hparams.cpp, src/llama-model.cpp and src/models/ of b11434.
Not covered: recurrent layers (`ssm.*`), encoders, and windows of architectures that are not listed;
they are refused, because their caches are of other sizes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from tuner.errors import SpecError
from tuner.spec.files import shown_path
from tuner.spec.gguf import GgufFile, Tensor

EXPERTS: Final = re.compile(r"\.ffn_(up|down|gate|gate_up)_(ch|)exps")
"""The engine's own expression for routed experts; shared ones do not match."""
WINDOW_PERIODS: Final[Mapping[str, tuple[int, bool]]] = {
    "afmoe": (4, False),
    "cohere2": (4, False),
    "cohere2moe": (4, True),
    "exaone-moe": (4, False),
    "exaone4": (4, False),
    "gemma2": (2, False),
    "gemma3": (6, False),
    "gemma3n": (5, False),
    "gemma4": (0, False),
    "gpt-oss": (2, False),
    "laguna": (4, True),
    "mimo2": (0, False),
    "olmo2": (4, False),
    "plamo3": (8, False),
    "smallthinker": (4, True),
    "step35": (0, False),
}
"""Layers of one period, and whether its full layer is the first; 0: the file states each layer."""


@dataclass(frozen=True, kw_only=True)
class LlamaModel:
    """Sizes of a model, read from the metadata of its file."""

    file: GgufFile

    def __post_init__(self) -> None:
        recurrent = [key for key in self.file.values if ".ssm." in key]
        if recurrent:
            raise self._error(f"{recurrent[0]}: recurrent layers are not described")
        if not self.file.by_layer.keys() & {0}:
            raise self._error("no tensor of layer 0; is it an adapter or a vocabulary?")
        if self.window and self.file.architecture not in WINDOW_PERIODS:
            raise self._error(
                f"architecture {self.file.architecture!r:.40} has a sliding window whose layers are"
                " not described"
            )
        if self.expert_layers and not 1 <= self.experts_used <= self.num_experts:
            raise self._error(
                f"expert_used_count {self.experts_used} of expert_count {self.num_experts} beside"
                " tensors of experts; the file is damaged"
            )
        if not 1 <= self.num_layers <= 1024 or not 1 <= self.num_layers_all <= 1024:
            raise self._error(f"block_count {self.num_layers_all}")

    def _error(self, reason: str) -> SpecError:
        return SpecError(f"{shown_path(self.file.paths[0])}: {reason}")

    def _count(self, key: str, default: int | None = None, *, layer: int = 0) -> int:
        name = f"{self.file.architecture}.{key}"
        value = self.file.values.get(name, default)
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**40:
            raise self._error(f"{name}: {value!r:.40} is no count; the file is damaged")
        return value

    @cached_property
    def num_layers_all(self) -> int:
        """Layers, with those of multi-token prediction, which are counted and not loaded."""
        return self._count("block_count")

    @cached_property
    def num_layers(self) -> int:
        """Layers that run for every token."""
        return self.num_layers_all - self._count("nextn_predict_layers", 0)

    @cached_property
    def hidden(self) -> int:
        """Size of a token between layers."""
        return self._count("embedding_length")

    @cached_property
    def longest_tokens(self) -> int:
        """Tokens that the model was trained for."""
        return self._count("context_length")

    @cached_property
    def window(self) -> int:
        """Tokens of the sliding window; 0 without."""
        return self._count("attention.sliding_window", 0)

    @cached_property
    def is_latent(self) -> bool:
        """Whether keys and values are kept as one latent (MLA)."""
        return self._count("attention.key_length_mla", 0) > 0

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 of a dense model."""
        return self._count("expert_count", 0)

    @cached_property
    def experts_used(self) -> int:
        """Routed experts that a token visits in a layer."""
        return self._count("expert_used_count", 0)

    def num_heads(self, layer: int) -> int:
        """Query heads of a layer."""
        return self._count("attention.head_count", layer=layer)

    def key_elements(self, layer: int) -> int:
        """Elements of the cached keys of one token in one layer."""
        heads = self._count("attention.head_count_kv", self.num_heads(layer), layer=layer)
        return heads * self.head("key", layer)

    def value_elements(self, layer: int) -> int:
        """Elements of the cached values of one token in one layer; 0 where the keys hold them."""
        if self.is_latent:
            return 0
        heads = self._count("attention.head_count_kv", self.num_heads(layer), layer=layer)
        return heads * self.head("value", layer)

    def head(self, kind: str, layer: int) -> int:
        """Elements of one key or value head."""
        usual = self.hidden // max(self.num_heads(layer), 1)
        full = self._count(f"attention.{kind}_length", usual)
        return self._count(f"attention.{kind}_length_swa", full) if self.slides(layer) else full

    def slides(self, layer: int) -> bool:
        """Return whether a layer attends to the window alone."""
        if not self.window:
            return False
        period, full_first = WINDOW_PERIODS[self.file.architecture]
        stated = self.file.values.get(
            f"{self.file.architecture}.attention.sliding_window_pattern", period
        )
        if isinstance(stated, tuple):
            return layer < len(stated) and bool(stated[layer])
        if not isinstance(stated, int) or not 1 <= stated <= 1024:
            raise self._error("attention.sliding_window_pattern is missing or damaged")
        return layer % stated != 0 if full_first else layer % stated < stated - 1

    @cached_property
    def tensors(self) -> tuple[tuple[int, Tensor], ...]:
        """Tensors that are loaded, each with its layer; -1: of no layer."""
        return tuple(
            (layer, tensor)
            for layer, tensors in self.file.by_layer.items()
            if layer < self.num_layers
            for tensor in tensors
        )

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(
            sorted({layer for layer, tensor in self.tensors if EXPERTS.search(tensor.name)})
        )
