"""What the README's names mean where there is no network: a small model, and a dataset's file."""

import json

import datasets

from support.builds.raw_data import write_image
from support.models.saved_folders import save_folder

FAMILY = "qwen3_vl"
SMALL_TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
TOKENS = {
    **{"image_token_id": "image_pad", "video_token_id": "video_pad"},
    **{"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"},
}
SMALL_VISION = {
    **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
    **{"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}


def readme_folder(folder):
    """A folder in which the README's names mean what is small: a model, and a dataset's file."""
    model = folder / "Qwen" / "Qwen3-VL-2B-Instruct"
    processor = save_folder(FAMILY, model)
    config = json.loads((model / "config.json").read_text())
    config["text_config"] |= SMALL_TEXT | {"vocab_size": len(processor.tokenizer)}
    config["vision_config"] |= SMALL_VISION
    for key, token in TOKENS.items():
        config[key] = processor.tokenizer.convert_tokens_to_ids(f"<|{token}|>")
    (model / "config.json").write_text(json.dumps(config))
    data = folder / "lmms-lab" / "LLaVA-OneVision-Data"
    rows = []
    for number in range(24):
        write_image(data / f"{number}.png", 40 + 8 * (number % 5), 48, number)
        turns = [
            {"from": "human", "value": "<image>\nWhat is it?" + " Say more." * (number % 4)},
            {"from": "gpt", "value": f"It is picture {number}."},
        ]
        image = {"path": None, "bytes": (data / f"{number}.png").read_bytes()}
        rows.append({"id": str(number), "image": image, "conversations": turns})
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "image": datasets.Image(),
            "conversations": datasets.List(
                {"from": datasets.Value("string"), "value": datasets.Value("string")}
            ),
        }
    )
    datasets.Dataset.from_list(rows, features=features).to_parquet(data / "train.parquet")
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: ai2d(gpt4v)\n  data_files: train.parquet\n---\n"
    )
