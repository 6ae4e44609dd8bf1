"""Hugging Face's Trainer on a loader without a build."""

import pytest
import torch

from support.loading.online_data import open_ranks, records

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from loaders.integrations.hf_trainer import BalancedTrainer  # noqa: E402


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
