"""Real data: the few MB in tests/data, or the whole corpora that `pytest --corpora` names."""

import json
import os
from pathlib import Path

import numpy as np

from support import TESTS

OPTION = "ISOBATCH_TEST_CORPORA"
"""Environment variable that carries the option to where tests are collected and run."""

WHOLE = Path(os.environ[OPTION]).resolve() if OPTION in os.environ else None
DATA = TESTS / "data"
CORPORA = WHOLE / "corpora" if WHOLE else DATA
MANUALS, SPEECH = CORPORA / "manuals", CORPORA / "speech"
TOKENIZERS = (WHOLE or DATA) / "tokenizers"
BYTE_LEVEL = "qwen2_5" if WHOLE else "byte_level"
BYTE_FALLBACK = "internlm2" if WHOLE else "byte_fallback"
"""Names of a tokenizer on bytes, as GPT's, and one on pieces, as SentencePiece's."""


def lengths() -> dict[str, np.ndarray]:
    """Columns of OmniBal's lengths, AI2D before ChartQA; published ones only of whole corpora."""
    keys = ("vit_num", "image_flags", "token_num")
    if WHOLE is None:
        with np.load(DATA / "lengths" / "resampled.npz") as file:
            parts = [{key: file[f"{name}/{key}"] for key in keys} for name in ("ai2d", "chartqa")]
    else:
        files = sorted((WHOLE / "data" / "omnibal_lengths").glob("*.json"))
        rows = [json.loads(path.read_text("utf-8")) for path in files]
        parts = [{key: np.array([row[key] for row in part]) for key in keys} for part in rows]
    return {key: np.concatenate([part[key] for part in parts]).astype(np.int64) for key in keys}
