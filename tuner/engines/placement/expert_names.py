"""Layer, and expert or router, that a checkpoint tensor belongs to, by its name.

    Hugging Face    Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, DeepSeek-V2 and V3, gpt-oss; one tensor an
                    expert, or all experts in one tensor
    Megatron Core   sequential and grouped (Transformer Engine) experts, router and its expert bias

Unknown expert tensors are refused, so that no part of an expert is missed. Layers outside the main
stack (draft models, `mtp.`) are ignored.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

_LAYER: Final = re.compile(
    r"(?:module\.)?(?:(?:language_)?model\.)*(?:decoder\.)?layers\.(?P<layer>\d{1,6})\.(?P<rest>.+)"
)
_ROUTER: Final = re.compile(
    r"(?:mlp|block_sparse_moe)\.(?:gate|router)\."
    r"(?:weight|bias|e_score_correction_bias|expert_bias|local_tokens_per_expert)"
)
_ONE: Final = re.compile(
    r"(?P<head>(?:mlp|block_sparse_moe)\.experts\.(?:local_experts\.)?)(?P<expert>\d{1,6})"
    r"(?P<tail>\..+)"
)
_GROUPED: Final = re.compile(
    r"(?P<head>mlp\.experts\.linear_fc[12]\.(?:weight|bias))(?P<expert>\d{1,6})(?P<tail>)"
)
_ALL: Final = re.compile(
    r"(?:mlp|block_sparse_moe)\.experts\.(?:gate_up_proj|down_proj)(?:_bias|_blocks|_scales)?"
)
_EXPERTS: Final = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensor:
    """Layer, kind and expert of a checkpoint tensor, read from its name."""

    layer: int
    kind: Literal["router", "expert", "all_experts"]
    """`router` and `all_experts` hold one row, along their first axis, for each expert."""
    expert: int | None = None
    """Expert that the tensor belongs to; None for routers and tensors of all experts."""
    head: str = ""
    tail: str = ""
    """Text before and after the expert's number."""

    def name_for(self, expert: int) -> str:
        """Return the tensor's name for another expert."""
        return f"{self.head}{expert}{self.tail}"


def parse_name(name: str) -> ExpertTensor | None:
    """Return what the tensor is; None where it is neither of an expert nor of a router.

    Raises:
        ValueError: the tensor belongs to experts, but its layout is not known.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    layer, rest = int(match["layer"]), match["rest"]
    if _ROUTER.fullmatch(rest):
        return ExpertTensor(layer=layer, kind="router")
    if _ALL.fullmatch(rest):
        return ExpertTensor(layer=layer, kind="all_experts")
    expert_match = _ONE.fullmatch(rest) or _GROUPED.fullmatch(rest)
    if expert_match is not None:
        before = name[: len(name) - len(rest)]
        return ExpertTensor(
            layer=layer,
            kind="expert",
            expert=int(expert_match["expert"]),
            head=before + expert_match["head"],
            tail=expert_match["tail"],
        )
    if _EXPERTS.match(rest) and not rest.endswith("_extra_state"):
        raise ValueError(f"{name!r} is not an expert layout that can be renumbered")
    return None
