"""Configurations that axolotl, LLaMA-Factory and TRL train with."""

AXOLOTL_CHAT = """
base_model: NousResearch/Meta-Llama-3-8B-Instruct
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
load_in_4bit: false
chat_template: llama3
datasets:
  - path: fozziethebeat/alpaca_messages_2k_test
    type: chat_template
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: false
adapter: lora
lora_model_dir:
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
wandb_project:
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
resume_from_checkpoint:
logging_steps: 1
attn_implementation: flash_attention_2
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""
"""Keys and values of axolotl's example for Llama 3, LoRA on chats (examples/llama-3/instruct-lora-8b.yml)."""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: mine
dataset_dir: data
template: llama3
cutoff_len: 2048
max_samples: 1000
preprocessing_num_workers: 16
overwrite_cache: true
output_dir: saves/lora
plot_loss: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
deepspeed: examples/deepspeed/ds_z3_config.json
val_size: 0.1
"""
INFO = {
    "mine": {
        "file_name": "mine.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "dialog"},
        "tags": {"role_tag": "who", "content_tag": "says", "user_tag": "customer", "assistant_tag": "agent"},
    },
    "pairs": {"file_name": "pairs.json", "ranking": True},
}
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
use_peft: true
lora_r: 32
lora_target_modules: all-linear
max_length: 4096
packing: true
assistant_only_loss: true
learning_rate: 2.0e-4
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
num_train_epochs: 1
output_dir: Qwen3-SFT
eos_token: <|im_end|>
"""
