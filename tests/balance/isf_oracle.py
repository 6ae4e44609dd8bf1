"""ISF in plain Python, as one reads it in OmniBal's Algorithm 1 with the rules of `balance.isf`; written for care, not speed."""

import numpy as np


def isf_oracle(vision, tokens, limits, *, seed, iterations):
    vision, tokens = list(map(int, vision)), list(map(int, tokens))
    remaining = list(range(len(tokens)))
    kept, best = [], None
    for iteration in range(iterations):
        if not remaining:
            break
        permutation = np.random.default_rng([seed, iteration]).permutation(len(remaining)).tolist()
        groups = fill([remaining[i] for i in permutation], vision, tokens, limits)
        if best is None or len(kept) + len(groups) < len(best):
            best = kept + groups
        remaining = []
        for group in groups:
            images, text = sum(vision[s] for s in group), sum(tokens[s] for s in group)
            if images >= limits.min_vision or text >= limits.min_seq_len:
                kept.append(group)
            else:
                remaining.extend(group)
    return best or []


def fill(order, vision, tokens, limits):
    groups, group, images, text = [], [], 0, 0
    for sample in order:
        exceeds = images + vision[sample] > limits.max_vision or text + tokens[sample] > limits.max_seq_len
        if group and exceeds:
            groups.append(group)
            group, images, text = [], 0, 0
        group.append(sample)
        images += vision[sample]
        text += tokens[sample]
    if group:
        groups.append(group)
    return groups
