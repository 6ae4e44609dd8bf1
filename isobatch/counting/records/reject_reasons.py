"""Every reason to reject a sample, and a rejected sample. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

REASONS: dict[str, str] = {
    "broken_json": "the record is not valid JSON",
    "broken_member": "a file of the sample in its container cannot be read",
    "unreadable_record": "the dataset in memory raises an error instead of giving the record",
    "not_an_object": "the record is not a JSON object",
    "invalid_utf8": "the text is not valid Unicode",
    "too_many_characters": "the text is so long that tokenizing it is not safe",
    "no_conversation": "there are no turns and no text",
    "bad_turn": "a turn has no text or an unknown role",
    "no_answer": "there is no assistant turn, so nothing to learn from",
    "not_learned": "the record says that it is not to be learned",
    "bad_loss": "a weight of the loss is neither 0 nor 1, or does not fit the turns",
    "bad_image_field": "`image` is neither a path nor a list of paths",
    "bad_video_field": "`video` is neither a path nor a list of paths",
    "bad_audio_field": "`audio` is neither a path nor a list of paths",
    "bad_column": "a column of --keep-columns holds what is not JSON",
    "marker_without_image": "the text has more <image> markers than the sample has images",
    "marker_without_video": "the text has more <video> markers than the sample has videos",
    "marker_without_audio": "the text has more <audio> markers than the sample has audio files",
    "unknown_mark": "a mark of a place, such as <image2>, matches no file of the sample",
    "grounding": "the boxes of `objects` cannot be written into the text",
    "chat_template": "the tokenizer's chat template refuses the conversation",
    "control_token": "the text holds a control token's string and cannot be told apart from it",
    "outside_data_root": "a path leads out of the data root",
    "image_url": "an image is given by URL, not by path",
    "video_url": "a video is given by URL, not by path",
    "audio_url": "an audio file is given by URL, not by path",
    "missing_image": "an image file is not there",
    "missing_video": "a video file is not there, or a folder has no images",
    "missing_audio": "an audio file is not there",
    "unreadable_image": "an image file cannot be read",
    "unreadable_video": "a video file cannot be read",
    "unreadable_audio": "an audio file cannot be read",
    "corrupt_image": "an image is damaged, cut short or of an unknown kind",
    "corrupt_video": "a video is damaged, cut short or not a video at all",
    "corrupt_audio": "an audio file is damaged or cut short",
    "video_format": "a video is of a container or codec that cannot be read here",
    "no_video_stream": "a file has no video in it, only audio or the like",
    "frame_rate": "nothing says how many frames of a video are a second",
    "asked_size": "a part of a message asks for another size than the model's rule makes",
    "frame_sizes": "the images that are a video differ in size",
    "short_video": "a video has fewer frames than the model needs",
    "audio_format": "an audio file is of a kind that cannot be read here",
    "no_video": "the model preset takes no videos",
    "no_audio_encoder": "the model preset has no audio encoder",
    "no_vision_encoder": "no model was given that takes images",
    "too_many_pixels": "an image or a frame is so large that decoding it is not safe",
    "too_many_bytes": "the files of a sample are more than an Arrow shard holds in a group",
    "empty_image": "an image has no pixels",
    "empty_video": "a video has no frames, or no pixels",
    "empty_audio": "an audio file has no sound in it, or too little for a token",
    "long_audio": "an audio file is longer than the model's processor takes",
    "aspect_ratio": "the model's processor refuses an image or a video of this shape",
    "longer_than_max_seq_len": "the sample is longer than max_seq_len",
    "more_than_max_vision": "the images and videos are more than the vision cap",
    "media_changed": "an image, a video or an audio file changed between counting and writing",
    "record_changed": "the dataset gave another record than when it was measured",
    "encode_failed": "the function of encode= fails, or gives no sample",
    "left_out": "the function of --map leaves it out",
    "map_failed": "the function of --map fails, or gives no record",
    "not_drawn": "left out by the mixture's weights",
}
"""Every reason for which a sample can be rejected, in words."""

BY_CHOICE = frozenset({"left_out", "not_drawn", "not_learned"})
"""Reasons that are the user's wish and nothing wrong with the data."""


def where_missing(reasons: Iterable[str], option: str) -> str:
    """Words on where files are looked for, if one of them is missing."""
    is_missing = any(reason.startswith("missing_") for reason in reasons)
    return f"; paths of files start from {option}" * is_missing


@dataclass(frozen=True, slots=True)
class Rejected:
    """A sample that cannot be used; `reason` is a key of `REASONS`."""

    sample_id: str
    source: str
    reason: str
    detail: str
