"""Which link the KV caches of a launch take, by its connector and its variables."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tuner.estimate.serving.conftest import MODELS, Deployment
from tuner.spec.serving.read import read_serve_spec

Priced = Callable[..., Deployment]
VLLM = (
    "{} vllm serve m --tensor-parallel-size {}"
    ' --kv-transfer-config \'{{"kv_connector": "{}", "kv_role": "kv_producer"}}\''
)
SGLANG = (
    "{} python -m sglang.launch_server --model-path m --tp-size 2 --disaggregation-mode prefill"
)
MOONCAKE = "SGLANG_MOONCAKE_CUSTOM_MEM_POOL=INTRA_NODE_NVLINK MC_INTRANODE_NVLINK=true"


@pytest.fixture
def machine(tmp_path: Path) -> Priced:
    def made(*, engine: str, device: str = "h100-sxm", emit: str = "") -> Deployment:
        path = tmp_path / "spec.yaml"
        path.write_text(
            f"schema_version: 1\nmodel: {MODELS / 'llama-3.1-8b'}\n"
            f"cluster: {{pools: [{{name: p, device: {device}, devices_per_node: 8,"
            " nics_per_node: 1, nic: 25Gbit/s}]}\n"
            f"goal:\n  kind: serve\n  engine: {{name: {engine}}}\n"
            "  traffic: {rate: 1/s, input_tokens: 4000, output_tokens: 100}\n"
            "  slo: {ttft: {p90: 2s}, tpot: {p90: 50ms}}\n"
            "  objective: devices\n  modes: [disaggregated]\n"
            f"emit: [{emit or engine}]\n"
        )
        return Deployment(spec=read_serve_spec(path))

    return made


def test_a_launch_without_the_settings_has_the_rate_that_it_gets(machine: Priced) -> None:
    def read(text: str, **changes: str) -> tuple[float, str]:
        made = machine(**changes).estimate(text)
        assert made.load is not None
        assert made.load.ttft_s is not None
        note = next((one for one in made.notes if one.startswith("KV caches")), "")
        return made.load.ttft_s.mean, note

    # 4000 tokens of 131,072 bytes, on two ranks: 5.5 ms over NVLink, 0.8 s over an eighth of a
    # card of 25 Gbit/s, 0.5 s by TCP.
    nvlink, none = read(VLLM.format("", 2, "NixlConnector"), engine="vllm")
    assert none == ""
    for text, slower_s, words in (
        (VLLM.format("UCX_TLS=rc,tcp", 2, "NixlConnector"), 0.83, "cross the NICs"),
        (VLLM.format("UCX_TLS=^cuda_ipc", 2, "NixlConnector"), 0.83, "cross the NICs"),
        (VLLM.format("UCX_TLS=cuda_ipc,tcp", 2, "NixlPullConnector"), 0.0, ""),
        (VLLM.format("", 2, "NixlPushConnector"), 0.0, ""),
        (VLLM.format("", 2, "MooncakeConnector"), 0.83, "MC_INTRANODE_NVLINK=true"),
        (VLLM.format("MC_INTRANODE_NVLINK=1", 2, "MooncakeConnector"), 0.0, ""),
        (VLLM.format("", 2, "LMCacheConnectorV1"), 0.83, ""),
    ):
        ttft_s, note = read(text, engine="vllm")
        assert ttft_s - nvlink == pytest.approx(slower_s, abs=0.02), text
        assert words in note, text
        assert bool(note) is bool(words), text
    bus, none = read(
        VLLM.format("UCX_CUDA_IPC_ENABLE_GET_ZCOPY=y", 2, "NixlConnector"),
        engine="vllm",
        device="l40s",
    )
    assert none == ""
    slow, note = read(VLLM.format("", 2, "NixlConnector"), engine="vllm", device="l40s")
    assert slow - bus == pytest.approx(0.5, abs=0.05)
    assert "take TCP, 500 MB/s" in note
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on" in note
    inside, none = read(SGLANG.format(MOONCAKE), engine="sglang")
    assert none == ""
    outside, note = read(SGLANG.format(""), engine="sglang")
    assert outside - inside == pytest.approx(0.83, abs=0.02)
    assert MOONCAKE.replace(" ", " and ") in note


def test_a_launch_that_fills_the_machine_sends_to_another(machine: Priced) -> None:
    def of(ranks: int) -> float:
        made = machine(engine="vllm").estimate(VLLM.format("", ranks, "NixlConnector"))
        assert made.load is not None
        assert made.load.ttft_s is not None
        assert not [one for one in made.notes if one.startswith("KV caches")]
        return made.load.ttft_s.mean

    assert of(8) > of(4) + 0.15
