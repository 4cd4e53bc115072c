"""An indexer's choice in blocks of queries against one query after the other."""

import pytest
import torch

from profilers.kernels import index_scores
from profilers.kernels.index_scores import chosen


def test_blocks_choose_what_every_query_would_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of one, two and all queries.
    for block in (1, 2 * 2 * 3 * 12, 2**20):
        monkeypatch.setattr(index_scores, "BLOCK", block)
        # A prompt, one new token, a chunk of a prompt, and entries that merge four tokens each.
        for length, past in ((12, 12), (1, 12), (5, 12), (12, 3)):
            torch.manual_seed(0)
            queries, weights = torch.randn(2, length, 3, 8), torch.randn(2, length, 3)
            keys = torch.randn(2, past, 8)
            found = [
                indices[:, place]
                for indices in chosen(queries, weights, keys, top_k=4)
                for place in range(indices.shape[1])
            ]
            assert len(found) == length
            for query, picked in enumerate(found):
                seen = past - length + query + 1 if past >= length else query // 4 + 1
                products = torch.einsum("bhd,bkd->bhk", queries[:, query], keys[:, :seen])
                scores = torch.einsum("bh,bhk->bk", weights[:, query], products.relu())
                # Keys that no head looks at score 0 alike, in any order.
                wanted = scores.topk(min(4, seen)).values
                reached = scores.gather(1, picked[:, : wanted.shape[1]])
                assert torch.allclose(reached, wanted, atol=1e-5), (length, past, query)
