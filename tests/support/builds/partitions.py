"""A dataset of several partitions, and the options that cut it."""

import random

from support.builds.raw_data import good_records, record, write_dataset

SAMPLES = 2600
UNUSABLE = {"s100", "s2000"}
CUT = {"partition_samples": 1000, "max_seq_len": 2048, "shard_mb": 1, "chunk_records": 256}


def make_raw(folder):
    """Few records with images and many with text alone, two of which cannot be used."""
    draw = random.Random(3)
    rows = good_records(folder, 40)
    rows += [
        record(number, text="word " * draw.randrange(20), answer="word " * draw.randrange(1, 20))
        for number in range(40, SAMPLES)
    ]
    rows[100]["conversations"] = []
    rows[2000]["image"] = "images/none.png"
    for place, row in enumerate(rows):
        row["score"] = place / 2 if place % 2 else place
    return write_dataset(folder, rows, lines=True)
