"""Balancing samples: pure functions on NumPy arrays, shared by all packages.

Nothing here imports torch or knows what a shard is. `balance.config` reads presets, and
`balance.model_folder.files` the folders of models; nothing else reads files.
Public names are imported when they are first used: numba's runtime takes .5 s and 100 MB.
"""

from balance.lazy_exports import lazy_exports

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "balance.baseline_samplers": "BASELINES as_groups",
        "balance.errors": "ConfigError DamagedShard DataError IsobatchError MediaRejected",
        "balance.flops": "ComputeLoad FlopsModel GpuSpeed",
        "balance.grouping.activation_memory": "ActivationBudget",
        "balance.grouping.best_fit": "group_best_fit",
        "balance.grouping.caps": "GroupOptions choose_limits choose_limits_omnibal",
        "balance.grouping.isf": "group_isf",
        "balance.grouping.resources": "Resource",
        "balance.media.audio_tokens": "AudioPlan AudioRejected AudioRule plan_audio",
        "balance.media.image_tokens": "ImagePlan ImageRejected plan_image",
        "balance.loss_weights": "sample_weights",
        "balance.metrics": "autocorrelation dist_ratio fill gradient_shares lower_bounds pad_ratio"
        " padded_loads repeated_pairs source_entropy",
        "balance.grouping.even_out": "even_out group_balanced",
        "balance.order.global_shuffle": "GlobalShuffle GroupOrder epoch_steps",
        "balance.order.regroup": "regroup",
        "balance.presets": "DatasetPreset ModelPreset load_dataset load_model",
        "balance.steps.all_to_all": "CommVolumes Permutation comm_volumes from_assignment",
        "balance.steps._node_placement": "place_batches",
        "balance.steps.post_balancing": "as_batches balance_conv balance_padded"
        " balance_padded_attention balance_squares balance_sums",
        "balance.steps.repack": "cluster_costs cluster_orders pack_balanced",
        "balance.steps.step_planner": "StepAssignment StepPlanner StepRequest",
        "balance.types": "Counts Groups Limits",
    },
)
