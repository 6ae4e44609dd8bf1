"""The gradients of a step of BalancedTrainer, and of a plain loop over the samples of that step."""

import torch
from tiny_internvl import make_internvl
from transformers import TrainerCallback, TrainingArguments

from isobatch.loaders import BalancedLoader, BalancedTrainer, model_inputs
from support.loading.evaluations import each_alone

FLOAT64 = {"max_tokens": 300, "pixel_dtype": torch.float64}


class Keep(TrainerCallback):
    """Keeps the gradients that the optimizer gets."""

    def on_pre_optimizer_step(self, args, state, control, *, model, **_):
        self.found = {
            name.removeprefix("module."): each.grad.clone()
            for name, each in model.named_parameters()
        }


def gradients_of_trainer(rows, packing, out, *, accumulation):
    """The sample ids of this rank's part of a step, its gradients, and their divisor."""
    packing = packing | FLOAT64
    args = TrainingArguments(
        output_dir=out,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_steps=1,
        max_grad_norm=0.0,
        save_strategy="no",
        gradient_accumulation_steps=accumulation,
    )
    batches, keep = [], Keep()

    def to_inputs(batch):
        batches.append(batch)
        return model_inputs(batch, model.config)

    model = make_model(rows, packing)
    trainer = BalancedTrainer(
        model=model,
        args=args,
        train_dataset=rows,
        loader_options=packing,
        to_inputs=to_inputs,
        callbacks=[keep],
    )
    trainer.train()
    assert args.average_tokens_across_devices or args.world_size == 1
    assert len(batches) == accumulation
    names = [name for batch in batches for name in batch.sample_ids]
    return names, keep.found, batches[0].loss_normalizer


def make_model(rows, packing):
    """The tiny model in float64, for padded rows too."""
    model = make_internvl(BalancedLoader(rows, **packing)).double()
    model.set_attn_implementation("eager")
    return model


def gradients_of_a_loop(rows, packing, names, divisor=None):
    """Of each sample by itself: the sum of its losses / divisor, by default the step's labels.

    Also that number of labels.
    """
    packing = packing | FLOAT64 | {"packing": True}
    model, labels = make_model(rows, packing), 0
    chosen = [row for row in rows if row["id"] in names]
    for batch in each_alone(chosen, packing):
        images = {"pixel_values": batch.pixel_values} if len(batch.pixel_values) else {}
        logits = model(input_ids=batch.input_ids[None], **images).logits[0, :-1]
        targets = batch.labels[1:]
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
        labels += int((targets != -100).sum())
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad / (divisor or labels)
        for name, each in model.named_parameters()
    }, labels


def check_gradients(found, rows, packing):
    """`found` of all ranks: as the loop's, with the divisor that the option says."""
    names = [name for own, *_ in found for name in own]
    assert len(set(names)) == len(names) > 2 * len(found)
    (divisor,) = {each for *_, each in found}
    expected, labels = gradients_of_a_loop(rows, packing, names, divisor)
    assert (divisor == labels) == (packing["loss_normalizer"] == "step")
    for _, gradients, _ in found:
        assert gradients.keys() == expected.keys()
        for name, gradient in gradients.items():
            largest = expected[name].abs().max()
            assert (gradient - expected[name]).abs().max() <= 1e-6 * max(largest, 1e-3), name
    return divisor
