"""A small Mixture-of-Experts model for torchtitan: what MODULE and CONFIG of a plan's run.sh name.

    MODULE=tiny_moe CONFIG=tiny_moe bash PLAN/launch/torchtitan/run.sh

The sizes are those of config.json beside this file, built from torchtitan's own Qwen3 layers. What
a plan decides comes in from moetune_plan.py; the model, the text and the optimizer belong here.
Text: the sources of Python's standard library, byte by byte, so that nothing is downloaded.
"""

import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

SIZES = json.loads(Path(__file__).with_name("config.json").read_text(encoding="utf-8"))


class Bytes(BaseTokenizer):
    """Text as byte values."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Without options."""

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Return the text of bytes."""
        return bytes(ids).decode(errors="replace")

    def get_vocab_size(self) -> int:
        """Return the number of byte values."""
        return 256


class LibraryText(BaseDataLoader):
    """Micro-batches of the standard library's sources, others on every replica."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Without options."""

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        library = Path(sysconfig.get_path("stdlib"))
        text = b"".join(file.read_bytes() for file in sorted(library.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text[:4_000_000]), dtype=torch.uint8).long()
        self.generator = torch.Generator().manual_seed(dp_rank)
        self.place = f"dp_rank_{dp_rank}"
        self.shape = (local_batch_size, seq_len)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        count, tokens = self.shape
        positions = torch.arange(tokens).expand(count, tokens)
        while True:
            starts = torch.randint(len(self.text) - tokens - 1, (count,), generator=self.generator)
            ids = torch.stack([self.text[at : at + tokens + 1] for at in starts.tolist()])
            yield {"input": ids[:, :-1], "positions": positions.clone()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return what the next draws of this replica depend on."""
        return {self.place: self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; a replica that was not saved draws from the beginning."""
        if self.place in state_dict:
            self.generator.set_state(state_dict[self.place])


def tiny_moe(attn_backend: str = "flex", moe_comm_backend: str = "standard") -> Trainer.Config:
    """Return the configuration of a training run; a plan's arguments replace these."""
    width, vocabulary = SIZES["hidden_size"], SIZES["vocab_size"]
    is_sdpa = attn_backend == "sdpa"
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=SIZES["num_hidden_layers"],
        dim=width,
        n_heads=SIZES["num_attention_heads"],
        n_kv_heads=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        moe_hidden_dim=SIZES["moe_intermediate_size"],
        num_experts=SIZES["num_experts"],
        top_k=SIZES["num_experts_per_tok"],
        attn_backend="flex" if is_sdpa else attn_backend,
        moe_comm_backend=moe_comm_backend,
        rope=CosSinRoPE.Config(
            dim=SIZES["head_dim"],
            max_seq_len=SIZES["max_position_embeddings"],
            theta=SIZES["rope_theta"],
        ),
    )
    if is_sdpa:
        # torchtitan has the class, but names it for no language model.
        for layer in layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = qwen3.Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=width,
        norm=qwen3._qwen3_norm(width),
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=width, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(
            in_features=width, out_features=vocabulary, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )
    return Trainer.Config(
        model_spec=ModelSpec(
            name="qwen3",
            flavor="tiny",
            model=model,
            parallelize_fn=qwen3.parallelize_qwen3,
            pipelining_fn=qwen3.pipeline_llm,
            post_optimizer_build_fn=qwen3.register_moe_load_balancing_hook,
            state_dict_adapter=None,
        ),
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)
        ),
        tokenizer=Bytes.Config(),
        dataloader=LibraryText.Config(),
        optimizer=default_adamw(lr=3e-4),
        metrics=MetricsProcessor.Config(log_freq=1),
    )


def tiny_moe_on_cpu() -> Trainer.Config:
    """Return the same for a run without a plan on a CPU, on 4 of 16 sequences at a time."""
    config = tiny_moe(attn_backend="sdpa")
    config.training = TrainingConfig(
        local_batch_size=4,
        global_batch_size=16,
        seq_len=256,
        disable_cuda_graphs=True,
    )
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    return config
