"""Small model folders: tokenizers and chat templates in the style of published models, written for these tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from composer_jax.data.chat import call_forms, harmony_parts, kimi
from composer_jax.data.chat.messages import THINKING

QWEN_TOKENS = {"<|endoftext|>": True, "<|im_start|>": True, "<|im_end|>": True} | dict.fromkeys(
    # As in the published tokenizers, the marks of calls and answers are tokens, but not special ones.
    (*call_forms.CALL, *call_forms.ANSWER),
    False,
)
CHATML_TOKENS = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), True)
THINKING_TOKENS = QWEN_TOKENS | {"<think>": False, "</think>": False}
HEADER_TOKENS = dict.fromkeys(("<|begin|>", "<|end|>", "<|head|>", "<|/head|>", "<|eot|>", "<|eom|>", "<|call|>"), True)
KIMI_TOKENS = dict.fromkeys(("[BOS]", "[EOS]", *kimi.HEADING, "<|im_end|>", *kimi.SECTION, *kimi.CALL), True)
KIMI_THINKING_TOKENS = KIMI_TOKENS | dict.fromkeys(THINKING, False)
HARMONY_TOKENS = dict.fromkeys(("<|startoftext|>", "<|endoftext|>", *harmony_parts.CONTROL), True)

# Tools in the first message; the answers of one turn in one message of the user.
QWEN = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
{{- 'Functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

KIMI = """
{%- if tools %}
{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=(',', ':')) + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
{%- set opener = message.role if message.role in ('user', 'assistant') else 'system' %}
{{- '<|im_' + opener + '|>' + message.role + '<|im_middle|>' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{%- if loop.first %}{{- '<|tool_calls_section_begin|>' }}{%- endif %}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson + '<|tool_call_end|>' }}
{%- if loop.last %}{{- '<|tool_calls_section_end|>' }}{%- endif %}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""

# Thinking stays in messages with calls after the last message without any; messages of tools have the tool's name.
KIMI_THINKING = (
    KIMI.replace(
        "{%- for message in messages %}",
        """{%- set said = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}{%- set said.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if messages[0].role != 'system' %}
{{- '<|im_system|>system<|im_middle|>You answer.<|im_end|>' }}
{%- endif %}
{%- for message in messages %}""",
        1,
    )
    .replace("'|>' + message.role +", "'|>' + (message.name or message.role) +")
    .replace(
        "{{- message.content }}",
        """{%- if message.role == 'assistant' %}
{{- '<think>' + (message.reasoning_content or '' if loop.index0 > said.last else '') + '</think>' }}
{%- endif %}
{{- message.content }}""",
    )
)

# The generation prompt begins the thinking; the tools come as text.
KIMI_OPENS = (
    KIMI_THINKING.replace("{%- if tools %}", "{%- set tools = tools_ts_str or tools %}\n{%- if tools %}")
    .replace(
        "tools | tojson(separators=(',', ':'))", "(tools if tools is string else tools | tojson(separators=(',', ':')))"
    )
    .replace("assistant<|im_middle|>' }}{%- endif %}", "assistant<|im_middle|><think>' }}{%- endif %}")
)

# No tools; a system message that the template adds by itself.
CHATML = """
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nYou answer.<|im_end|>\\n' }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Calls as functions with parameters: a string is written as it is, other values as JSON or as Python writes them.
XML = QWEN.replace(
    """{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
""",
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}
{%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}
{{- '<parameter=' + key + '>\\n' + value + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
""",
)

