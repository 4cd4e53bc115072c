"""Sessions of a trace with prompt blocks: the previous turn of each request.

A request is the next turn of the latest earlier one whose prompt it continues:

    all whole blocks of the earlier prompt are a prefix of its own,
    the last of them was new at that time, so that it is not a common system prompt, and
    the earlier prompt and its output fit: I >= I_earlier + O_earlier

Of several candidates the one with the longest prompt is chosen. Two requests that continue the same
one, as after an edit, are both its next turns.

Not covered: prompts that add less than one block; think time between turns.
"""

from collections.abc import Sequence

from tuner.spec.serving.traces import BLOCK_TOKENS

NONE = -1
"""Mark of a request without a previous turn."""


class Sessions:
    """The prompts so far, by their last whole block; 60 bytes per distinct block."""

    def __init__(self) -> None:
        self._ended: dict[int, tuple[int, int]] = {}
        """The request that ended with a block, and its input plus output tokens, by block."""
        self._seen: set[int] = set()
        self._count = 0

    def add(self, blocks: Sequence[int], *, input_tokens: int, output_tokens: int) -> int:
        """Return the request that the next one continues, or NONE.

        Args:
            blocks: of its prompt; empty if not recorded.
            input_tokens: of its prompt.
            output_tokens: of its output.
        """
        before = NONE
        for block in reversed(blocks):
            entry = self._ended.get(block)
            if entry is not None and entry[1] <= input_tokens:
                before = entry[0]
                break
        whole = input_tokens // BLOCK_TOKENS
        if blocks and whole and blocks[whole - 1] not in self._seen:
            self._ended[blocks[whole - 1]] = self._count, input_tokens + output_tokens
        self._seen.update(blocks)
        self._count += 1
        return before
