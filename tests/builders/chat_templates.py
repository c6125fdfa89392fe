"""Chat templates as models have them, and a tokenizer with each. SmolLM2's own begins with a system message of its own where
there is none; the others are those of model families, shortened to what decides tokens and labels."""

import copy
import functools
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded.embedded_model import prepare_model

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_GENERATION = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}\
{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CONTENT_GENERATION = """\
{% for message in messages %}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] }}{% endgeneration %}\
{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"""
"""Marks no end of a turn: what transformers' own mask goes wrong over."""

LLAMA3 = """\
{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' \
+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST]' + message['content'] + '[/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""

QWEN3 = """\
{%- set ns = namespace(last=messages | length - 1, found=false) %}\
{%- for message in messages[::-1] %}{%- if not ns.found and message.role == 'user' %}\
{%- set ns.found = true %}{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}\
{%- if message.role == 'assistant' and loop.index0 > ns.last and (loop.last or message.reasoning_content) %}\
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}\
{{- message.content + '<|im_end|>\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TOOLS = """\
{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endif %}\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% elif message['content'] is defined %}\
{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}\
{% for call in message.get('tool_calls', []) %}{{ call['function'] | tojson }}{% endfor %}\
{{ ('/think' if thinking else '') + '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

ENDS = {"own": "<|im_end|>\n", "chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "mistral": "</s>"}
"""Template without {% generation %} -> what it writes after an answer."""


@functools.cache
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """SmolLM2's tokenizer with each template, and with the special tokens that the template writes. No test changes them."""
    plain = AutoTokenizer.from_pretrained(prepare_model(default_cache_dir()))
    by_template = {"own": plain}
    for name, template in (
        ("chatml", CHATML),
        ("generation", CHATML_GENERATION),
        ("content", CONTENT_GENERATION),
        ("llama3", LLAMA3),
        ("mistral", MISTRAL),
        ("qwen3", QWEN3),
        ("tools", TOOLS),
    ):
        # A tokenizer that gets no tokens of its own shares the vocabulary, whose copy takes a tenth of a second.
        by_template[name] = copy.deepcopy(plain) if name in ("llama3", "mistral") else copy.copy(plain)
        by_template[name].chat_template = template
    headers: Any = ["<|start_header_id|>", "<|end_header_id|>"]
    instructions: Any = ["[INST]", "[/INST]"]
    by_template["llama3"].add_special_tokens({"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"})
    by_template["llama3"].add_tokens(headers, special_tokens=True)
    by_template["mistral"].add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    by_template["mistral"].add_tokens(instructions, special_tokens=True)
    return by_template


def with_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> PreTrainedTokenizerBase:
    """A copy with another template."""
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other
