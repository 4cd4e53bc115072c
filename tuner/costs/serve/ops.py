"""Operations of serving steps that several kinds of step run: collectives and routed experts.

Letters: Q query points.
"""

from tuner.catalog.serve_rules.traits import ExpertKernels
from tuner.config.columns import Numbers
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats


def collective(kind: str, bytes_Q: Floats, *, ranks: int, software: str) -> Op:
    """One collective over neighbours; `bytes` is the larger buffer of a rank."""
    axes: dict[str, Numbers] = {"bytes": bytes_Q, "ranks": ranks}
    return Op(operation="collective", kind=kind, axes=axes, software=software)


def routed_experts(
    decoder: Decoder,
    formats: Formats,
    tokens_Q: Floats,
    *,
    tensor: int,
    expert: int,
    software: str,
    load: str,
    copies: float | None = None,
    kernels: ExpertKernels = ExpertKernels.USUAL,
) -> Op:
    """Routed experts on the most-loaded rank, for tokens over all ranks that share them.

    Args:
        decoder: a model with experts.
        formats: of its weights.
        tokens_Q: over all ranks.
        tensor: ranks that share an expert.
        expert: ranks that share the experts.
        software: whose kernels, as `software@version` if of one release.
        load: distribution of tokens over experts; `context/` or `generation/` before it where a
            rank holds the copies for its experts alone, as DeepEP's normal and low-latency kernels
            leave them.
        copies: of a token that experts compute, mean; None: those for experts with weights.
        kernels: whose multiply them.
    """
    experts = decoder.experts
    assert experts is not None
    more: dict[str, Numbers] = {} if decoder.ffn_is_gated else {"matrices": decoder.matrices}
    if kernels is not ExpertKernels.USUAL:
        more[kernels] = 1.0
    return Op(
        operation="moe",
        kind=load,
        dtype=formats.experts,
        software=software,
        axes={
            "tokens": tokens_Q,
            "hidden": decoder.expert_hidden,
            "ffn": experts.ffn,
            "top_k": experts.computed_top_k if copies is None else copies,
            "experts": experts.num,
            "tensor": tensor,
            "expert": expert,
            **more,
        },
    )
