"""The loss of packed tokens: torch's own value and gradient, in the memory of the logits."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from isobatch.engine.runtime.cpu_memory import LiveBytes
from isobatch.engine.runtime.models import token_loss
from isobatch.engine.runtime.models.token_loss import loss_sum, next_labels


def random_batch(generator, tokens, vocabulary):
    """Labels of samples, a third of them none, with or without weights."""
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 1 / 3] = -100
    inner = torch.randperm(tokens - 1, generator=generator)[:3].sort().values + 1
    borders = torch.cat([torch.tensor([0]), inner, torch.tensor([tokens])]).int()
    weighted = torch.rand(1, generator=generator) < 0.5
    weights = torch.rand(tokens, generator=generator) + 0.1 if weighted else None
    return SimpleNamespace(labels=labels, cu_seqlens=borders, loss_weights=weights)


def plain_loss(logits, batch):
    targets = next_labels(batch.labels, batch.cu_seqlens)
    losses = functional.cross_entropy(logits.float(), targets, reduction="none")
    return (losses if batch.loss_weights is None else losses * batch.loss_weights).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradients_are_those_of_cross_entropy(dtype, monkeypatch):
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        tokens, vocabulary, width = (
            int(torch.randint(least, 60, (), generator=generator)) for least in (5, 2, 1)
        )
        # from one row at a time to all at once
        monkeypatch.setattr(token_loss, "_CHUNK", vocabulary * (1 + seed * 3) - 1)
        batch = random_batch(generator, tokens, vocabulary)
        hidden, table = (
            torch.randn(rows, width, generator=generator).to(dtype) for rows in (tokens, vocabulary)
        )
        found = []
        for loss in (loss_sum, plain_loss):
            inputs = hidden.clone().requires_grad_(), table.clone().requires_grad_()
            value = loss(functional.linear(*inputs) * 3, batch)
            (value / 7).backward()
            found.append([value.detach(), *(own.grad for own in inputs)])
        assert found[0][0].dtype == torch.float32
        for ours, plain in zip(*found, strict=True):
            torch.testing.assert_close(ours, plain, msg=lambda text, s=seed: f"seed {s}: {text}")


def test_logits_of_tokens_without_label_do_not_matter():
    batch = SimpleNamespace(labels=torch.tensor([0, 1, -100]), cu_seqlens=torch.tensor([0, 3]))
    source = torch.tensor([[1.0, 2.0], [torch.inf, torch.nan], [torch.nan, 0.0]])
    logits = source.clone().requires_grad_()
    value = loss_sum(logits * 1.0, batch)
    value.backward()
    assert value.item() == pytest.approx(functional.cross_entropy(source[:1], torch.tensor([1])))
    assert (logits.grad[1:] == 0).all()
    assert (logits.grad[0] != 0).all()


def test_nothing_is_live_but_the_logits_and_a_few_rows(monkeypatch):
    tokens, vocabulary, rows = 512, 1000, 8
    monkeypatch.setattr(token_loss, "_CHUNK", rows * vocabulary)
    generator = torch.Generator().manual_seed(0)
    batch = random_batch(generator, tokens, vocabulary)
    for dtype in (torch.bfloat16, torch.float32):
        hidden = torch.randn(tokens, 4, generator=generator).to(dtype).requires_grad_()
        table = torch.randn(vocabulary, 4, generator=generator).to(dtype)
        with LiveBytes() as memory:
            loss_sum(functional.linear(hidden, table), batch).backward()
        logits = tokens * vocabulary * dtype.itemsize
        assert logits <= memory.peak_bytes < logits + 3 * rows * vocabulary * 4 + 100 * tokens
