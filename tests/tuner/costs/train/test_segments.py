"""What an allocator holds beyond what is alive, in one growing segment and in many fixed ones.

The tensors of training steps in their order, without communication and optimizer: PyTorch's caching
allocator takes the smallest free block that is large enough. With expandable segments all blocks
lie in one range that grows; without, each block that was requested from the device stays separate,
and what is free in two of them never serves one tensor (c10/cuda/CUDACachingAllocator.cpp).

Sizes in units of one hidden state: q and o 1, k and v 1 / 4.
"""

from tuner.costs.train.memory_constants import IN_SEGMENTS_RATIO, OF_FAMILY


class Blocks:
    """Free blocks as (segment, start, size), best fit first; lowest among equals."""

    def __init__(self, *, can_grow: bool) -> None:
        self.can_grow = can_grow
        self.segments = 0
        self.free: list[tuple[int, float, float]] = []
        self.taken: dict[str, tuple[int, float, float]] = {}
        self.held = 0.0
        self.most_alive = 0.0

    def run(self, script: str) -> None:
        """Obey `name:size` and `-name`."""
        for word in script.split():
            if word.startswith("-"):
                self._give_back(word[1:])
            else:
                name, size = word.split(":")
                self._take(name, float(size))
                alive = sum(block[2] for block in self.taken.values())
                self.most_alive = max(self.most_alive, alive)

    def _take(self, name: str, size: float) -> None:
        fitting = [block for block in self.free if block[2] >= size - 1e-9]
        if fitting:
            block = min(fitting, key=lambda block: (block[2], block[1]))
            self.free.remove(block)
            segment, start, room = block
            if room - size > 1e-6:
                self.free.append((segment, start + size, room - size))
            self.taken[name] = (segment, start, size)
            return
        if not self.can_grow:
            self.segments += 1
            self.taken[name] = (self.segments, 0.0, size)
            self.held += size
            return
        last = [block for block in self.free if abs(block[1] + block[2] - self.held) < 1e-6]
        start = last[0][1] if last else self.held
        for block in last:
            self.free.remove(block)
        self.taken[name] = (0, start, size)
        self.held = start + size

    def _give_back(self, name: str) -> None:
        segment, start, size = self.taken.pop(name)
        for block in list(self.free):
            if block[0] != segment:
                continue
            if abs(block[1] + block[2] - start) < 1e-6:
                self.free.remove(block)
                start, size = block[1], size + block[2]
            elif abs(start + size - block[1]) < 1e-6:
                self.free.remove(block)
                size += block[2]
        self.free.append((segment, start, size))


def _forward(layer: int, ffn: float) -> str:
    """A compiled layer that keeps q, v, attention's output and the gate, and its input."""
    i = layer
    return f"""
        norm:1 q{i}:1 k:.25 v{i}:.25 -norm turned:1 k2:.25 -k keys:1 values:1 o{i}:1 -turned -k2
        -keys -values sum:1 mid:1 -sum norm:1 gate{i}:{ffn} up:{ffn} -norm both:{ffn} -up down:1
        -both x{i + 1}:1 -mid -down
    """


def _backward(layer: int, ffn: float, weight: float) -> str:
    """The same again, with a bf16 gradient of each weight and their fp32 sum before it is sent."""
    i = layer
    return f"""
        norm:1 k:.25 turned:1 k2:.25 -k keys:1 values:1 sum:1 mid:1 -sum norm2:1 up:{ffn} both:{ffn}
        d_both:{ffn} w2:{weight / 4} -both d_gate:{ffn} d_up:{ffn} -d_both -up -gate{i} one:1
        w1:{weight / 4} -d_gate two:1 w3:{weight / 4} -d_up d_norm:1 -one -two -norm2 d_mid:1
        -d_norm -mid -d{i + 1} d_o:1 wo:{weight / 8} d_q:1 d_keys:1 d_values:1 -d_o -o{i} -keys
        -values -turned -k2 d_k:.25 d_v:.25 -d_keys -d_values -q{i} -v{i} one:1 two:1 d_norm:1 -one
        -two -d_q -d_k -d_v wq:{weight / 8} -norm d{i}:1 -d_norm -d_mid -x{i} sent:{2 * weight} -w1
        -w2 -w3 -wo -wq -sent
    """


def _wasted(*, can_grow: bool) -> float:
    """Share of what is alive at most that is held on top, after three steps of Llama 8B.

    32 layers, a network of 3.5, a vocabulary of 31.3 hidden states; weights of a layer and of the
    head over 16,384 tokens' hidden states. The loss is one kernel, bf16 logits and gradients.
    """
    layers, ffn, vocab = 32, 3.5, 128256 / 4096
    weight, head = 218.1e6 / (16384 * 4096), 128256 / 16384
    blocks = Blocks(can_grow=can_grow)
    for _ in range(3):
        blocks.run("x0:1")
        for layer in range(layers):
            blocks.run(_forward(layer, ffn))
        blocks.run(
            f"last:1 logits:{vocab} d_logits:{vocab} -logits d_last:1 w:{head} -d_logits"
            f" sent:{2 * head} -w -sent -last d{layers}:1 -d_last -x{layers}"
        )
        for layer in reversed(range(layers)):
            blocks.run(_backward(layer, ffn, weight))
        blocks.run("-d0")
    assert not blocks.taken
    return blocks.held / blocks.most_alive - 1.0


def test_segments_that_cannot_grow_waste_what_is_said_of_them() -> None:
    assert abs(_wasted(can_grow=False) - IN_SEGMENTS_RATIO) < 0.01


def test_a_segment_that_grows_wastes_less_than_what_is_counted() -> None:
    assert _wasted(can_grow=True) < float(OF_FAMILY["torchtitan-compiled"].unused_ratio)
