"""The shard of a request's KV cache on each rank, and what each rank sends to which.

Attention heads: of k key-value heads, rank i of t tensor ranks holds

    [floor(i k / t), floor((i + 1) k / t))   where t <= k: a slice, uneven unless t divides k
    floor(i k / t)                           where t >  k: one head, which several ranks hold

and of ranks that hold the same head only the lowest sends. A latent cache (MLA) has one head, which
every tensor rank holds whole, so the ranks share the sending by tokens. Pipeline stages hold
contiguous layers, as even as they go. What is sent is every non-empty intersection of what a sender
and a receiver hold.

Source: these are the rules of the paged caches of vLLM and SGLang, extended to heterogeneous
instances after arXiv 2509.17542, whose own algorithm is not public; where it is silent this is
ours.

Not covered: context parallelism of the cache; which data-parallel replica takes a request.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """KV cache of a model per token; the same on both sides."""

    num_layers: int
    num_heads: int
    """Key-value heads; 1 for a latent cache."""
    width: int
    """Elements of one head and token: the head size, or the latent's with its rotary part."""
    is_latent: bool = False
    """MLA: one vector a token in place of keys and values, not split over tensor ranks."""

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.width) < 1:
            raise ValueError(f"a cache of {self} holds nothing; all sizes must be at least 1")
        if self.is_latent and self.num_heads != 1:
            raise ValueError(f"a latent cache has one head, not {self.num_heads}")

    @property
    def parts(self) -> int:
        """Arrays a layer: keys and values, or only the latent."""
        return 1 if self.is_latent else 2

    @property
    def elements_per_token(self) -> int:
        """Return the elements of one token over all layers, each head once."""
        return self.num_layers * self.parts * self.num_heads * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDegrees:
    """Degrees by which an instance splits its cache."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline) < 1:
            raise ValueError(f"degrees {self.tensor} x {self.pipeline} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShardRank:
    """One rank of an instance."""

    stage: int
    """Pipeline rank."""
    tensor: int
    """Tensor rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One piece that one rank sends to another; ranges are global."""

    sender: ShardRank
    receiver: ShardRank
    layers: range
    heads: range
    tokens: range


def ranks(degrees: CacheDegrees) -> tuple[ShardRank, ...]:
    """Every rank of an instance, in order."""
    return tuple(
        ShardRank(stage=stage, tensor=tensor)
        for stage, tensor in product(range(degrees.pipeline), range(degrees.tensor))
    )


def heads_of(shape: CacheShape, *, tensor_rank: int, tensor_degree: int) -> range:
    """Heads that a tensor rank holds."""
    first = tensor_rank * shape.num_heads // tensor_degree
    if tensor_degree > shape.num_heads:
        return range(first, first + 1)
    return range(first, (tensor_rank + 1) * shape.num_heads // tensor_degree)


def layers_of(shape: CacheShape, *, stage: int, pipeline_degree: int) -> range:
    """Layers that a pipeline rank holds."""
    layers = shape.num_layers
    return range(stage * layers // pipeline_degree, (stage + 1) * layers // pipeline_degree)


def transfers(
    shape: CacheShape,
    *,
    sender: CacheDegrees,
    receiver: CacheDegrees,
    num_tokens: int,
    granule_tokens: int = 1,
) -> tuple[Transfer, ...]:
    """List everything that has to be sent, ordered by receiver.

    Args:
        shape: what is kept for a token.
        sender: degrees of the instance that holds the cache.
        receiver: degrees of the instance that wants it.
        num_tokens: length of the request.
        granule_tokens: tokens that stay together when senders share by tokens: a common multiple of
            both page sizes, so that no page has two writers.
    """
    kept, wanted = (
        [layers_of(shape, stage=stage, pipeline_degree=stages) for stage in range(stages)]
        for stages in (sender.pipeline, receiver.pipeline)
    )
    sources = ranks(sender)
    return tuple(
        Transfer(sender=source, receiver=target, layers=layers, heads=heads, tokens=tokens)
        for target in ranks(receiver)
        for source in sources
        if (layers := _common(kept[source.stage], wanted[target.stage]))
        for heads, tokens in _shares(
            shape,
            source=source.tensor,
            target=target.tensor,
            sender=sender,
            receiver=receiver,
            num_tokens=num_tokens,
            granule_tokens=granule_tokens,
        )
    )


def _shares(
    shape: CacheShape,
    *,
    source: int,
    target: int,
    sender: CacheDegrees,
    receiver: CacheDegrees,
    num_tokens: int,
    granule_tokens: int,
) -> Iterator[tuple[range, range]]:
    if shape.is_latent:
        granules = -(-num_tokens // granule_tokens)
        first = source * granules // sender.tensor * granule_tokens
        end = (source + 1) * granules // sender.tensor * granule_tokens
        tokens = range(first, min(end, num_tokens))
        if tokens:
            yield range(1), tokens
        return
    mine = heads_of(shape, tensor_rank=source, tensor_degree=sender.tensor)
    if source and mine == heads_of(shape, tensor_rank=source - 1, tensor_degree=sender.tensor):
        return
    wanted = heads_of(shape, tensor_rank=target, tensor_degree=receiver.tensor)
    if (heads := _common(mine, wanted)) and num_tokens:
        yield heads, range(num_tokens)


def _common(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
