"""Chat templates that behave as the common families do, written for these tests, each with its control tokens.

What they share with the real ones is the markup and the habits: who drops earlier reasoning, who has no system role,
who moves the tools along, who insists on ids of nine letters. Their sentences are our own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tiny_tokenizer import make_tokenizer

from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.template import ChatTemplate

NOW = datetime(2026, 3, 4, tzinfo=UTC)


@dataclass(frozen=True)
class Kind:
    """A family: its template and its control tokens."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Control tokens that are not flagged special."""
    ends: tuple[str, ...] = ("<|im_end|>",)

    def codec(self) -> ChatCodec:
        """The codec, not yet proved."""
        tokenizer = make_tokenizer(self.special, self.added)
        ends = [tokenizer.token_to_id(end) for end in self.ends]
        return ChatCodec(tokenizer.to_str(), ChatTemplate(self.template, {"bos_token": "<s>"}, NOW), ends)

    def write(self, folder: Path) -> tuple[Path, tuple[int, ...]]:
        """Write a tokenizer folder; returns it and the end ids."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = make_tokenizer(self.special, self.added)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": self.ends[0]}))
        (folder / "chat_template.jinja").write_text(self.template)
        return folder, tuple(tokenizer.token_to_id(end) for end in self.ends)


CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TOOL_TOKENS = ("<tool_call>", "</tool_call>")

HERMES_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'You may call these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall them inside tags, as JSON with name and arguments.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>system\\nYou are of help.<|im_end|>\\n' }}
{%- endif %}
"""

HERMES_CALLS = """\
{%- for call in message.tool_calls %}
{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}{%- else %}
{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
"""

TOOL_RESULTS = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""

QWEN25 = Kind(
    template=HERMES_TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}"""
    + TOOL_RESULTS
    + """\
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}"""
    + HERMES_CALLS
    + """\
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    special=CHATML_TOKENS,
    added=TOOL_TOKENS,
)
"""JSON between tags; its own system prompt where the request has none."""

QWEN3 = Kind(
    template=HERMES_TOOLS
    + """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'tool' %}"""
    + TOOL_RESULTS
    + """\
{%- elif message.role == 'assistant' %}
{%- set content = message.content or '' %}
{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}
{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}
{{- content }}
{%- endif %}"""
    + HERMES_CALLS
    + """\
{{- '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    special=CHATML_TOKENS,
    added=(*TOOL_TOKENS, "<think>", "</think>"),
)
"""Thinks between tags; drops the thinking of every turn before the last question, and shows an empty block in the
newest answer."""

QWEN3_OPENED = Kind(
    template=QWEN3.template.replace(
        "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
    ),
    special=QWEN3.special,
    added=QWEN3.added,
)
"""The same, and the prompt opens the thinking."""

LLAMA3 = Kind(
    template="""\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday is ' + strftime_now('%d %b %Y') + '\\n\\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'user' and loop.first and tools %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall these with JSON of name and parameters:\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
{{- message.content | trim + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    special=("<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    ends=("<|eot_id|>", "<|eom_id|>"),
)
"""A call is the whole reply, bare JSON, one at a time; a message with a call loses its content."""

GEMMA3 = Kind(
    template="""\
{{- bos_token }}
{%- set ns = namespace(prefix='') %}
{%- if messages[0].role == 'system' %}
{%- set ns.prefix = messages[0].content + '\\n\\n' %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\\n' + (ns.prefix if loop.first else '') }}
{{- message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    special=("<s>", "<start_of_turn>", "<end_of_turn>"),
    ends=("<end_of_turn>",),
)
"""No system role: its text goes before the first question. No tools. Strict order of roles."""

MISTRAL_HEAD = """\
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
"""

MISTRAL = Kind(
    template=MISTRAL_HEAD
    + """\
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids of calls have nine letters') }}{%- endif %}
{{- '{"name": ' + call.function.name | tojson + ', "arguments": ' + call.function.arguments | tojson }}
{{- ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
{%- endfor %}
{{- '</s>' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('ids of calls have nine letters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}
{{- ' ' + message.content | trim + '</s>' }}
{%- endif %}
{%- endfor %}""",
    special=("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
             "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    ends=("</s>",),
)  # fmt: skip
"""A list of calls behind a tag, ids of nine letters; tools and system prompt move to the last question."""

MISTRAL_NAMED = Kind(
    template=MISTRAL_HEAD
    + """\
{%- elif message.role == 'assistant' %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}
{{- '</s>' }}
{%- else %}
{{- '[TOOL_RESULTS]' + message.tool_call_id + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}""",
    special=(*MISTRAL.special, "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]"),
    ends=("</s>",),
)
"""The newer way: name, id and arguments, each behind a tag."""

HARMONY = Kind(
    template="""\
{{- '<|start|>system<|message|>You answer in channels: analysis, commentary, final.<|end|>' }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
{{- '\\nnamespace functions {\\n' }}
{%- for tool in tools %}
{{- '// ' + (tool.function.description or '') + '\\n' }}
{{- 'type ' + tool.function.name + ' = ' + tool.function.parameters | tojson + '\\n' }}
{%- endfor %}
{{- '}' }}
{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name='') %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('content or thinking beside a call, not both') }}
{%- endif %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index0 + 1:] %}
{%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}
{%- endfor %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- elif message.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- for call in message.tool_calls %}
{%- set ns.name = call.function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- call.function.arguments | tojson + '<|call|>' }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content | tojson + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    ends=("<|return|>", "<|call|>"),
)
"""Channels; another token ends the newest answer than the older ones; analysis goes once a final answer came."""

DEEPSEEK = Kind(
    template="""\
{{- bos_token }}
{%- set ns = namespace(tools=false) %}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
{{- '\\n\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + tool.function | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<｜User｜>' + message.content }}
{%- elif message.role == 'assistant' and message.content is none %}
{{- '<｜Assistant｜>' + '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name }}
{{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- ('' if messages[loop.index0 - 1].role == 'tool' else '<｜Assistant｜>') + content + '<｜end▁of▁sentence｜>' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{%- endif %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}""",
    special=("<s>", "<｜end▁of▁sentence｜>"),
    added=(
        "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
        "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
    ),
    ends=("<｜end▁of▁sentence｜>",),
)  # fmt: skip
"""Named calls with fenced arguments that must be text, known by a content of None; the prompt opens the thinking and
history never shows it; most control tokens are not flagged special."""

HERMES_TEXT = Kind(
    template=QWEN25.template, special=CHATML_TOKENS, added=(),
)  # fmt: skip
"""Tags that the tokenizer has no tokens for."""

KINDS: dict[str, Kind] = {
    "qwen25": QWEN25, "qwen3": QWEN3, "qwen3_opened": QWEN3_OPENED, "llama3": LLAMA3, "gemma3": GEMMA3,
    "mistral": MISTRAL, "mistral_named": MISTRAL_NAMED, "harmony": HARMONY, "deepseek": DEEPSEEK,
    "hermes_text": HERMES_TEXT,
}  # fmt: skip
CODECS: dict[str, ChatCodec] = {name: kind.codec() for name, kind in KINDS.items()}
