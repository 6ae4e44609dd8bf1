"""The benchmark of labelled logits: all methods have one loss, and fewer logits take less."""

import pytest

pytest.importorskip("transformers")
import labelled_logits


def test_fewer_logits_take_less_memory(monkeypatch, capsys):
    monkeypatch.setattr(labelled_logits, "VOCABULARY", 151_936 // 8)
    model = labelled_logits.make_model()
    batch = labelled_logits.make_batch(labelled_logits.SAMPLE, 6)
    assert batch.num_loss_tokens == 61
    methods = [method for each in labelled_logits.METHODS.values() for method in each]
    results = labelled_logits.compare(model, batch, methods, 1)
    stock, chunked, labelled, both, engine_all, engine = [item.gib for item in results.values()]
    assert stock > 3 * max(labelled, both, engine)
    assert engine_all > 1.5 * engine
    assert chunked < 1.01 * stock  # so few logits are one chunk
    assert capsys.readouterr().err.count("1,024 tokens") == 6


def test_what_does_not_fit_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(labelled_logits, "VOCABULARY", 2_000)
    monkeypatch.setattr(labelled_logits, "free_bytes", lambda: 10_000_000)
    labelled_logits.main(["--tokens", "1024", "--labels", "6", "18"])
    text = capsys.readouterr().out
    assert text.count("does not fit") == 3
    assert text.count("18 %") == 3
