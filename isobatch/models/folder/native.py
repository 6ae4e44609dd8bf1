"""Families at native resolution: Qwen2-VL to Qwen3.5, Omni, GLM-4V. Pure."""

from dataclasses import replace

from isobatch.models.audio_tokens import AudioRule
from isobatch.models.folder.files import ModelFiles
from isobatch.models.folder.json_table import JsonTable
from isobatch.models.folder.pixels import HARMLESS, edges, pixels_of
from isobatch.models.folder.shapes import llm_shape, part_of, preset_of
from isobatch.models.image_rules import NativeRule
from isobatch.models.presets import AudioEncoderShape, MediaMarkup, ModelPreset, VitShape

_QWEN = "Qwen2VLImageProcessor"
_GLM = ("Glm4vImageProcessor", "Glm46VImageProcessor")
_AUDIO_HARMLESS = (
    *("chunk_length", "dither", "feature_size", "hop_length", "n_fft", "n_samples"),
    *("nb_max_frames", "padding_side", "padding_value", "return_attention_mask", "sampling_rate"),
)
"""Settings of Omni models' audio in the same old file."""
_SAMPLING_RATE = 16_000
"""What the Omni processors ask their feature extractor for."""
_N_WINDOW = 50
"""Half a chunk of Qwen3-Omni's encoder, whose 13 tokens are written in transformers' code."""
_APART = "qwen2_5_omni_vision_encoder"
"""The only encoder of these that has products of their own for queries, keys and values."""
_MAX_ASPECT_RATIO = 200.0
"""Ratio of the sides above which `smart_resize` of transformers raises."""


