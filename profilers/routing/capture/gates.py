"""Place of each layer's gate by architecture, and the experts that its output names.

    T tokens   K chosen experts   E experts

A gate is an attribute of the block that mixes experts; the block's class is the same in releases 4
and 5 of transformers, its gate's output is not:

    release 5    (logits [T, E], weights [T, K], ids [T, K]) everywhere
    release 4    logits [T, E] of a linear layer: Mixtral, Qwen3-MoE, OLMoE; the block takes the K
                 largest of a softmax, which are the K largest logits
                 (ids [T, K], weights [T, K]): DeepSeek-V3
                 (weights [T, E], ids [T, K]): gpt-oss

So ids are the whole numbers among what a gate returns, and else the places of the largest logits.
Where weights of the same shape come with them, a token's choices are put in order of those, as
DeepSeek-V3's gate returns them in none.

Source: huggingface/transformers, src/transformers/models/<type>/modeling_<type>.py.

Not covered: other architectures, whose gates may choose in other ways; each is one row here.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from profilers.errors import ModelUnreadableError


class Gate(NamedTuple):
    """Place of a gate."""

    block: str
    """Class of the module that mixes experts."""
    attribute: str
    """Attribute of that module that holds its gate."""


GATES: Final[Mapping[str, Gate]] = {
    "mixtral": Gate("MixtralSparseMoeBlock", "gate"),
    "qwen3_moe": Gate("Qwen3MoeSparseMoeBlock", "gate"),
    "olmoe": Gate("OlmoeSparseMoeBlock", "gate"),
    "deepseek_v3": Gate("DeepseekV3MoE", "gate"),
    "gpt_oss": Gate("GptOssMLP", "router"),
}
"""Gate by `model_type` of config.json."""


def gates_of(model: torch.nn.Module, *, model_type: str) -> dict[int, torch.nn.Module]:
    """The gate of every MoE layer, by its absolute number, ascending.

    Raises:
        ModelUnreadableError: the model has none.
    """
    gate = GATES[model_type]
    by_layer = {}
    for name, module in model.named_modules():
        layer = re.search(r"\blayers\.(\d+)\.", f"{name}.")
        if type(module).__name__ == gate.block and layer is not None:
            by_layer[int(layer.group(1))] = getattr(module, gate.attribute)
    if not by_layer:
        raise ModelUnreadableError(
            f"a {model_type} model without {gate.block}: none of its layers has experts"
        )
    return dict(sorted(by_layer.items()))


@contextmanager
def watched(
    gates: Mapping[int, torch.nn.Module], *, top_k: int
) -> Iterator[dict[int, torch.Tensor]]:
    """Give what the gates choose, [T, K] by layer; each forward replaces the one before."""
    chosen: dict[int, torch.Tensor] = {}

    def note(layer: int) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            chosen[layer] = choices(output, top_k=top_k)

        return hook

    handles = [gate.register_forward_hook(note(layer)) for layer, gate in gates.items()]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def choices(output: Any, *, top_k: int) -> torch.Tensor:
    """The experts of every token, [T, K], out of what a gate returned; best first."""
    tensors = output if isinstance(output, tuple | list) else (output,)
    ids = [each for each in tensors if not each.is_floating_point()]
    if not ids:
        logits = tensors[0].reshape(-1, tensors[0].shape[-1])
        return torch.topk(logits.float(), top_k, dim=-1).indices
    chosen: torch.Tensor = ids[0].reshape(-1, ids[0].shape[-1])
    weights = [each for each in tensors if each.is_floating_point() and each.shape == ids[0].shape]
    if weights:
        order = torch.argsort(
            weights[-1].reshape(chosen.shape), dim=-1, descending=True, stable=True
        )
        chosen = torch.gather(chosen, -1, order)
    return chosen
