"""Documents: interleaved (MMC4, OBELICS), captions (COYO) and plain text.

For `packer.records.schemas`. Each becomes one turn with the role `document`. Pure; SampleProblem
says what is wrong with one.
"""

from collections.abc import Mapping, Sequence

from packer.records.media import Media, SampleProblem
from packer.records.media_fields import files_of, media_of, media_of_base64
from packer.records.record import Content, Record, plain_text, with_markers
from packer.text.chat_tokenizer import AUDIO_MARKER, DOCUMENT, IMAGE_MARKER, Turn

CAPTION_KEYS = ("caption", "txt", "TEXT")
PAIR_KEYS = ("width", "image_phash")
"""Next to `url` and `text`, these tell a pair of COYO or LAION from a web page."""
URL_KEYS = ("url", "URL", "raw_url")


def read_mmc4(record: Record) -> Content:
    """MMC4: `text_list`, and in `image_info` the sentence that each image precedes."""
    before: dict[int, list[Media]] = {}
    sentences, infos = record["text_list"], record.get("image_info") or []
    if not isinstance(sentences, list) or not all(isinstance(text, str) for text in sentences):
        raise SampleProblem("bad_turn", "`text_list` is not a list of texts")
    if not isinstance(infos, list):
        bad = f"`image_info` is a {type(infos).__name__}, not a list"
        raise SampleProblem("bad_image_field", bad)
    for info in infos:
        place = info.get("matched_text_index") if isinstance(info, Mapping) else None
        if not isinstance(place, int) or isinstance(place, bool) or not 0 <= place < len(sentences):
            bad = f"`image_info` puts an image at sentence {str(place)[:80]}"
            raise SampleProblem("bad_image_field", bad)
        before.setdefault(place, []).append(_mmc4_image(info))
    texts = [
        IMAGE_MARKER * len(before.get(place, ())) + plain_text(text)
        for place, text in enumerate(sentences)
    ]
    images = [image for place in sorted(before) for image in before[place]]
    return _document(" ".join(texts), images)


def _mmc4_image(info: Record) -> Media:
    """By name, as base64 (converters to tars), or by a URL that nobody has downloaded."""
    if info.get("image_base64") is not None:
        return media_of_base64(info["image_base64"], "image")
    return media_of(info.get("image_name") or info.get("raw_url"), "image")


def read_obelics(record: Record) -> Content:
    """OBELICS: `images` and `texts` of equal length, at each place one of the two."""
    images, texts = record["images"], record["texts"]
    if len(images) != len(texts):
        raise SampleProblem(
            "bad_image_field",
            f"{len(images)} `images` and {len(texts)} `texts`; one list of places",
        )
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise SampleProblem("bad_turn", f"`texts` holds a {type(text).__name__}")
    files = [media_of(image, "image") for image in images if image]
    pieces = [
        IMAGE_MARKER * bool(image) + plain_text(text or "")
        for image, text in zip(images, texts, strict=True)
    ]
    return _document("\n\n".join(filter(None, pieces)), files)


def read_caption(record: Record) -> Content:
    """An image or a clip and its caption: COYO, img2dataset, and pairs in a tar."""
    text = next(record[key] for key in (*CAPTION_KEYS, "text") if record.get(key) is not None)
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"the caption is a {type(text).__name__}")
    images, audios = files_of(record, "image"), files_of(record, "audio")
    if not images and not audios:
        raise _no_image(record)
    markers = IMAGE_MARKER * len(images) + AUDIO_MARKER * len(audios)
    return _document(markers + plain_text(text), images, audios)


def _no_image(record: Record) -> SampleProblem:
    """Why a caption has no file: its download failed, or has not been tried."""
    status, error = record.get("status"), record.get("error_message")
    if isinstance(status, str) and status != "success":
        return SampleProblem("missing_image", f"{status}: {error}"[:200] if error else status[:200])
    url = next((record[key] for key in URL_KEYS if isinstance(record.get(key), str)), None)
    if status is None and url is not None:
        advice = f"{url[:120]}: download it first, for example with img2dataset"
        return SampleProblem("image_url", advice)
    return SampleProblem("missing_image", "a caption without an image")


def read_text(record: Record) -> Content:
    """Plain text; with images, `<image>` marks their places."""
    text = record["text"]
    if not isinstance(text, str):
        raise SampleProblem("bad_turn", f"`text` is a {type(text).__name__}")
    images, audios = files_of(record, "image"), files_of(record, "audio")
    if not images:
        text = plain_text(text)
    (turn,) = with_markers((Turn(DOCUMENT, text),), IMAGE_MARKER, len(images))
    (turn,) = with_markers((turn,), AUDIO_MARKER, len(audios)) if audios else (turn,)
    return _document(turn.text, images, audios)


def _document(text: str, images: Sequence[Media], audios: Sequence[Media] = ()) -> Content:
    if not text.replace(IMAGE_MARKER, "").replace(AUDIO_MARKER * bool(audios), "").strip():
        raise SampleProblem("no_conversation", "the text is empty")
    return Content((Turn(DOCUMENT, text),), tuple(images), tuple(audios))
