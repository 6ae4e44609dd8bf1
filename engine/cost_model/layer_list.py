"""A model as a list of layers, each a list of operations. Pure.

Audio encoder, vision encoder, language model; an encoder is its embedding, layers, projector. Sizes
are those of one tensor-parallel GPU with whole attention heads: InternViT-6B's 25 on two are 13.

What a layer saves for the backward pass is in `models.layer_bytes`. Weight gradients that are
deferred need the inputs of products, in bf16 4h + 2a + 2f bytes per token, and the gradients of
their outputs, 4h + 2(a + 2k) + 2f, or 4f if gated: h is the width, a and k that of all query and
all key heads, f that of the feed-forward part. What is in h is split among GPUs only with sequence
parallelism.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from isobatch.engine.cost_model.operations import (
    BYTES,
    Attention,
    Collective,
    Elementwise,
    Layer,
    MatMul,
    Operation,
    Sent,
    TokenStream,
)
from isobatch.engine.cost_model.parallel import Parallelism, Part, Training
from isobatch.models.layer_bytes import (
    FLOAT_BYTES,
    LOGIT_BYTES,
    LOSS_CHUNK,
    LayerRun,
    embedding_bytes,
    head_bytes,
    projector_bytes,
    transformer_bytes,
)
from isobatch.models.presets import EncoderShape, LlmShape, ModelPreset, TransformerShape, VitShape


def layers_of(
    model: ModelPreset, parallel: Parallelism, training: Training | None = None
) -> tuple[Layer, ...]:
    """The layers of a model. ConfigError if the preset does not give the model's dimensions.

    What they save is by the dtype and kernels of `training`.

    >>> from isobatch.models.presets import load_model
    >>> layers = layers_of(load_model("tiny"), Parallelism())
    >>> [layer.kind for layer in layers][:4]
    ['patch_embedding', 'vision_layer', 'vision_layer', 'vision_projector']
    """
    vit, llm = model.dimensions
    training = training or Training()
    run = LayerRun(
        gpus=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        number_bytes=training.mode.weight_bytes,
        kernels=training.kernels,
    )
    layers: list[Layer] = []
    passing: Sent = ()
    if model.audio_encoder is not None:
        sizes = _Sizes(model.audio_encoder, TokenStream(phase="audio"), run)
        products = _audio_embedding(model)
        layers += _encoder(sizes, "audio", products, passing, merged_from=1.0)
        passing = layers[-1].sent
    sizes = _Sizes(vit, TokenStream(phase="vision"), run)
    # the class token is not embedded from pixels, and not passed on
    share = model.embedded_share
    patches = TokenStream(phase="vision", per_token=share)
    product = MatMul(inputs=vit.patch_values, outputs=vit.hidden_size, stream=patches)
    layers += _encoder(sizes, "vision", (product,), passing, merged_from=share)
    return (*layers, *_language_model(_Sizes(llm, TokenStream(phase="llm"), run), llm))


def _audio_embedding(model: ModelPreset) -> tuple[MatMul, ...]:
    """Convolutions with kernels of three frames, or of three frames and three mel bins."""
    if (shape := model.audio_encoder) is None:
        return ()
    rule = model.audio
    tokens = TokenStream(phase="audio")
    width = shape.hidden_size
    if shape.conv_channels is None:
        frames = TokenStream(phase="audio", per_token=rule.conv_stride if rule else 2)
        first = MatMul(inputs=3 * shape.frame_values, outputs=width, stream=frames)
        return first, MatMul(inputs=3 * width, outputs=width, stream=tokens)
    # frames of a chunk, or of one token, and mel bins are halved three times, rounded up
    frames_left, bins, inputs = (rule.chunk_frames if rule else None) or 8, shape.frame_values, 1
    per_chunk = -(-frames_left // 8)
    products = []
    for _ in range(3):
        frames_left, bins = -(-frames_left // 2), -(-bins // 2)
        stream = TokenStream(phase="audio", per_token=frames_left * bins / per_chunk)
        products.append(MatMul(inputs=9 * inputs, outputs=shape.conv_channels, stream=stream))
        inputs = shape.conv_channels
    return (*products, MatMul(inputs=bins * inputs, outputs=width, stream=tokens))


def phases_of(model: ModelPreset) -> dict[str, str]:
    """The phase whose tokens decide the cost of each kind of layer, for profiles."""
    return {layer.kind: layer.stream.phase for layer in layers_of(model, Parallelism())}


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A stack of transformer layers as one GPU holds it."""

    shape: TransformerShape
    stream: TokenStream
    run: LayerRun

    @property
    def shared(self) -> float:
        """Width of what GPUs split only with sequence parallelism."""
        return self.run.token_share(self.shape.hidden_size)

    @property
    def output_bytes(self) -> float:
        return BYTES * self.shared

    @property
    def norm(self) -> Elementwise:
        return self.elementwise(4 * self.shared, 1)

    def gathers(self, *widths: int, count: int = 1) -> tuple[Collective, ...]:
        """Gathers among tensor-parallel GPUs of tokens of each width; none on one GPU."""
        if self.run.gpus == 1:
            return ()
        sizes = (BYTES * width for width in widths)
        return tuple(Collective(bytes_per_token=s, count=count, stream=self.stream) for s in sizes)

    def elementwise(self, bytes_per_token: float, kernels: int) -> Elementwise:
        return Elementwise(bytes_per_token=bytes_per_token, kernels=kernels, stream=self.stream)

    def product(self, inputs: int, outputs: int) -> MatMul:
        return MatMul(inputs=inputs, outputs=outputs, stream=self.stream)


