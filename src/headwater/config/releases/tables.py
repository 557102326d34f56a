"""Rules for keys of the releases 1.6 to 2.3 of the Cerebras Model Zoo that no longer exist.

There is a table for each section. A key that is neither in its table nor in the schema is an error.
"""

from __future__ import annotations

from headwater.config.releases.rules import Ignored, IgnoredWhere, Renamed, Replaced, Rules

_PLAN = Ignored("the plan decides how the machine is used")
_TUNING = "it only configures the hardware of a Cerebras system"
_PROCESSES = Ignored("the number of processes follows from num_csx")
_SUMMARIES = Ignored("norms are logged with optimizer.log_summaries: true, every log_steps")

TOP: Rules = {
    "description": Ignored("it is a comment"),
    "tag": Ignored("it is a comment"),
    "predict_input": Ignored("Headwater has no prediction mode; `headwater validate` reads eval_input"),
    "csconfig": Ignored(_TUNING),
}
"""Further top-level keys of the older form."""

RUNCONFIG: Rules = {
    "keep_checkpoint_max": Renamed("max_checkpoints"),
    "save_checkpoints_steps": Renamed("checkpoint_steps"),
    "save_checkpoint_steps": Renamed("checkpoint_steps"),
    "log_step_count_steps": Ignored("log_steps sets the steps between log messages"),
    "save_summary_steps": Ignored("scalars are written every log_steps"),
    "mode": Ignored("the command selects training or evaluation"),
    "save_losses": Ignored("losses are always logged"),
    "num_workers_per_csx": _PLAN,
    "num_wgt_servers": _PLAN,
    "num_act_servers": _PLAN,
    "compile_crd_memory_gi": _PLAN,
    "execute_crd_memory_gi": _PLAN,
    "wrk_memory_gi": _PLAN,
    "transfer_processes": _PLAN,
    "use_appliance_data": _PLAN,
    "use_cs_grad_accum": Ignored("the plan splits batches, or optimizer.grad_accum_steps sets the number"),
    "execution_strategy": Ignored("weights are always streamed", only=("weight_streaming",)),
    "enable_distributed": _PROCESSES,
    "multireplica": _PROCESSES,
    "show_debug_metrics": Ignored(_TUNING),
    "mgmt_address": _PLAN,
    "mount_dirs": _PLAN,
    "python_paths": _PLAN,
}

OPTIMIZER: Rules = {
    "epsilon": Renamed("eps"),
    "use_bias_correction": Renamed("correct_bias"),
    "disable_lr_steps_reset": Ignored("each schedule of a sequence counts its own steps"),
    "ws_summary": _SUMMARIES,
}

MODEL: Rules = {
    "model_name": Renamed("name"),
    "precision_opt_level": Renamed(("runconfig", "precision_opt_level")),
    "use_bfloat16": Replaced({True: ("fp16_type", "bfloat16"), False: ("fp16_type", "float16")}),
    "use_position_embedding": Replaced({True: None, False: ("position_embedding_type", None)}),
    "use_rms_norm": Replaced({True: ("norm_type", "rmsnorm"), False: None}),
    "use_t5_layer_norm": Replaced({True: ("norm_type", "rmsnorm"), False: ("norm_type", "layernorm")}),
    "scale_by_layer_index": Renamed("scale_qk_dot_by_layer_idx"),
    "enable_vts": Renamed(("runconfig", "skip_padding")),
    "allow_multireplica": _PROCESSES,
    "tf_summary": _SUMMARIES,
    "alibi_implementation": Ignored("all implementations compute the same values"),
    "fixed_sparse_attention": Ignored("attention is dense", only=(None,)),
}

INPUT: Rules = {
    "repeat": Ignored("the data are repeated until max_steps", only=(True,)),
    "use_multiple_workers": Ignored("num_workers sets the number of workers"),
    "use_fast_dataloader": Ignored("there is only one data loader"),
    "micro_batch_size": IgnoredWhere({"auto": "the plan chooses it", "explore": "the plan chooses it"}),
    "whole_word_masking": Ignored("tokens are masked individually", only=(False,)),
    "dynamic_mlm_scale": Replaced({True: (("model", "mlm_loss_scaling"), "num_masked"), False: None}),
}

EVAL_INPUT: Rules = {
    **INPUT,
    "repeat": Ignored("an evaluation reads the data once"),
    "dynamic_mlm_scale": Ignored("the value of train_input is used"),
}

SPARSITY: Rules = {"type": Renamed("algorithm"), "schedule": Renamed("update")}
