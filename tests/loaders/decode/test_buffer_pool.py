"""Memory of pixels comes back when the last tensor that looks at it is gone, and not before."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobatch.loaders.decode._buffer_pool import LEAST_BYTES, BufferPool

SIZE = 4 * LEAST_BYTES


def test_a_freed_block_is_used_again() -> None:
    memory = BufferPool()
    first = memory.empty(SIZE)
    place = first.data_ptr()
    del first
    again = memory.empty(SIZE - 1000)
    assert again.data_ptr() == place
    assert again.shape == (SIZE - 1000,)


LOOKS = [
    lambda tensor: tensor.view(2, -1)[1],
    lambda tensor: tensor[5:7].numpy(),
    lambda tensor: tensor.detach(),
    lambda tensor: tensor.untyped_storage(),
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_block_in_use_is_never_given_twice(look: Callable[[torch.Tensor], Any]) -> None:
    memory = BufferPool()
    whole = memory.empty(SIZE)
    place, view = whole.data_ptr(), look(whole)
    del whole
    gc.collect()
    assert memory.empty(SIZE).data_ptr() != place
    del view
    gc.collect()
    assert place in {block.ctypes.data for block in memory._free}


def test_much_smaller_wishes_get_memory_of_their_own() -> None:
    memory = BufferPool()
    place = memory.empty(SIZE).data_ptr()
    assert memory.empty(SIZE // 2).data_ptr() != place


def test_only_so_much_is_kept() -> None:
    memory = BufferPool(kept_bytes=3 * SIZE)
    blocks = [memory.empty(SIZE) for _ in range(8)]
    del blocks
    assert sum(map(len, memory._free)) == 3 * SIZE


def test_many_threads_never_share_memory() -> None:
    memory, wrong = BufferPool(), []

    def work(number: int) -> None:
        rng, held = random.Random(number), []
        for turn in range(300):
            block = memory.empty(rng.choice([1, 2, 3]) * LEAST_BYTES)
            block.fill_(number)
            held.append(block)
            if len(held) > 4:
                gone = held.pop(rng.randrange(len(held)))
                if not bool((gone == number).all()):
                    wrong.append(turn)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_rows_take_none() -> None:
    assert BufferPool().empty(0).shape == (0,)
    assert BufferPool().empty(0).dtype == torch.uint8