def _transformer_layer(sizes: _Sizes, part: Part, sent: Sent) -> Layer:
    shape, h, tp = sizes.shape, sizes.shape.hidden_size, sizes.run.gpus
    # widths on one GPU: all query heads, all key heads, feed-forward part
    a, k = sizes.run.head_widths(shape)
    f = sizes.run.split(shape.ffn_size)
    attention = a + 2 * k
    mixed = ("gated_attention", "linear_weights", "mean_attention_weights")
    if any(getattr(shape, name, None) for name in mixed):
        # a mean layer: with a gate, or with other matrices where attention is linear
        attention = shape.attention_weights // h // tp - a
    causal = isinstance(shape, LlmShape)
    scaled = isinstance(shape, VitShape) and shape.layer_scale
    normed = isinstance(shape, VitShape) and shape.query_key_norm
    # a residual reads two and writes one, a layer scale reads one and writes one
    residual = sizes.elementwise((6 + 4 * scaled) * sizes.shared, 1 + scaled)
    # rotary positions, or norms of queries and keys
    turned = (sizes.elementwise(4.0 * (a + k), 2),) if causal or normed else ()
    ups = 2 if shape.gated else 1
    # around a tensor-parallel pair of products, as sequence parallelism has them
    gathers = sizes.gathers(h, count=2)
    operations: tuple[Operation, ...] = (
        # attention
        sizes.norm,
        *gathers,
        sizes.product(h, attention),
        *turned,
        Attention(width=a, kv_width=k, causal=causal, stream=sizes.stream),
        sizes.product(a, h),
        residual,
        # feed-forward part
        sizes.norm,
        *gathers,
        sizes.product(h, ups * f),
        sizes.elementwise((2.0 + 2 * ups) * f, 1),
        sizes.product(f, h),
        residual,
    )
    # all experts are held, of which a token goes to some
    experts = (shape.all_experts_size if isinstance(shape, LlmShape) else None) or shape.ffn_size
    held = shape.held_weights if isinstance(shape, LlmShape) else shape.layer_weights
    weights = h * attention + a * h + (ups + 1) * h * -(-experts // tp)
    return Layer(
        kind=f"{part}_layer",
        part=part,
        stream=sizes.stream,
        operations=operations,
        num_params=held + 2 * h,
        gpu_params=weights + 2 * h,
        saved=transformer_bytes(shape, sizes.run),
        deferred_bytes=8 * sizes.shared + 2.0 * (a + 2 * k) + 2 * a + (2 + 2 * ups) * f,
        input_bytes=sizes.output_bytes,
        working_bytes=2.0 * h + sizes.output_bytes + 2 * ups * f,
        sent=sent,
    )


def _encoder(
    sizes: _Sizes, part: Part, products: tuple[MatMul, ...], passing: Sent, *, merged_from: float
) -> list[Layer]:
    """Embedding, layers, projector; `products`: those of the embedding."""
    shape = sizes.shape
    if not isinstance(shape, EncoderShape):
        raise TypeError(f"{part}: give the shape of an encoder, not {type(shape).__name__}")
    h = shape.hidden_size
    sent = ((sizes.stream, sizes.output_bytes), *passing)
    num_params = sum(product.inputs * product.outputs for product in products)
    tokens = products[-1].stream.per_token
    embedded = [product.inputs * product.stream.per_token / tokens for product in products]
    outputs = [product.outputs * product.stream.per_token / tokens for product in products]
    embedding = Layer(
        kind="patch_embedding" if part == "vision" else f"{part}_embedding",
        part=part,
        stream=products[-1].stream,
        # too small to be split: every tensor-parallel GPU computes it all
        operations=products,
        num_params=num_params,
        gpu_params=num_params,
        saved=embedding_bytes(sum(embedded), sizes.run),
        deferred_bytes=float(BYTES * (sum(embedded) + sum(outputs))),
        input_bytes=float(BYTES * embedded[0]),
        working_bytes=float(BYTES * h),
        sent=sent,
    )
    merged = shape.merged_share(merged_from)
    features = TokenStream(phase=sizes.stream.phase, per_token=merged)
    layer = _transformer_layer(sizes, part, sent)
    projector = _projector(replace(sizes, stream=features), shape, f"{part}_projector", passing)
    return [embedding, *[layer] * shape.num_layers, projector]


def _projector(sizes: _Sizes, shape: EncoderShape, kind: str, passing: Sent) -> Layer:
    """Norm and an MLP, whose products are split in turn by their outputs and by their inputs."""
    run, widths = sizes.run, shape.projector
    held = [run.split(width) if place % 2 else width for place, width in enumerate(widths)]
    first, last = run.token_share(widths[0]), run.token_share(widths[-1])
    operations: list[Operation] = [sizes.elementwise(4 * first, 1)]
    operations += sizes.gathers(widths[0], widths[-1])
    for inputs, outputs in pairwise(held):
        operations.append(sizes.product(inputs, outputs))
        operations.append(sizes.elementwise(4.0 * outputs, 1))
    operations.pop()  # no activation function after the last product
    operations *= shape.num_projectors
    weights = shape.num_projectors * sum(inputs * outputs for inputs, outputs in pairwise(held))
    return Layer(
        kind=kind,
        part="projector",
        stream=sizes.stream,
        operations=tuple(operations),
        num_params=shape.projector_weights + widths[0],
        gpu_params=weights + widths[0],
        saved=projector_bytes(shape, run),
        deferred_bytes=shape.num_projectors
        * (2 * first + sum(4.0 * width for width in held[1:-1]) + 2 * last),
        input_bytes=BYTES * first,
        working_bytes=float(BYTES * widths[0]) + 2.0 * max(held[1:]),
        sent=((sizes.stream, BYTES * last), *passing),
    )


def _language_model(sizes: _Sizes, llm: LlmShape) -> list[Layer]:
    """Token embedding, layers, final norm and head with the loss; GPUs split the vocabulary."""
    h = llm.hidden_size
    vocabulary = sizes.run.split(llm.vocab_size)
    gather = sizes.gathers(h)
    sent = ((sizes.stream, sizes.output_bytes),)
    embedding = Layer(
        kind="token_embedding",
        part="llm",
        stream=sizes.stream,
        operations=(sizes.elementwise(4.0 * h, 2), *gather),
        num_params=llm.vocab_size * (llm.embedding_size or h),
        gpu_params=vocabulary * (llm.embedding_size or h),
        working_bytes=2.0 * h,
        sent=sent,
    )
    # the tokens with a label; logits wait for their gradient, which takes their place; a chunk of
    # them is exponentiated, of bf16 ones also copied, in float32 (`tensors.token_loss`)
    chunk = FLOAT_BYTES * (2.0 if sizes.run.number_bytes < FLOAT_BYTES else 1.0)
    some = replace(sizes, stream=TokenStream(phase="labels"))
    loss = some.elementwise(12.0 * vocabulary, 3)
    head = Layer(
        kind="head",
        part="llm",
        stream=some.stream,
        inputs=sizes.stream,
        operations=(some.norm, *some.gathers(h), some.product(h, vocabulary), loss),
        num_params=llm.vocab_size * h + h,
        gpu_params=vocabulary * h + h,
        saved=head_bytes(llm, sizes.run, LOGIT_BYTES["fused"]),
        deferred_bytes=2 * sizes.shared + 2.0 * vocabulary,
        input_bytes=sizes.output_bytes,
        working_bytes=2.0 * h,
        chunk_bytes=chunk * vocabulary,
        max_chunk_bytes=chunk * LOSS_CHUNK,
        sent=sent,
    )
    return [embedding, *[_transformer_layer(sizes, "llm", sent)] * llm.num_layers, head]
