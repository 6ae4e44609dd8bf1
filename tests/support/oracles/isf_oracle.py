"""ISF in plain Python, as one reads it in OmniBal's Algorithm 1, with the rules that
`balance.grouping.isf` states.
"""

MASK = (1 << 64) - 1


def isf_oracle(vision, tokens, limits, *, seed, iterations):
    vision, tokens = list(map(int, vision)), list(map(int, tokens))
    remaining = list(range(len(tokens)))
    kept, best = [], None
    for iteration in range(iterations):
        if not remaining:
            break
        shuffle(remaining, mix((mix(seed) + iteration) & MASK))
        groups = fill(remaining, vision, tokens, limits)
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
        exceeds = (
            images + vision[sample] > limits.max_vision
            or text + tokens[sample] > limits.max_seq_len
        )
        if group and exceeds:
            groups.append(group)
            group, images, text = [], 0, 0
        group.append(sample)
        images += vision[sample]
        text += tokens[sample]
    if group:
        groups.append(group)
    return groups


def shuffle(values, state):
    for last in range(len(values) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        place = int((mix(state) >> 11) * 2.0**-53 * (last + 1))
        values[place], values[last] = values[last], values[place]


def mix(bits):
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
    return bits ^ (bits >> 31)
