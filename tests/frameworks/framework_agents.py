"""The same agent in every framework: it asks, calls the tool `add`, reads its result and answers.

Each takes an episode's URL and key, as anybody's agent would, and returns the final text. What each needs beside these
two is in docs/frameworks.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

QUESTION = "What is 2 + 3? Use the tool."
ADD = {
    "name": "add",
    "description": "Adds two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}

Agent = Callable[[str, str, bool], str]
"""Base URL, key, whether to stream; returns the final text."""


def add(a: int, b: int) -> int:
    """Adds two whole numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def raw_http(url: str, key: str, is_stream: bool) -> str:
    """Chat completions without an SDK."""
    import httpx

    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": ADD}]
    while True:
        answer = httpx.post(
            f"{url}/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": "policy", "messages": messages, "tools": tools, "stream": is_stream},
            timeout=60,
        )
        answer.raise_for_status()
        message = _joined(answer.text) if is_stream else answer.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            result = add(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})


def _joined(stream: str) -> dict[str, Any]:
    """The message that the chunks of a stream make."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                function = part.get("function") or {}
                call = calls.setdefault(
                    part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                call["id"] += part.get("id") or ""
                call["function"]["name"] += function.get("name") or ""
                call["function"]["arguments"] += function.get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


def openai_chat(url: str, key: str, is_stream: bool) -> str:
    """The OpenAI SDK over chat completions."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", "function": ADD}]
    while True:
        if is_stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(model="policy", messages=messages, tools=tools)
            message = answer.choices[0].message  # type: ignore[assignment]
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages[-1]["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": "add", "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def openai_responses(url: str, key: str, is_stream: bool) -> str:
    """The OpenAI SDK over responses."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key=key)
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"type": "function", **ADD, "strict": False}]
    while True:
        if is_stream:
            with client.responses.stream(model="policy", input=items, tools=tools) as stream:
                stream.until_done()
                answer: Any = stream.get_final_response()
        else:
            answer = client.responses.create(model="policy", input=items, tools=tools)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        for call in calls:
            result = add(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(result)})


def anthropic_messages(url: str, key: str, is_stream: bool) -> str:
    """The Anthropic SDK."""
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key=key)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools: list[Any] = [{"name": "add", "description": ADD["description"], "input_schema": ADD["parameters"]}]
    while True:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 200, "messages": messages, "tools": tools}
        if is_stream:
            with client.messages.stream(**asked) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": str(add(**block.input))}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def langgraph_openai(url: str, key: str, is_stream: bool) -> str:
    """LangGraph's agent on langchain-openai."""
    from langchain_openai import ChatOpenAI

    return _langgraph(ChatOpenAI(model="policy", base_url=url, api_key=key, streaming=is_stream))  # type: ignore[arg-type]


def langgraph_anthropic(url: str, key: str, is_stream: bool) -> str:
    """LangGraph's agent on langchain-anthropic."""
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(  # type: ignore[call-arg]
        model_name="policy", base_url=url, api_key=key, streaming=is_stream, max_tokens_to_sample=200
    )
    return _langgraph(model)


def _langgraph(model: Any) -> str:
    """A graph of two nodes: the model and its tools, until it calls none."""
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(add)]
    bound = model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    final = graph.compile().invoke({"messages": [("user", QUESTION)]})["messages"][-1]
    return str(final.text)


def agentscope_agent(url: str, key: str, is_stream: bool) -> str:
    """AgentScope's agent over chat completions."""
    from agentscope.agent import Agent
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="It only adds.")
    model = OpenAIChatModel(OpenAICredential(api_key=key, base_url=url), "policy", stream=is_stream)
    agent = Agent("adder", "You add.", model, Toolkit([FunctionTool(add, permission=allowed)]))
    reply = asyncio.run(agent.reply(UserMsg("user", QUESTION)))
    return str(reply.get_text_content("")).removeprefix("Let me add.\n").removeprefix("Let me add.")


def openai_agents_chat(url: str, key: str, is_stream: bool) -> str:
    """The OpenAI Agents SDK over chat completions."""
    from agents import OpenAIChatCompletionsModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key=key)
    return _openai_agents(OpenAIChatCompletionsModel(model="policy", openai_client=client), is_stream)


def openai_agents_responses(url: str, key: str, is_stream: bool) -> str:
    """The OpenAI Agents SDK over responses, its default."""
    from agents import OpenAIResponsesModel
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key=key)
    return _openai_agents(OpenAIResponsesModel(model="policy", openai_client=client), is_stream)


def _openai_agents(model: Any, is_stream: bool) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="adder", model=model, tools=[function_tool(add)])

    async def play() -> str:
        if not is_stream:
            return str((await Runner.run(agent, QUESTION)).final_output)
        running = Runner.run_streamed(agent, QUESTION)
        async for _ in running.stream_events():
            pass
        return str(running.final_output)

    return asyncio.run(play())


def pydantic_ai_openai(url: str, key: str, is_stream: bool) -> str:
    """Pydantic AI over chat completions."""
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return _pydantic_ai(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key)), is_stream)


def pydantic_ai_anthropic(url: str, key: str, is_stream: bool) -> str:
    """Pydantic AI over Anthropic's messages."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    return _pydantic_ai(AnthropicModel("policy", provider=AnthropicProvider(base_url=url, api_key=key)), is_stream)


def _pydantic_ai(model: Any, is_stream: bool) -> str:
    from pydantic_ai import Agent

    agent = Agent(model, tools=[add])

    async def look(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    # With a handler it streams; its run_stream would take the words before a tool call for the answer.
    return str(asyncio.run(agent.run(QUESTION, event_stream_handler=look if is_stream else None)).output)


def smolagents_tool_calling(url: str, key: str, is_stream: bool) -> str:
    """smolagents' tool-calling agent; it ends by calling its own tool `final_answer`."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    # It forces tool calls by default, and what was forced is not trained.
    model = OpenAIModel(model_id="policy", api_base=url, api_key=key, tool_choice="auto")
    agent = ToolCallingAgent([tool(add)], model, stream_outputs=is_stream, verbosity_level=LogLevel.OFF)
    return str(agent.run(QUESTION))


def litellm_completion(url: str, key: str, is_stream: bool) -> str:
    """LiteLLM's `completion`, the endpoint named as an OpenAI-compatible one."""
    import litellm

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": ADD}]
    while True:
        answer: Any = litellm.completion(
            model="openai/policy", api_base=url, api_key=key, messages=messages, tools=tools, stream=is_stream
        )
        if is_stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            result = add(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


AGENTS: dict[str, Agent] = {
    agent.__name__: agent
    for agent in (
        raw_http,
        openai_chat,
        openai_responses,
        anthropic_messages,
        langgraph_openai,
        langgraph_anthropic,
        agentscope_agent,
        openai_agents_chat,
        openai_agents_responses,
        pydantic_ai_openai,
        pydantic_ai_anthropic,
        smolagents_tool_calling,
        litellm_completion,
    )
}