def read_qwen_vl(files: ModelFiles) -> ModelPreset:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5, dense and with experts."""
    image = files.named_token("image_token", "<|image_pad|>")
    markup = MediaMarkup(token=image, prefix="<|vision_start|>", suffix="<|vision_end|>")
    return _qwen(files, files, markup)


def read_qwen_omni(files: ModelFiles) -> ModelPreset:
    """Qwen2.5-Omni and Qwen3-Omni: images and audio of the thinker."""
    kind = f"{files.model_type}_thinker"
    config = files.config_table().table("thinker_config")
    thinker = replace(files, config={**config.file_values, "model_type": kind})
    seen, heard = (
        MediaMarkup(
            token=files.named_token(f"{token}_token"),
            prefix=files.named_token(f"{wrapper}_bos_token"),
            suffix=files.named_token(f"{wrapper}_eos_token"),
        )
        for token, wrapper in (("image", "vision"), ("audio", "audio"))
    )
    encoder = part_of(thinker, "audio_config")
    return replace(
        _qwen(files, thinker, seen),
        audio_markup=heard,
        audio=_audio_rule(files, encoder),
        audio_encoder=_audio_shape(encoder),
    )


def _audio_rule(files: ModelFiles, encoder: JsonTable) -> AudioRule:
    """Qwen2.5-Omni's extractor pads to its longest clip, Qwen3-Omni's to that of the sample."""
    audio = files.audio_table("WhisperFeatureExtractor")
    fixed = {"sampling_rate": _SAMPLING_RATE, "n_fft": _SAMPLING_RATE // 40, "dither": 0}
    fixed |= {"feature_size": encoder.count("num_mel_bins")}
    for key, only in (fixed | {"padding_side": "right", "padding_value": 0}).items():
        audio.require(key, only)
    hop = audio.count("hop_length")
    chunk = 2 * encoder.count("n_window")
    longest = audio.count("chunk_length") * _SAMPLING_RATE
    if longest % hop:
        raise audio.wrong("hop_length", f"only a divisor of {longest}, chunk_length, is supported")
    # derived, or replaced by the processor
    audio.require_read(("processor_class", "n_samples", "nb_max_frames", "return_attention_mask"))
    rule = AudioRule(hop_length=hop, downsample=2, chunk_frames=chunk, attention_frames=chunk)
    if "n_window_infer" not in encoder:
        return replace(rule, window_frames=longest // hop, long_clips="reject")
    encoder.require("n_window", _N_WINDOW)
    span = encoder.count("n_window_infer")
    if span % chunk:
        raise encoder.wrong("n_window_infer", f"only a multiple of {chunk} is supported")
    return replace(rule, conv_stride=8, downsample=1, attention_frames=span, long_clips="whole")


def _audio_shape(encoder: JsonTable) -> AudioEncoderShape:
    width, output = encoder.count("d_model"), encoder.count("output_dim")
    heads = encoder.count("encoder_attention_heads")
    is_third = "n_window_infer" in encoder
    return AudioEncoderShape(
        num_layers=encoder.count("encoder_layers"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        ffn_size=encoder.count("encoder_ffn_dim"),
        gated=False,
        projector=(width, width, output) if is_third else (width, output),
        pooled=1 if is_third else 2,
        frame_values=encoder.count("num_mel_bins"),
        conv_channels=encoder.count("downsample_hidden_size") if is_third else None,
    )


def _qwen(files: ModelFiles, model: ModelFiles, markup: MediaMarkup) -> ModelPreset:
    text = part_of(model, "text_config", flat=True)
    return ModelPreset(
        name=files.model_type,
        description=f"{files.model_type}: native resolution, from the model's own files",
        context_len=text.count("max_position_embeddings"),
        image_markup=markup,
        vision=_native_rule(files.image_table(_QWEN)),
        vit=qwen_vit(part_of(model, "vision_config"), text),
        llm=llm_shape(text),
    )


def read_glm4v(files: ModelFiles) -> ModelPreset:
    """GLM-4.1V, GLM-4.5V and GLM-4.6V: an image is two frames when its area is tested."""
    rule = _native_rule(files.image_table(*_GLM))
    rule = replace(rule, frames_in_area=rule.temporal_patch_size, scales_up=True)
    markup = MediaMarkup(
        token=files.named_token("image_token", "<|image|>"),
        prefix="<|begin_of_image|>",
        suffix="<|end_of_image|>",
    )
    vit = _glm_vit(part_of(files, "vision_config"))
    return preset_of(files, "native resolution", markup, rule, vit)


def _native_rule(images: JsonTable) -> NativeRule:
    size = edges(images)
    for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if images.value(key) is not None:  # of old files, which win
            size[edge] = images.count(key)
            size.pop(key, None)
    if set(size) != {"shortest_edge", "longest_edge"}:
        raise images.wrong("size", "give shortest_edge and longest_edge, in pixels of area")
    rule = NativeRule(
        **pixels_of(images),
        vit_patch_size=images.count("patch_size"),
        merge_size=images.count("merge_size"),
        temporal_patch_size=images.count("temporal_patch_size"),
        min_pixels=size["shortest_edge"],
        max_pixels=size["longest_edge"],
        max_aspect_ratio=_MAX_ASPECT_RATIO,
    )
    images.require_read((*HARMLESS, *_AUDIO_HARMLESS, "default_to_square"))
    return rule


def qwen_vit(vision: JsonTable, text: JsonTable) -> VitShape:
    """Dimensions of an encoder of Qwen-VL."""
    # Qwen2-VL calls the encoder's width embed_dim, and the language model's hidden_size
    is_first = "embed_dim" in vision
    width = vision.count("embed_dim" if is_first else "hidden_size")
    ffn = width * vision.count("mlp_ratio") if is_first else vision.count("intermediate_size")
    merged = width * vision.count("spatial_merge_size") ** 2
    output = text.count("hidden_size") if is_first else vision.count("out_hidden_size")
    patch, frames = vision.count("patch_size"), vision.count("temporal_patch_size")
    full, window = None, None
    if "window_size" in vision:
        full = len(vision.integers("fullatt_block_indexes"))
        window = (vision.count("window_size") // patch) ** 2
    heads = vision.count("num_heads")
    return VitShape(
        num_layers=vision.count("depth"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        ffn_size=ffn,
        gated=window is not None,
        num_full_layers=full,
        window=window,
        projector=(merged, merged, output),
        num_projectors=1 + len(vision.integers("deepstack_visual_indexes")),
        patch_values=_channels(vision) * frames * patch**2,
        quick_gelu=vision.value("hidden_act") == "quick_gelu",
        joint_attention=vision.text("model_type") != _APART,
    )


def _glm_vit(vision: JsonTable) -> VitShape:
    width, output = vision.count("hidden_size"), vision.count("out_hidden_size")
    merged = width * vision.count("spatial_merge_size") ** 2
    # three matrices of a gated MLP, as two of half as much more
    gated = vision.count("intermediate_size") * 3 // 2
    heads, frames = vision.count("num_heads"), vision.count("temporal_patch_size")
    return VitShape(
        num_layers=vision.count("depth"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_size=width // heads,
        ffn_size=output,
        gated=True,
        projector=(merged, output, output, gated, output),
        joint_attention=True,
        patch_values=_channels(vision) * frames * vision.count("patch_size") ** 2,
    )


def _channels(vision: JsonTable) -> int:
    return vision.count("in_channels", "in_chans")
