"""A step whose networks run on a server of their own, against the same step on one instance."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.costs.serve.capacity import instance_weight_bytes, rotary_bytes
from tuner.costs.serve.decoder import Decoder, Formats, decoder_of
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration, sustained_factor
from tuner.costs.serve.remote_ffn import (
    NORMS,
    RemoteFfnIteration,
    attention_only,
    ffn_bytes,
    ffn_fits,
    ffn_weight_bytes,
)
from tuner.costs.serve.whole_step import step_s
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.peer_link import PeerLink, peer_link
from tuner.prices.serve.machine import ServingMachine

BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
SHEET = find_device("h200-sxm")
MACHINE = ServingMachine(engines=ENGINE_TRAITS, sheet=SHEET, tables=None)
AT_ONCE = PeerLink(latency_s=0.0, bytes_per_s=float("inf"))
N = np.array([2.0, 16.0, 64.0, 256.0])
PAST = np.full_like(N, 1500.0)


@pytest.fixture(scope="module", params=["deepseek-v2-lite", "qwen3-30b-a3b"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of(example_model(str(request.param)))


def _whole(decoder: Decoder, ranks: int, **changes: Any) -> Iteration:
    return Iteration(
        decoder=decoder,
        formats=BF16,
        degrees=InstanceDegrees(attention_data=ranks, expert=ranks),
        traits=ENGINE_TRAITS["vllm"],
        machine=MACHINE,
        a2a_backend=A2aBackend.ALLGATHER,
        **changes,
    )


def _cell(
    decoder: Decoder, attention: int, ffn: int, *, link: PeerLink = AT_ONCE, halves: bool = False
) -> RemoteFfnIteration:
    return RemoteFfnIteration(
        decoder=attention_only(decoder),
        formats=BF16,
        degrees=InstanceDegrees(attention_data=attention),
        traits=ENGINE_TRAITS["vllm"],
        machine=MACHINE,
        two_batch_overlap=halves,
        ffn=_whole(decoder, ffn),
        link=link,
    )


def test_as_many_ranks_and_no_link_between_are_one_instance(decoder: Decoder) -> None:
    cell, whole = _cell(decoder, 4, 4), _whole(decoder, 4)
    norms = decoder.num_layers * cell._small_s(N, NORMS) * sustained_factor(N)
    assert step_s(cell, N, PAST) == pytest.approx(step_s(whole, N, PAST) + norms)


def test_every_layer_waits_for_its_messages_there_and_back(decoder: Decoder) -> None:
    link = PeerLink(latency_s=2e-5, bytes_per_s=4e10)
    for attention, ffn, messages, share in ((4, 4, 1, 1.0), (8, 2, 4, 1.0), (2, 8, 4, 0.25)):
        more_s = step_s(_cell(decoder, attention, ffn, link=link), N, PAST) - step_s(
            _cell(decoder, attention, ffn), N, PAST
        )
        each_s = 2e-5 + share * N * decoder.hidden * 2.0 / 4e10
        wanted_s = decoder.num_layers * 2.0 * messages * each_s
        assert more_s == pytest.approx(wanted_s * sustained_factor(N * attention / ffn))


def test_halves_take_as_long_as_the_busier_side_and_at_most_both(decoder: Decoder) -> None:
    link = peer_link(
        inside_bytes_per_s=SHEET.scale_up_bytes_per_s, nic_bytes_per_s=5e10, is_inside=False
    )
    for attention, ffn in ((4, 4), (8, 2)):
        cell = _cell(decoder, attention, ffn, link=link, halves=True)
        one = replace(cell, two_batch_overlap=False).linear_split(0.5 * N)
        attention_s = 2.0 * (one.compute_Q + cell.decode_s(0.5 * N, PAST))
        found_s = step_s(cell, N, PAST) - (cell.head_s(N) + cell.scheduler_s)
        assert (found_s >= attention_s - 1e-12).all()
        assert (found_s >= 2.0 * one.all_to_all_Q - 1e-12).all()
        assert (found_s <= attention_s + 2.0 * one.all_to_all_Q + 1e-12).all()


def test_both_roles_hold_the_model_once_but_for_its_ends_and_rotary_table(decoder: Decoder) -> None:
    cell, whole = _cell(decoder, 4, 4), _whole(decoder, 4)
    ends = 2.0 * decoder.vocab * decoder.hidden * 2.0
    twice = ends + rotary_bytes(whole)
    together = instance_weight_bytes(cell) + ffn_weight_bytes(cell.ffn)
    assert together == pytest.approx(instance_weight_bytes(whole) + twice)


def test_an_ffn_server_fits_while_its_steps_do(decoder: Decoder) -> None:
    ffn = _whole(decoder, 2)
    few = {"step_tokens": 64, "running": 64}
    needed = ffn_bytes(ffn, **few)
    assert ffn_bytes(ffn, step_tokens=65536, running=64) > needed
    assert ffn_fits(ffn, memory_bytes=needed + 8e9, **few)
    assert not ffn_fits(ffn, memory_bytes=needed, **few)
