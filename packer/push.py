"""`packer push`: a finished build to a dataset repository of the Hugging Face Hub.

Some files a commit, the manifest in the last one: a repository that has a manifest is whole. The
same command continues a push that was stopped, as the Hub takes no file twice. With the manifest
comes a dataset card: the build's figures, and how to load it.
"""

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isobatch.common.errors import ConfigError, DataError, IsobatchError, first_line
from isobatch.models.folder.files import quiet_hub
from isobatch.packer.build_dir import REPORT_NAME
from isobatch.packer.format_text import share_text, size_text
from isobatch.packer.progress import RunningStage, StageProgress
from isobatch.packer.report.figures import make_report
from isobatch.packer.write.energon_files import META_NAMES
from isobatch.shards.folders import is_uri
from isobatch.shards.manifest import MANIFEST_NAME, Manifest, read_manifest

FILES_PER_COMMIT, AT_ONCE = 50, 5
CARD = """---
tags:
- isobatch
---
# {repo}

Vision-language data for `{model}`, tokenised and packed into micro-batches that cost the same, by
Isobatch {version}.

| | |
|---|---|
| samples | {samples:,}, {rejected:,} rejected |
| micro-batches | {groups:,} of at most {cap:,} tokens, {fill} full |
| LLM tokens | {tokens:,}, {labels:,} of them with a label |
| waiting of 8 ranks | vision {vision}, LLM {llm} |
| of padded random batches | vision {vision_before}, LLM {llm_before} |
| size | {size}, format `{format}` |
{refs}
```bash
hf download {repo} --repo-type dataset --local-dir packed
```

```python
from isobatch import StreamingLoader

for step in StreamingLoader("packed"):
    ...
```
"""
REFS = "\nImages and audio files are not here: give their folder as `image_root` to the loader.\n"


def push_build(folder: str, repo: str, progress: StageProgress, *, private: bool = False) -> str:
    """Upload a build; -> the repository's address. ConfigError or DataError says what is wrong."""
    if is_uri(folder):
        raise ConfigError(f"{folder}: packer push takes a build in a folder; copy it here first")
    manifest, root = read_manifest(folder), Path(folder)
    try:
        from huggingface_hub import HfApi  # noqa: PLC0415  (an extra)
    except ImportError:
        raise ConfigError(
            "packer push needs huggingface_hub: pip install huggingface-hub"
        ) from None
    others = [name for name in (REPORT_NAME, *META_NAMES) if (root / name).is_file()]
    names = [*(file.name for file in (*manifest.shards, *manifest.files)), *others]
    hub, card = HfApi(), _card(manifest, repo)
    try:
        with quiet_hub(), progress.stage("upload", len(names) + 2, unit="files") as stage:
            address = hub.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
            _require_same(hub, repo, root)
            for first in range(0, len(names), FILES_PER_COMMIT):
                files = {name: root / name for name in names[first : first + FILES_PER_COMMIT]}
                _commit(hub, repo, files, f"Files {first + 1} to {first + len(files)}", stage)
            last = {"README.md": card.encode(), MANIFEST_NAME: root / MANIFEST_NAME}
            _commit(hub, repo, last, "The build is complete", stage)
    except IsobatchError:
        raise
    # the client and what it is made of raise some twenty types
    except Exception as error:
        raise DataError(
            f"{repo}: {first_line(error)}; log in (hf auth login) if that is why, and run the same"
            " command again to continue"
        ) from None
    return str(address)


def _commit(hub: Any, repo: str, files: dict[str, Any], message: str, stage: RunningStage) -> None:
    from huggingface_hub import CommitOperationAdd  # noqa: PLC0415
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # noqa: PLC0415
        disable_progress_bars,
    )

    disable_progress_bars()  # of its own: they are no events, and would move others
    operations = [CommitOperationAdd(name, content) for name, content in files.items()]
    for first in range(0, len(operations), AT_ONCE):
        some = operations[first : first + AT_ONCE]
        hub.preupload_lfs_files(repo, some, repo_type="dataset")
        stage.advance(len(some))
        stage.count(len(some))
    hub.create_commit(repo, operations, commit_message=message, repo_type="dataset")


def _require_same(hub: Any, repo: str, root: Path) -> None:
    """ConfigError if the repository has another build: nobody could tell their files apart."""
    for there in hub.get_paths_info(repo, [MANIFEST_NAME], repo_type="dataset"):
        content = (root / MANIFEST_NAME).read_bytes()
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # git's
        if (
            there.blob_id != blob
            and (there.lfs or {}).get("sha256") != hashlib.sha256(content).hexdigest()
        ):
            raise ConfigError(f"{repo} has another build: push to another name, or delete that one")


def _card(manifest: Manifest, repo: str) -> str:
    report, totals = make_report(manifest.place), manifest.values["totals"]
    before, after = report.methods["random"], report.methods["ours"]
    kinds = "image", "text", "audio"
    return CARD.format(
        repo=repo,
        model=manifest.model.name,
        version=version("isobatch"),
        samples=manifest.num_packed,
        rejected=report.num_rejected,
        groups=manifest.num_groups,
        cap=manifest.limits.max_seq_len,
        fill=share_text(report.fill),
        tokens=sum(totals.get(f"num_{kind}_tokens", 0) for kind in kinds),
        labels=totals.get("num_loss_tokens", 0),
        vision=share_text(after.dist_ratio_vit),
        llm=share_text(after.dist_ratio_llm),
        vision_before=share_text(before.dist_ratio_vit),
        llm_before=share_text(before.dist_ratio_llm),
        size=size_text(sum(file.size for file in manifest.shards)),
        format=manifest.format,
        refs=REFS if manifest.format == "refs" else "",
    )
