"""`BalancedLoader(dataset, processor=...)`: an instance counts as its model's folder does."""

import pytest
import torch

from isobatch.common.errors import ConfigError
from isobatch.loaders import BalancedLoader, Encoded
from support.builds.raw_data import record, write_image
from support.loading.contents import content
from support.loading.online_data import records

transformers = pytest.importorskip("transformers")

from support.models.saved_folders import save_folder  # noqa: E402

OPTIONS = {"max_tokens": 4096, "max_vision": 4096, "window": 20, "pixel_dtype": torch.uint8}
FAMILIES = ("qwen2_vl", "internvl", "llava")


def some_records(folder):
    for number in range(4):
        write_image(folder / f"{number}.png", 90 + 40 * number, 130, seed=number)
    images = [[], ["0.png"], ["1.png", "2.png"], ["3.png"]]
    return [record(number, images[number % 4], answer="word " * number) for number in range(12)]


def run(rows, folder, **options):
    with_options = {**OPTIONS, "data_root": str(folder), **options}
    loader = BalancedLoader(rows, **with_options)
    steps = [content(step) for step in loader]
    loader.close()
    assert not loader.rejected
    assert steps
    return loader, steps


def test_an_instance_is_its_folder(tmp_path):
    rows = some_records(tmp_path)
    for family in FAMILIES:
        folder = tmp_path / family
        processor = save_folder(family, folder)
        by_folder, expected = run(rows, tmp_path, model=folder)
        # made in memory, it knows no folder; loaded from it, it does
        by_both, found = run(rows, tmp_path, processor=processor, model=str(folder))
        assert found == expected, family
        processor.tokenizer.name_or_path = str(folder)
        again, found = run(rows, tmp_path, processor=processor)
        assert found == expected, family
        for loader in (by_both, again):
            assert loader.model == by_folder.model, family
            assert loader.model.has_dimensions
            assert loader.vocab_size == by_folder.vocab_size
            assert loader._counter.identity == by_folder._counter.identity
            assert loader.state_dict() == by_folder.state_dict()


def test_a_tokenizer_alone_is_for_text(tmp_path):
    processor = save_folder("qwen2_vl", tmp_path / "model")
    rows = records(tmp_path, 40, images=False)
    _, expected = run(rows, tmp_path, model=str(tmp_path / "model"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    loader, steps = run(rows, tmp_path, processor=tokenizer)
    assert loader.vocab_size == len(tokenizer)
    assert loader.report()["limits"]["max_seq_len"] == OPTIONS["max_tokens"]

    def tokens(steps):
        return sorted(batch[1:4] for step in steps for batch in step)

    assert tokens(steps) == tokens(expected)
    # the model's rule with another tokenizer object
    _, found = run(rows, tmp_path, processor=tokenizer, model=str(tmp_path / "model"))
    assert found == expected
    both = BalancedLoader(
        [*rows, *some_records(tmp_path)],
        processor=tokenizer,
        data_root=str(tmp_path),
        max_rejected=0.5,
        **OPTIONS,
    )
    list(both)
    assert {each.reason for each in both.rejected} == {"no_vision_encoder"}
    assert len(both.rejected) == 9
    both.close()
    with_encode, found = run(
        rows,
        tmp_path,
        processor=processor,
        model=str(tmp_path / "model"),
        encode=lambda row: Encoded([1, 2, 3]),
    )
    assert with_encode.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert found


def test_what_no_processor_is_for_is_one_line(tmp_path):
    processor = save_folder("qwen2_vl", tmp_path)
    processor.tokenizer.name_or_path = "nowhere"
    lost = save_folder("qwen2_vl", tmp_path)
    lost.tokenizer.name_or_path = str(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    unbound = transformers.AutoTokenizer.from_pretrained(tmp_path)
    unbound.model_max_length = 10**30
    cases = {
        "needs its model's config.json, and there is none in 'nowhere'.*; give model= too": {
            "processor": processor
        },
        "needs its model's config.json, and there is none in .*empty": {"processor": lost},
        "processor is a dict; give a processor or tokenizer": {"processor": {}},
        "model is the preset tiny.*processor.tokenizer": {"processor": processor, "model": "tiny"},
        "tokenizer: of no use with processor=; leave out": {
            "processor": processor,
            "tokenizer": str(tmp_path),
        },
        "context length; give max_tokens=": {"processor": unbound, "max_tokens": None},
    }
    for message, options in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            BalancedLoader([record(0)], **OPTIONS | options)
        assert "\n" not in str(caught.value)
        assert "isobatch-" not in str(caught.value)
