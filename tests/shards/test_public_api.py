"""The names that `shards` exports: users write them, so they change only on purpose."""

import subprocess
import sys

import shards

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
        "import shards, shards.tables, shards.tar_shards, shards.arrow_shards, shards.object_store;"
        f"import sys; print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
