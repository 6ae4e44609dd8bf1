"""A rank of a context-parallel group that trains a tiny Qwen2-VL on its shard of a row."""

import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from isobatch.loaders.batch.context_images import _SumOverRanks, encode_dealt
from isobatch.loaders.batch.context_shards import context_shard, shard_indices
from isobatch.loaders.batch.packed import packed_batch
from support.models.tiny_models import make_batch, make_model

MERGED = 4
"""ViT tokens of one token of the LLM."""


def whole_values(values, dim, places, length):
    """Those of all ranks in one tensor, each at its places; gradients come back as sums."""
    shape = [*values.shape]
    shape[dim] = length
    whole = values.new_zeros(shape).index_copy(dim, places, values)
    return _SumOverRanks.apply(whole, None)


def attention_over_ranks(borders, places, scheme):
    """An attention function of transformers: of this rank's tokens to all before, sample by sample.

    Zigzag and head-tail: its queries, all keys. Ulysses: its heads, all queries and keys.
    """
    total = int(borders[-1])
    sample = torch.bucketize(torch.arange(total), borders[1:], right=True)
    row = torch.arange(total)
    sees = (sample[:, None] == sample[None]) & (row[:, None] >= row[None])

    def attend(module, query, key, value, attention_mask, scaling, **_):
        repeats = query.shape[1] // key.shape[1]
        key, value = (
            whole_values(part, 2, places, total).repeat_interleave(repeats, dim=1)
            for part in (key, value)
        )
        if scheme != "ulysses":
            mixed = scaled_dot_product_attention(
                query, key, value, attn_mask=sees[places], scale=scaling
            )
            return mixed.transpose(1, 2), None
        query = whole_values(query, 2, places, total)
        count = query.shape[1] // dist.get_world_size()
        heads = torch.arange(count) + dist.get_rank() * count
        mixed = scaled_dot_product_attention(
            query[:, heads], key[:, heads], value[:, heads], attn_mask=sees, scale=scaling
        )
        mixed = whole_values(mixed, 1, heads, query.shape[1])
        return mixed[:, :, places].transpose(1, 2), None

    return attend


def loss_and_gradients(image_counts, scheme):
    """Those of the whole row, summed over the ranks: -> loss, {parameter: gradient}."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = make_model("qwen2_vl")
    batch = make_batch("qwen2_vl", image_counts, seed=3, num_loss_tokens=7)
    row = packed_batch(batch, model.config, pad_each_to=2 * size)
    shard = context_shard(row, rank, size, scheme)
    places = shard_indices(row.cu_seqlens_padded, rank, size, scheme)
    attend = attention_over_ranks(row.cu_seqlens_padded.long(), places, scheme)
    transformers.AttentionInterface.register("over_ranks", attend)
    text = model.model.language_model
    text.config._attn_implementation_internal = "over_ranks"
    # Images
    grids = row.media["image_grid_thw"]
    loads = grids.prod(dim=1).tolist()
    pixels = row.media["pixel_values"].split(loads)

    def encode(images):
        values = torch.cat([pixels[image] for image in images])
        features = model.model.get_image_features(values, grids[images]).pooler_output
        return torch.cat([*features])

    features = encode_dealt(encode, loads, [load // MERGED for load in loads])
    # Tokens
    embedded = text.embed_tokens(shard.input_ids)
    is_image = row.mm_token_type_ids == 1
    number = (is_image.cumsum(0) - 1)[places]
    embedded = embedded.clone()
    embedded[is_image[places]] = features[number[is_image[places]]]
    hidden = text(
        inputs_embeds=embedded[None],
        position_ids=shard.mrope_positions[:, None],
        attention_mask={"full_attention": None},
        use_cache=False,
    ).last_hidden_state
    logits = model.lm_head(hidden[0])
    loss = cross_entropy(logits, shard.labels, reduction="sum") / row.samples.loss_normalizer
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(gradient)
        gradients[name] = gradient
    return float(total), gradients


def train(said, image_counts, scheme, file):
    loss, gradients = loss_and_gradients(image_counts, scheme)
    said["loss"] = loss
    if dist.get_rank() == 0:
        torch.save(gradients, file)
