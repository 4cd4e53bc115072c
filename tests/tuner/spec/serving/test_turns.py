"""Turns of sessions, told by the blocks of prompts."""

import json
from pathlib import Path

import numpy as np

from tuner.spec.serving.requests import sample_requests
from tuner.spec.serving.traffic import Traffic
from tuner.spec.serving.turns import NONE, Sessions


def test_a_turn_continues_the_latest_prompt_that_is_its_beginning() -> None:
    sessions = Sessions()
    rows = [
        # 1100 tokens: two whole blocks, 1 and 2, and 76 tokens more in 3.
        ([1, 2, 3], 1100, 300, NONE),
        # Another conversation with the same first block, whose own is 50.
        ([1, 50], 1024, 10, NONE),
        # 1400 tokens and more begin with all whole blocks of the first: its next turn.
        ([1, 2, 4], 1500, 100, 0),
        # The same blocks, but no room for the answer: a copy, not a turn.
        ([1, 2, 4], 1399, 100, NONE),
        # Continues the second request.
        ([1, 50, 51, 52], 2048, 10, 1),
        # The whole blocks of requests 2 and 3 are the first one's, which an edit continues again.
        ([1, 2, 9, 10], 2000, 10, 0),
        # Ends with block 1, which was there before: no session of its own, and no turn.
        ([1], 512, 10, NONE),
        ([1, 60, 61], 1300, 10, NONE),
        # Below one block, and none recorded: of no session.
        ([7], 100, 10, NONE),
        ([], 4000, 10, NONE),
    ]
    result = [
        sessions.add(blocks, input_tokens=tokens, output_tokens=output)
        for blocks, tokens, output, _ in rows
    ]
    assert result == [before for *_, before in rows]


def test_a_closed_loop_takes_a_trace_in_its_order_where_it_names_blocks(tmp_path: Path) -> None:
    rows = [([1, 2], 1024, 100), ([9], 512, 10), ([1, 2, 3], 1200, 10), ([1, 2, 3, 4], 1600, 10)]
    lines = [
        {"timestamp": 0, "input_length": tokens, "output_length": output, "hash_ids": blocks}
        for blocks, tokens, output in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    rng = np.random.default_rng(0)
    result = sample_requests(Traffic(trace=path, concurrency=2), count=100, rng=rng)
    assert result.arrival_s_N is None
    assert result.input_tokens_N.tolist() == [1024, 512, 1200, 1600]
    # The whole blocks of 1200 tokens are 1 and 2, the first one's: both others continue that.
    assert result.after_N is not None
    assert result.after_N.tolist() == [-1, -1, 0, 0]
    few = sample_requests(Traffic(trace=path, concurrency=2), count=3, rng=rng)
    assert few.input_tokens_N.tolist() == [1024, 512, 1200]
    path.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n1,2,3\n")
    drawn = sample_requests(Traffic(trace=path, concurrency=2), count=100, rng=rng)
    assert drawn.after_N is None
    assert len(drawn.input_tokens_N) == 100
