"""A step as a sum of operations, on a datasheet alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.decoders import DEEPSEEK_V3, GLM_5, LLAMA_8B, LLAMA_70B, QWEN35_397B
from tuner.costs.ops import Op
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration, sustained_factor
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
ONE = np.array([1.0])


def iteration(decoder: Decoder, **named: int) -> Iteration:
    return Iteration(
        decoder=decoder,
        formats=FP8,
        degrees=InstanceDegrees(**named),
        engine="sglang",
        machine=ServingMachine(sheet=find_device("h200-sxm"), tables=None),
    )


def test_one_token_reads_all_weights_of_a_dense_model() -> None:
    # 7.5 billion weights outside the embedding at a byte each and 0.8 of 4.8 TB/s: 1.8 ms, and
    # launches of 160 kernels.
    step_s = float(iteration(LLAMA_8B).linear_s(ONE)[0])
    assert 1.8e-3 < step_s < 3.0e-3


@each_row("decoder", [LLAMA_70B, DEEPSEEK_V3, GLM_5, QWEN35_397B])
def test_every_kind_of_attention_is_priced_and_takes_longer_for_more(decoder: Decoder) -> None:
    own = iteration(decoder, attention_tensor=8, expert=8)
    sizes = np.array([1.0, 16.0, 256.0, 4096.0])
    for seconds in (own.linear_s(sizes), own.prompt_s(sizes), own.decode_s(sizes, sizes * 0 + 1e3)):
        assert (np.diff(seconds) > -1e-12).all()
        assert (seconds > 0.0).all()
    assert own.machine.estimated


def test_tensor_parallelism_pays_in_exchange_what_it_saves_in_products() -> None:
    at = np.array([64.0])
    alone, split = (
        iteration(LLAMA_70B, attention_tensor=degree).linear_parts(at) for degree in (1, 8)
    )
    assert float(split["projections"][0]) < float(alone["projections"][0])
    assert float(alone["exchange"][0]) == 0.0
    assert float(split["exchange"][0]) > 0.0


def test_host_work_grows_with_the_sequences() -> None:
    plain = iteration(LLAMA_8B)
    paid = Iteration(
        decoder=LLAMA_8B,
        formats=FP8,
        degrees=InstanceDegrees(),
        engine="vllm",
        machine=plain.machine,
        sequence_s=25e-6,
    )
    at = np.array([100.0])
    assert float((paid.head_s(at) - plain.head_s(at))[0]) == pytest.approx(2.5e-3)


def test_clocks_fall_only_where_the_device_is_busy() -> None:
    found = sustained_factor(np.array([1.0, 128.0, 1024.0, 8192.0]))
    assert found == pytest.approx([1.0, 1.0, 1.1, 1.1])


def test_second_copies_of_experts_level_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured_s(_: object, op: Op) -> Floats:
        assert op.software
        if op.operation == "moe":
            seen.append(op.kind)
        return np.array([1.0])

    monkeypatch.setattr(ServingMachine, "measured_s", measured_s)
    own = iteration(DEEPSEEK_V3, attention_data=8, expert=8)
    own.linear_parts(np.array([64.0]))
    replace(own, redundant_experts=32).linear_parts(np.array([64.0]))
    assert set(seen[: len(seen) // 2]) == {"power_law_1.01"}
    assert set(seen[len(seen) // 2 :]) == {"balanced"}
