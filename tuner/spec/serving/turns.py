"""Sessions of a trace that names the blocks of prompts: which request is the next turn of which.

A request is the next turn of the latest earlier one whose prompt it continues:

    all whole blocks of the earlier prompt are the beginning of its own,
    the last of them was new when it came, so that it is that prompt's own and no instruction that
    many begin with, and
    there is room for the earlier prompt and its answer: I >= I_earlier + O_earlier

Of several such the one whose prompt is longest. A trace says no more: two that continue one, as
after an edit, are both turns of it.

Not covered: prompts whose own part is below one block; how long a user thinks between turns.
"""

from collections.abc import Sequence

from tuner.spec.serving.traces import BLOCK_TOKENS

NONE = -1
"""In place of a request that is no next turn."""


class Sessions:
    """The ends of the prompts so far, by their last whole block; 60 bytes for every block met."""

    def __init__(self) -> None:
        self._ended: dict[int, tuple[int, int]] = {}
        """By block: the request, and the tokens of its prompt and answer."""
        self._seen: set[int] = set()
        self._count = 0

    def add(self, blocks: Sequence[int], *, input_tokens: int, output_tokens: int) -> int:
        """Return the request that the next one continues, or NONE.

        Args:
            blocks: of its prompt; none where nobody recorded them.
            input_tokens: of its prompt.
            output_tokens: of its answer.
        """
        before = NONE
        for block in reversed(blocks):
            found = self._ended.get(block)
            if found is not None and found[1] <= input_tokens:
                before = found[0]
                break
        whole = input_tokens // BLOCK_TOKENS
        if blocks and whole and blocks[whole - 1] not in self._seen:
            self._ended[blocks[whole - 1]] = self._count, input_tokens + output_tokens
        self._seen.update(blocks)
        self._count += 1
        return before
