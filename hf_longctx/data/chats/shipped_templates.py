"""Chat templates that a base model may be given, and giving a tokenizer a template, new tokens and another end token.

Each is written as the models write that it is named after: ChatML (OpenAI's), Llama 3, Gemma, Qwen (ChatML with its tool calls),
Alpaca (Stanford's prompts, which need no token of their own).
"""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token or '' }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token or '' }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('Gemma has no system role: say it in the first message of the user') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN = (
    "{% if tools %}<|im_start|>system\n{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "# Tools\n\n<tools>{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}{{ '\n' }}</tools><|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if not (tools and loop.first and message['role'] == 'system') %}"
    "<|im_start|>{{ 'user' if message['role'] == 'tool' else message['role'] }}\n"
    "{% if message['role'] == 'tool' %}<tool_response>\n{{ message['content'] }}\n</tool_response>"
    "{% else %}{{ message['content'] or '' }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPACA = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] }}\n\n"
    "{% elif message['role'] == 'assistant' %}### Response:\n{{ message['content'] }}{{ eos_token or '' }}\n\n"
    "{% else %}{{ raise_exception('Alpaca has the roles system, user and assistant') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### Response:\n{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN, "alpaca": ALPACA}
"""Name -> template."""
MARKS = re.compile(r"<\|[a-z_]+\|>|<(?:start|end)_of_turn>")
"""Marks of shipped templates that are tokens of their own in the models they are named after."""


def prepare_tokenizer(
    tokenizer: Any, *, chat_template: str | None = None, added_tokens: Sequence[str] = (), eos_token: str | None = None
) -> Any:
    """Give a tokenizer new special tokens, a chat template and another end token. It is changed, and returned.

    Args:
        tokenizer: of transformers.
        chat_template: one of TEMPLATES, or a file that holds a jinja template; None: its own.
        added_tokens: special tokens; those that it has already stay as they are.
        eos_token: what ends texts and answers; one token.

    Raises:
        ValueError: `eos_token` is several tokens.
    """
    if added_tokens:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": list(added_tokens)}, replace_extra_special_tokens=False
        )
    if eos_token is not None:
        if len(ids := tokenizer(eos_token, add_special_tokens=False)["input_ids"]) != 1:
            raise ValueError(
                f"eos_token {eos_token!r} is {len(ids)} tokens of this tokenizer: valid is one of its tokens, or one of "
                "model.added_tokens"
            )
        tokenizer.eos_token = eos_token
    if chat_template is not None:
        text = TEMPLATES.get(chat_template) or Path(chat_template).read_text(encoding="utf-8")
        tokenizer.chat_template = text
        missing = [mark for mark in dict.fromkeys(MARKS.findall(text)) if mark not in tokenizer.get_vocab()]
        if missing:
            warnings.warn(
                f"the chat template {chat_template!r} writes {', '.join(missing)}, which are several tokens here; "
                f"model.added_tokens: [{', '.join(repr(token) for token in missing)}] makes tokens of them",
                stacklevel=2,
            )
    return tokenizer
