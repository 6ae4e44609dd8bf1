"""What goes from one process to another arrives as it was."""

import multiprocessing
import os
import threading

import numpy as np
import pyarrow as pa
import torch

from isobatch.loaders.online.processes import messages


def through(value):
    ours, theirs = multiprocessing.Pipe()
    parcel = messages.pack(value)
    thread = threading.Thread(target=messages.send, args=(ours, parcel))
    thread.start()
    try:
        return messages.receive(theirs)
    finally:
        thread.join()


def test_tensors_of_all_kinds_and_sizes():
    rng = np.random.default_rng(0)
    for size in (0, 1, 40, 900):
        values = torch.from_numpy(rng.normal(size=(size, 3, 8, 8)).astype(np.float32))
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64):
            tensor = values.to(dtype)
            forms = (tensor, tensor.to(memory_format=torch.channels_last), tensor[::2, :, 1:])
            single = tensor.sum().expand(1)
            for form in (*forms, tensor.transpose(0, 1), single, single[0], tensor.view(-1)):
                found = through({"one": form})["one"]
                assert found.dtype == form.dtype
                assert torch.equal(found, form)
                if form.numel() > 1 and form.is_contiguous(memory_format=torch.channels_last):
                    assert found.is_contiguous(memory_format=torch.channels_last)
                found.fill_(1)  # nothing is read only


def test_arrays_views_and_tables():
    array = np.arange(100_000).reshape(100, -1)
    table = pa.record_batch({"a": list(range(50_000)), "b": ["x" * 9] * 50_000})
    found = through([array, array[:, ::2], memoryview(b"abc" * 90_000), table, b"c" * 300_000])
    assert (found[0] == array).all()
    assert (found[1] == array[:, ::2]).all()
    assert bytes(found[2]) == b"abc" * 90_000
    assert found[3].equals(table)
    assert found[4] == b"c" * 300_000


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    kept = [through(torch.ones(1 << 20)) for _ in range(20)]
    after = os.listdir("/proc/self/fd") if before else []
    assert len(after) - len(before) <= 2 * len(kept) // 10