# Keys and values between markers; thinking in every message after the last one of the user; no message has an end.
KEYS_TOKENS = dict.fromkeys(("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"), True)
KEYS_TOKENS |= dict.fromkeys(
    (*call_forms.CALL, *call_forms.ANSWER, "<think>", "</think>", *call_forms.KeyValueCalls.inner), False
)
KEYS = """
{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
{{- '<|system|>\\nFunctions:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- elif message.role == 'assistant' %}
{{- '<|assistant|>\\n<think>' + (message.reasoning_content or '' if loop.index0 > asked.last else '') + '</think>' }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}
{%- else %}
{{- '<|' + message.role + '|>\\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

# Thinking stays in messages after the last one of the user; the newest message has a place for it even without any.
THINKS = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' + message.content }}",
    """{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set thought = thought if '</think>' in message.content else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > asked.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said }}""",
).replace(
    "{%- for message in messages %}",
    """{%- set asked = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set asked.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}""",
    1,
)

# The generation prompt begins the thinking, which no message of a history has.
OPENS = CHATML.replace("+ message.content +", "+ message.content.split('</think>')[-1].lstrip('\\n') +").replace(
    "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"
)

# The generation prompt begins and ends the thinking: the model is asked not to think.
CLOSED = THINKS.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}\n",
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}\n",
)

# Headers, the day, white space trimmed, calls in a form that we do not read.
HEADERS = """
{{- '<|begin|>' }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}
{%- set messages = messages[1:] %}
{%- endif %}
{{- '<|head|>system<|/head|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
{{- '<|head|>' + message.role + '<|/head|>\\n\\n' }}
{%- if message.tool_calls %}
{{- '<|call|>' + message.tool_calls[0].function.arguments | tojson + '<|eom|>' }}
{%- else %}
{{- message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>\\n\\n' }}{%- endif %}
"""

# The day, then instructions and tools; thinking in a field of its own, which is left out where an answer came later.
HARMONY = """
{{- '<|start|>system<|message|>Today: ' + strftime_now('%d %b %Y') + '<|end|>' }}
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
{{- '<|start|>developer<|message|>' + system }}
{%- for tool in tools or [] %}
{{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name }}
{{- ' = (_: ' + tool.function.parameters | tojson + ') => any;' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set known = namespace(answered=-1, tool='') %}
{%- for message in messages %}
{%- if message.role == 'assistant' and not message.tool_calls %}{%- set known.answered = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + known.tool + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{%- set called = message.tool_calls[0].function if message.tool_calls else none %}
{%- if message.thinking and (loop.index0 > known.answered if called else loop.last) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- if called %}
{%- set known.tool = called.name %}
{{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
{{- called.arguments | tojson + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

TEXTS = ['{"name": "read", "arguments": {"path": "a.py"}} functions.read:0 user assistant system tool'] * 8


def tokenizer_json(tokens: dict[str, bool], texts: list[str] = TEXTS, vocab_size: int = 400) -> str:
    """A byte-level BPE tokenizer with added tokens (spelling -> whether it is called special)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in tokens.items()])
    return backend.to_str()


def sentencepiece_json(tokens: dict[str, bool], prefix: str, *, rstrip: bool = False) -> str:
    """A BPE tokenizer in the style of SentencePiece, with added tokens (spelling -> whether it is called special).

    prefix: where it puts a space: "each" (before each text between added tokens, by a normalizer), "always" (the same
    by a pre-tokenizer, unless the text begins with one), "first" (before the first text only), or "never". rstrip:
    whether the added tokens absorb the white space after them.
    """
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    texts = [*TEXTS, "I look. And now? The first line, two spaces: [ ] < > | /"] * 4
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=450, special_tokens=names, show_progress=False))
    spaces = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if prefix == "each" else spaces
    if prefix in ("always", "first"):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps if prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    description = json.loads(backend.to_str())
    description["added_tokens"] = []  # the bytes are ordinary tokens
    backend = Tokenizer.from_str(json.dumps(description))
    backend.add_tokens(
        [AddedToken(text, special=special, normalized=False, rstrip=rstrip) for text, special in tokens.items()]
    )
    return backend.to_str()


def write_folder(folder: Path, tokenizer: str, template: str, *, separate: bool = False) -> Path:
    """A model folder; the template is a file of its own, or a part of tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "[BOS]"}}
    if separate:
        (folder / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
