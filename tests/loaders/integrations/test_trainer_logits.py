"""BalancedTrainer computes logits where there are labels, unless something else needs all."""

from dataclasses import replace

import pytest
import torch

from isobatch import ConfigError, StreamingLoader, chunked_loss, shift_labels
from support.builds.sample_tables import write_tabled
from support.builds.shard_fixture import group_samples, make_samples

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tiny_internvl import make_internvl  # noqa: E402

from isobatch.loaders.integrations import hf_trainer  # noqa: E402
from isobatch.loaders.integrations.hf_trainer import BalancedMixin, BalancedTrainer  # noqa: E402
from support.models.family_models import make_family_model  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    root = tmp_path_factory.mktemp("packed") / "build"
    write_tabled(root, group_samples(make_samples(40)))
    return root


def make_trainer(build, out, kind=BalancedTrainer, model=None, loader_options=(), **options):
    args = transformers.TrainingArguments(
        str(out),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        max_steps=3,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
    )
    loader = StreamingLoader(build, micro_batches_per_step=2, **dict(loader_options))
    return kind(args=args, model=model or make_internvl(loader), train_dataset=loader, **options)


def train(trainer, monkeypatch):
    """(losses of steps, weights, logits that were computed, tokens)."""
    rows = []
    whole_loss = trainer.model.loss_function

    def watched(logits, labels, shift_labels=None, **options):
        rows.append(logits[..., 0].numel())
        return whole_loss(logits=logits, labels=labels, shift_labels=shift_labels, **options)

    monkeypatch.setattr(trainer.model, "_loss_function", watched, raising=False)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, dict(trainer.model.state_dict()), sum(rows), trainer._num_own_tokens


def test_training_equals_that_with_all_logits(build, tmp_path, monkeypatch):
    for normalizer in ("epoch", "step"):
        options = {"loader_options": {"loss_normalizer": normalizer}}
        trainer = make_trainer(build, tmp_path, **options)
        assert trainer.model.loss_function is chunked_loss
        labelled = train(trainer, monkeypatch)
        every = make_trainer(build, tmp_path, logits="all", **options)
        assert every.model.loss_function is not chunked_loss
        whole = train(every, monkeypatch)
        assert labelled[0] == pytest.approx(whole[0], rel=1e-5)
        for name, weight in whole[1].items():
            torch.testing.assert_close(labelled[1][name], weight, rtol=1e-4, atol=2e-5)
        assert labelled[2] < labelled[3] <= whole[2]


def test_losses_with_weights_train_as_by_hand(build, tmp_path):
    options = {"loss_weights": "sample"}
    trainer = make_trainer(build, tmp_path, loader_options=options)
    first = make_internvl(trainer.loader)
    trainer.model.load_state_dict(first.state_dict())
    (step, *_) = StreamingLoader(build, micro_batches_per_step=2, **options)
    trainer.train()
    expected = 0.0
    for batch in step:
        inputs = hf_trainer.model_inputs(batch, first, with_labels=False)
        logits = first(**inputs).logits[0, : len(batch.labels)]
        targets = shift_labels(batch.labels, batch.cu_seqlens)
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        expected += float(batch.reduce_loss(losses).detach())
    scale = step[0].loss_normalizer / step[0].num_loss_tokens
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected * scale, rel=1e-4)


class WithOwnLoss(BalancedTrainer):
    def compute_loss(self, model, inputs, **options):
        return super().compute_loss(model, inputs, **options)


def test_what_needs_all_logits_has_them(build, tmp_path):
    def loss_of_all(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    cases = [
        {"kind": WithOwnLoss},
        {"compute_metrics": lambda _: {}},
        {"compute_loss_func": loss_of_all},
    ]
    for options in cases:
        trainer = make_trainer(build, tmp_path, **options)
        assert trainer.model.loss_function is not chunked_loss
        assert "logits_to_keep" not in inputs_of(trainer)
        trainer = make_trainer(build, tmp_path, logits="labelled", **options)  # the user says so
        assert trainer.model.loss_function is chunked_loss
        assert "logits_to_keep" in inputs_of(trainer)
    with pytest.raises(ConfigError, match="'few'; it must be"):
        make_trainer(build, tmp_path, logits="few")
    model = make_internvl(StreamingLoader(build))
    model.loss_function = lambda logits, shift_labels=None, **_: logits.sum()
    own = model.loss_function
    assert make_trainer(build, tmp_path, model=model).model.loss_function is own


def inputs_of(trainer):
    (batch, _) = next(iter(trainer.loader))
    return trainer._to_inputs(replace(batch, num_ranks=1))


def test_a_model_that_takes_no_positions_is_told_at_the_start(build, tmp_path):
    model = make_family_model("minicpmv4_6")
    with pytest.warns(RuntimeWarning, match="MiniCPMV4_6.* takes no logits_to_keep"):
        trainer = make_trainer(build, tmp_path, model=model)
    assert trainer.model.loss_function is chunked_loss  # of all logits
    with pytest.raises(ConfigError, match="takes no logits_to_keep; leave logits out"):
        make_trainer(build, tmp_path, model=model, logits="labelled")


def test_trls_trainer_keeps_its_own_head():
    trl = pytest.importorskip("trl")

    class PackedSFT(BalancedMixin, trl.SFTTrainer):
        pass

    trainer = object.__new__(PackedSFT)  # made whole in test_sft_trainer.py
    trainer.compute_loss_func = trainer.model_init = None
    trainer._total_train_tokens = 0
    trainer.model = make_family_model("qwen2_5_vl")
    assert hf_trainer.logits_of(trainer, None, BalancedMixin) == "all"
    with pytest.raises(ConfigError, match="TRL's trainer has a head of its own"):
        hf_trainer.logits_of(trainer, "labelled", BalancedMixin)
