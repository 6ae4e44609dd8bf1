"""The names that `shards` exports: users write them, so they change only on purpose."""

import subprocess
import sys

from isobatch import shards

NAMES = [
    "BuildFile",
    "GroupIndex",
    "Manifest",
    "SampleTable",
    "StoredGroup",
    "is_complete",
    "open_folder",
    "read_groups",
    "read_manifest",
    "read_samples",
    "read_table",
]


def test_exported_names():
    assert shards.__all__ == NAMES
    assert all(hasattr(shards, name) for name in NAMES)


def test_unknown_names_are_attribute_errors():
    assert not hasattr(shards, "NoSuchName")


def test_heavy_libraries_are_loaded_only_when_needed():
    heavy = ["torch", "webdataset", "obstore", "pandas", "polars", "pyarrow.parquet", "numba"]
    program = (
        "from isobatch.shards import arrow_shards, object_store, tables, tar_shards;"
        f"import sys; print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
