"""OpenHands' SDK: python openhands_agent.py"""

from __future__ import annotations

import os

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

llm = LLM(
    model="openai/policy",
    base_url=os.environ["BASE_URL"],
    api_key=SecretStr(os.environ["API_KEY"]),
    usage_id="agent",
    num_retries=0,
)
agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
conversation = Conversation(agent=agent, workspace=os.environ["HOME"])
conversation.send_message("What is 2 + 3? Use the terminal.")
conversation.run()
