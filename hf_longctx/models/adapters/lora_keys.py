"""Keys of PEFT's LoraConfig that are not taken, by name. Nothing is imported."""

REFUSED_KEYS = {
    "alora_invocation_tokens": "begins where a string stands in a row, and a row holds several documents",
    "arrow_config": "routes by what other adapters hold, which are none here",
    **dict.fromkeys(
        ("eva_config", "corda_config", "lora_ga_config"),
        "begins from activations or gradients of data, which ranks hold in parts; valid: init_lora_weights pissa, olora, "
        "orthogonal or gaussian",
    ),
    **dict.fromkeys(
        ("velora_config", "monteclora_config", "kasa_config"),
        "draws or compresses by the whole batch, so that plans would differ; valid: use_dora, use_rslora",
    ),
    "loftq_config": "begins from weights that are quantised here and not held so; valid: load_in_4bit with plain LoRA",
    "layer_replication": "makes another model than the one whose certificate was made; valid: a model that has these layers",
    **dict.fromkeys(
        ("use_qalora", "qalora_group_size"), "needs GPTQ weights, which are not loaded; valid: load_in_4bit"
    ),
    "use_bdlora": "splits adapters for a server's tensor parallelism, in training too; valid: plain LoRA",
    **dict.fromkeys(("megatron_config", "megatron_core"), "is for Megatron's own layers; valid: leave it out"),
    "runtime_config": "is for inference; valid: leave it out",
    **dict.fromkeys(
        ("loraplus_lr_ratio", "loraplus_lr_embedding"), "is the optimizer's: a key of longctx (LongContextPlugin's)"
    ),
    "lora_alpha": "is called alpha here",
    "lora_dropout": "is called dropout here",
    **dict.fromkeys(
        (
            "task_type",
            "peft_type",
            "auto_mapping",
            "peft_version",
            "base_model_name_or_path",
            "revision",
            "inference_mode",
        ),
        "is set here; valid: leave it out",
    ),
}
"""Keys of PEFT's LoraConfig that `model.lora` does not take, and why."""
