"""Hugging Face's Trainer on a loader without a build."""

import pytest
import torch

from isobatch.loaders import BalancedLoader, Encoded, model_inputs
from support.loading.online_data import open_ranks, records

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from isobatch.loaders.integrations.hf_trainer import BalancedTrainer  # noqa: E402


class TokenModel(torch.nn.Module):
    """The smallest model that a Trainer takes."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab_size, 4), torch.nn.Linear(4, vocab_size)

    def forward(self, input_ids, labels, num_items_in_batch=None, **options):
        logits = self.head(self.embed(input_ids))
        loss = torch.nn.functional.cross_entropy(
            logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
        )
        return {"loss": loss / num_items_in_batch, "logits": logits}


def train(rows, folder, out, *, resume=False, **options):
    """Samples in the order of training, and the weights after it."""
    seen = []

    def to_inputs(batch):
        seen.append(batch.sample_ids)
        return {"input_ids": batch.input_ids, "labels": batch.labels}

    args = transformers.TrainingArguments(
        output_dir=str(out),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_steps=2,
        lr_scheduler_type="constant",
        gradient_accumulation_steps=2,
        **options,
    )
    (loader,) = open_ranks(rows, 1, folder, micro_batches_per_step=2, max_tokens=512)
    torch.manual_seed(0)
    trainer = BalancedTrainer(
        model=TokenModel(loader.vocab_size), args=args, train_dataset=loader, to_inputs=to_inputs
    )
    trainer.train(resume_from_checkpoint=resume)
    loader.close()
    return seen, trainer.model.head.weight.detach().clone()


def test_training_resumes_with_the_same_steps(tmp_path):
    rows = records(tmp_path, 90, images=False)
    seen, weights = train(rows, tmp_path, tmp_path / "whole", max_steps=5)
    first, _ = train(rows, tmp_path, tmp_path / "parts", max_steps=2)
    then, resumed = train(rows, tmp_path, tmp_path / "parts", resume=True, max_steps=5)
    assert first + then == seen
    assert torch.equal(resumed, weights)


def test_a_text_model_trains_on_what_a_function_encodes(tmp_path):
    rows = [
        {"id": str(number), "text": [number % 90 + 1] * (3 + number % 40)} for number in range(90)
    ]
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)

    def encode(row):
        return Encoded(row["text"], [-100, *row["text"][1:]])

    with torch.no_grad():
        logits = [model(torch.tensor([row["text"]])).logits[0, :-1] for row in rows]
    targets = [torch.tensor(row["text"][1:]) for row in rows]
    parts = zip(logits, targets, strict=True)
    expected = sum(
        float(torch.nn.functional.cross_entropy(*part, reduction="sum")) for part in parts
    )
    options = {"encode": encode, "max_tokens": 200, "max_vision": 0, "window": 90}
    losses, labels = [], 0
    loader = BalancedLoader(rows, **options, micro_batches_per_step=3, loss_normalizer="step")
    for step in loader:
        with torch.no_grad():
            loss = sum(float(model(**model_inputs(batch, config)).loss) for batch in step)
        losses.append(loss * step[0].num_loss_tokens)
        labels += step[0].num_loss_tokens
    loader.close()
    assert labels == sum(map(len, targets))
    assert sum(losses) == pytest.approx(expected, rel=1e-5)
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        save_strategy="no",
        num_train_epochs=1,
        learning_rate=0.01,
        logging_steps=1,
        gradient_accumulation_steps=3,
    )
    trainer = BalancedTrainer(model=model, args=args, train_dataset=rows, loader_options=options)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == len(losses)
    assert logged[-1] < logged[0]
