"""The tool runner of Anthropic's SDK: python anthropic_runner.py whole|streamed"""

from __future__ import annotations

import os
import sys
from typing import Any

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Adds two whole numbers."""
    return str(a + b)


client = Anthropic(base_url=os.environ["BASE_URL"], api_key=os.environ["API_KEY"], max_retries=0)
messages: list[Any] = []
for question in ("What is 2 + 3? Use the tool.", "And once more?"):
    messages.append({"role": "user", "content": question})
    is_stream = sys.argv[1] == "streamed"
    asked: Any = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": [add], "stream": is_stream}
    runner = client.beta.messages.tool_runner(**asked)
    for turn in runner:
        message = turn.get_final_message() if is_stream else turn
        messages.append({"role": "assistant", "content": message.content})
        result = runner.generate_tool_call_response()
        if result:
            messages.append(result)
    print(message.content[-1].text)
