"""Rows of a published table, as their cells are written."""

from collections.abc import Callable

import pytest

Row = Callable[..., dict[str, str]]

PLAIN = {
    "id": "one",
    "silicon_data_source": "db-dump/2026-04-27; config_id=1; silicon_concurrency=8; image",
    "backend": "vllm",
    "backend_version": "0.18.0",
    "model_path": "meta-llama/Llama-3.1-70B",
    "system": "h200_sxm",
    "precision": "fp8",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "tp_size": "4.0",
    "pp_size": "1",
    "attention_dp_size": "1",
    "moe_tp_size": "4",
    "moe_ep_size": "1",
    "silicon_ttft_ms": "80.5",
    "silicon_tpot_ms": "11.25",
}


@pytest.fixture
def row() -> Row:
    """One row; named cells replace the usual ones."""

    def made(**cells: str) -> dict[str, str]:
        return {**PLAIN, **cells}

    return made
