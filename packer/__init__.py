"""Packing: raw vision-language data -> balanced groups in shards.

From Python: `Builder(BuildConfig(dataset="demo", out="packed")).build()`. Public names are imported
when they are first used, so that `import packer` takes no time.
"""

from typing import TYPE_CHECKING

from isobatch.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from isobatch.packer.build import Builder as Builder
    from isobatch.packer.config import BuildConfig as BuildConfig
    from isobatch.packer.demo.dataset import demo_tokenizer_path as demo_tokenizer_path
    from isobatch.packer.demo.dataset import write_demo as write_demo
    from isobatch.packer.group import Grouping as Grouping
    from isobatch.packer.group import group_counts as group_counts
    from isobatch.packer.group import group_files as group_files
    from isobatch.packer.group import read_lengths as read_lengths
    from isobatch.packer.inspect.html import write_group_html as write_group_html
    from isobatch.packer.inspect.view import GroupView as GroupView
    from isobatch.packer.inspect.view import inspect_group as inspect_group
    from isobatch.packer.progress import StageProgress as StageProgress
    from isobatch.packer.report.build_summary import BuildSummary as BuildSummary
    from isobatch.packer.report.figures import Report as Report
    from isobatch.packer.report.figures import make_report as make_report
    from isobatch.packer.report.html import write_html as write_html
    from isobatch.packer.verify import Verification as Verification
    from isobatch.packer.verify import verify_build as verify_build
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
