"""Loss by logits of labelled tokens only: its value, its gradient and its memory."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from isobatch.engine.runtime.backward import DeferredWeights
from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.tensors import token_loss
from isobatch.tensors.token_loss import labelled_loss, loss_sum, shift_labels


def random_batch(generator, tokens, vocabulary, labelled=2 / 3):
    """Labels of samples, on a part of the tokens, with or without weights."""
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) >= labelled] = -100
    inner = torch.randperm(tokens - 1, generator=generator)[:3].sort().values + 1
    borders = torch.cat([torch.tensor([0]), inner, torch.tensor([tokens])]).int()
    weighted = torch.rand(1, generator=generator) < 0.5
    weights = torch.rand(tokens, generator=generator) + 0.1 if weighted else None
    return SimpleNamespace(labels=labels, cu_seqlens=borders, loss_weights=weights)


def plain_loss(hidden, logits_of, batch):
    """Of the logits of all tokens."""
    targets = shift_labels(batch.labels, batch.cu_seqlens)
    losses = functional.cross_entropy(logits_of(hidden).float(), targets, reduction="none")
    return (losses if batch.loss_weights is None else losses * batch.loss_weights).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradients_are_those_of_cross_entropy(dtype, monkeypatch):
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        tokens, vocabulary, width = (
            int(torch.randint(least, 60, (), generator=generator)) for least in (5, 2, 1)
        )
        # from one row at a time to all at once; from no label to one on every token
        monkeypatch.setattr(token_loss, "LOSS_CHUNK", vocabulary * (1 + seed % 20 * 3) - 1)
        batch = random_batch(generator, tokens, vocabulary, labelled=(0, 0.1, 2 / 3, 1)[seed % 4])
        hidden, table = (
            torch.randn(rows, width, generator=generator).to(dtype) for rows in (tokens, vocabulary)
        )
        found = []
        for loss in (labelled_loss, plain_loss):
            inputs = hidden.clone().requires_grad_(), table.clone().requires_grad_()
            value = loss(
                inputs[0], lambda rows, of=inputs[1]: functional.linear(rows, of) * 3, batch
            )
            (value / 7).backward()
            found.append([value.detach(), *(part.grad for part in inputs)])
        assert found[0][0].dtype == torch.float32
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, msg=lambda text, s=seed: f"seed {s}: {text}")


def test_rows_without_weight_do_not_matter():
    source = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan], [torch.nan, 0.0]])
    for overwrite in (False, True):
        logits = source.clone().requires_grad_()
        weights = torch.tensor([1.0, 0.0, 0.0])
        value = loss_sum(logits * 1.0, torch.tensor([1, 0, 0]), weights, overwrite=overwrite)
        value.backward()
        assert value.item() == pytest.approx(
            functional.cross_entropy(source[:1], torch.tensor([1]))
        )
        assert (logits.grad[1:] == 0).all()
        assert (logits.grad[0] != 0).all()


def test_nothing_is_live_but_labelled_logits_and_a_few_rows(monkeypatch):
    tokens, vocabulary, rows, width = 2048, 1000, 8, 4
    monkeypatch.setattr(token_loss, "LOSS_CHUNK", rows * vocabulary)
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, tokens, vocabulary, labelled=0.1)
    count = int((shift_labels(batch.labels, batch.cu_seqlens) != -100).sum())
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
        table = torch.randn(vocabulary, width, generator=generator).to(dtype)
        with LiveBytes() as memory:
            labelled_loss(
                hidden, lambda part, of=table: functional.linear(part, of), batch
            ).backward()
        logits = count * vocabulary * dtype.itemsize
        few = 3 * rows * vocabulary * 4 + 100 * tokens
        assert logits <= memory.peak_bytes < logits + few < tokens * vocabulary * dtype.itemsize


def test_no_logits_stay_where_weight_gradients_are_deferred():
    generator = torch.Generator().manual_seed(0)
    batch, head = random_batch(generator, 64, 1000), torch.nn.Linear(4, 1000)
    hidden = torch.randn(64, 4, generator=generator)
    with LiveBytes() as memory:
        deferred = DeferredWeights()
        with deferred:
            loss = labelled_loss(hidden, head, batch)
        loss.backward()
        deferred.add_gradients()
        del loss, deferred
        assert memory.live_bytes == sum(weight.grad.nbytes for weight in head.parameters())
