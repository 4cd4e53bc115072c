"""Rules for KV transfers from prefill on one vendor's devices to decode on another's.

    engine       both sides run one engine: no connector has another's protocol
    connector    both releases have it
    release      both sides run one release: vLLM's NIXL connector hashes the vLLM release and its
                 own version and refuses another (kv_connector/v1/nixl/metadata.py,
                 compute_nixl_compatibility_hash); others are not described between releases
    host_path    between vendors caches pass through the memory of both hosts, which vLLM's NIXL
                 connector does with `kv_buffer_device: cpu` (nixl/base_worker.py,
                 initialize_host_xfer_buffer); SGLang's backends register device memory only
                 (disaggregation/common/conn.py), and so do Mooncake's of both engines
    attention    the same hash includes the attention backend's name, so both sides get one that
                 exists for both: TRITON_ATTN, or TRITON_MLA of latent caches
    kv_format    fp8 of AMD's CDNA3 is e4m3fnuz, of NVIDIA's devices e4m3fn (platforms/rocm.py,
                 is_fp8_fnuz): the same bits are different numbers, and nothing converts them

Pages, tensor and pipeline degrees and layouts are checked by kv_refusals.py. Stores between both
sides (LMCache, Mooncake Store) are not covered: no released recipe of one between vendors was
found.
"""

from collections.abc import Iterator

from tuner.catalog.serve_rules.kv_cache import CacheKind, Connector
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.devices.datasheet import Generation


def connector_between(sender: ServingCapabilities, receiver: ServingCapabilities) -> Connector:
    """Return the connector of a pair: one that both have, else the sender's."""
    order = tuple(dict.fromkeys(row.connector for row in sender.transfers)) or tuple(Connector)
    offered = [connector for connector in order if connector.value in sender.connectors]
    shared = [connector for connector in offered if connector.value in receiver.connectors]
    return next(iter((*shared, *offered)), order[0])


def portable_backend(
    sender: ServingCapabilities, receiver: ServingCapabilities, *, cache: CacheKind
) -> str | None:
    """Return the attention backend that both sides must run if their vendors differ, or None."""
    sender_backend, receiver_backend = (
        end.portable_backends.get(cache.value) for end in (sender, receiver)
    )
    return sender_backend if sender_backend == receiver_backend else None


def vendor_refusals(
    sender: ServingCapabilities,
    receiver: ServingCapabilities,
    *,
    connector: Connector,
    cache: CacheKind,
    kv_cache_dtype: str,
    generations: tuple[Generation, Generation] | None,
) -> Iterator[str]:
    """Yield the rules that a pair breaks, by name.

    Args:
        sender: release of the prefill side.
        receiver: release of the decode side.
        connector: of the transfer.
        cache: kind of KV cache.
        kv_cache_dtype: of both caches, from the goal.
        generations: of both sides' devices; None if not known.
    """
    if sender.name != receiver.name:
        yield f"rule engine: {sender.title} and {receiver.title} have no common KV protocol"
        return
    if sender is receiver and generations is None:
        return
    if connector.value not in receiver.connectors or connector.value not in sender.connectors:
        of_sender, of_receiver = (", ".join(end.connectors.values()) for end in (sender, receiver))
        yield (
            f"rule connector: {sender.title} has {of_sender or 'none'}, {receiver.title}"
            f" {of_receiver or 'none'}; none of them is the same"
        )
    if sender.release != receiver.release:
        why = "the NIXL connector compares releases"
        if connector is not Connector.NIXL:
            why = f"connector {connector} is not described between releases"
        yield f"rule release: {sender.title} and {receiver.title} differ, and {why}"
    if sender.vendor is not receiver.vendor:
        yield from _between_vendors(sender, receiver, connector=connector, cache=cache)
    if kv_cache_dtype == "fp8" and generations is not None:
        fnuz = [generation is Generation.CDNA3 for generation in generations]
        if any(fnuz) and not all(fnuz):
            yield "rule kv_format: fp8 caches are e4m3fnuz on cdna3, e4m3fn elsewhere; use bf16"


def _between_vendors(
    sender: ServingCapabilities,
    receiver: ServingCapabilities,
    *,
    connector: Connector,
    cache: CacheKind,
) -> Iterator[str]:
    if not (sender.host_path and receiver.host_path) or connector is not Connector.NIXL:
        yield (
            f"rule host_path: {connector} of {sender.name} moves device memory only, and between"
            f" {sender.vendor} and {receiver.vendor} caches must pass through host memory"
        )
    elif portable_backend(sender, receiver, cache=cache) is None:
        yield (
            f"rule attention: no attention backend of {sender.title} runs on devices of both"
            f" {sender.vendor} and {receiver.vendor}"
        )
