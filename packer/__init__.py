"""Packing: raw vision-language data -> balanced groups in shards.

From Python: `Builder(BuildConfig(dataset="demo", out="packed")).build()`. Public names are imported
when they are first used, so that `import packer` takes no time.
"""

from balance.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "packer.build": "Builder",
        "packer.config": "BuildConfig",
        "packer.demo.dataset": "demo_tokenizer_path write_demo",
        "packer.group": "Grouping group_counts group_files read_lengths",
        "packer.inspect.html": "write_group_html",
        "packer.inspect.view": "GroupView inspect_group",
        "packer.progress": "StageProgress",
        "packer.report.build_summary": "BuildSummary",
        "packer.report.figures": "Report make_report",
        "packer.report.html": "write_html",
        "packer.verify": "Verification verify_build",
    },
)
