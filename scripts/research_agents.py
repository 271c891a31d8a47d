"""The research agent of research_task.py in several frameworks: three questions, one conversation.

Each takes an episode's URL and key and leaves to its framework how the conversation is kept and sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from research_task import HELPER_SYSTEM, QUESTIONS, SUMMARISE, SYSTEM, TOOLS, Habit, compare, read_report, search

CHECK = "Hands one claim to a colleague who checks it against the reports and says whether it holds."

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Framework:
    """One way to write the agent."""

    play: Callable[[str, str], None]
    """Takes base URL and key."""
    packages: tuple[str, ...]
    """Whose versions decide what is sent."""
    habits: frozenset[Habit] = frozenset()


def raw_http(url: str, key: str) -> None:
    """Chat completions without an SDK, with a client that repeats a request and sums up a long history."""
    import httpx

    tools = [{"type": "function", "function": schema} for schema in SCHEMAS]

    def ask(messages: Messages) -> dict[str, Any]:
        answer = httpx.post(
            f"{url}/chat/completions",
            headers={"authorization": f"Bearer {key}"},
            json={"model": "policy", "messages": messages, "tools": tools},
            timeout=120,
        )
        answer.raise_for_status()
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message

    system = {"role": "system", "content": SYSTEM}
    messages: Messages = [system]
    for number, question in enumerate(QUESTIONS):
        if number == 2:
            summary = ask([*messages, {"role": "user", "content": SUMMARISE}])["content"]
            messages = [system, {"role": "user", "content": f"So far: {summary}\n\n{question}"}]
        else:
            messages.append({"role": "user", "content": question})
        if number == 1:
            ask(messages)  # as after a timeout: this reply is lost
        while (message := ask(messages)).get("tool_calls"):
            messages.append(message)
            for call in message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": use(call["function"])})
        messages.append(message)


def use(function: dict[str, str]) -> str:
    """The result of a tool call, or what was wrong with it."""
    known = {tool.__name__: tool for tool in TOOLS}
    try:
        return known[function["name"]](**json.loads(function["arguments"]))
    except TypeError as error:
        return f"Error: {error}"


def langgraph(url: str, key: str) -> None:
    """LangGraph on langchain-openai; a tool runs a second graph."""
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    def agent(name: str, tools: list[Any]) -> Any:
        model = ChatOpenAI(model=name, base_url=url, api_key=key).bind_tools(tools)  # type: ignore[arg-type]
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode(tools))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        return graph.compile()

    helper = agent("policy@helper", [tool(read_report)])

    def check(input: str) -> str:
        asked = {"messages": [("system", HELPER_SYSTEM), ("user", input)]}
        return str(helper.invoke(asked)["messages"][-1].text)

    main = agent("policy", [*map(tool, TOOLS), tool(check, description=CHECK)])
    messages: list[Any] = [("system", SYSTEM)]
    for question in QUESTIONS:
        messages = main.invoke({"messages": [*messages, ("user", question)]})["messages"]


def openai_agents(url: str, key: str) -> None:
    """The OpenAI Agents SDK over responses; an agent as a tool."""
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key=key)

    def model(name: str) -> OpenAIResponsesModel:
        return OpenAIResponsesModel(model=name, openai_client=client)

    helper = Agent(
        "helper", instructions=HELPER_SYSTEM, model=model("policy@helper"), tools=[function_tool(read_report)]
    )
    tools = [*map(function_tool, TOOLS), helper.as_tool("check", CHECK)]
    main = Agent("researcher", instructions=SYSTEM, model=model("policy"), tools=tools)

    async def play() -> None:
        items: list[Any] = []
        async with client:
            for question in QUESTIONS:
                items.append({"role": "user", "content": question})
                items = (await Runner.run(main, items, max_turns=20)).to_input_list()

    asyncio.run(play())


def pydantic_ai(url: str, key: str) -> None:
    """Pydantic AI over chat completions; a tool runs a second agent."""
    from pydantic_ai import Agent, Tool
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url, api_key=key)
    helper = Agent(
        OpenAIChatModel("policy@helper", provider=provider), system_prompt=HELPER_SYSTEM, tools=[read_report]
    )

    async def check(input: str) -> str:
        return (await helper.run(input)).output

    tools = [*TOOLS, Tool(check, description=CHECK)]
    main: Any = Agent(OpenAIChatModel("policy", provider=provider), system_prompt=SYSTEM, tools=tools)

    async def play() -> None:
        history: Any = None
        for question in QUESTIONS:
            history = (await main.run(question, message_history=history)).all_messages()

    asyncio.run(play())


def smolagents(url: str, key: str) -> None:
    """smolagents' tool-calling agent."""
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

    # It forces tool calls by default, and what was forced is not trained.
    model = OpenAIModel(model_id="policy", api_base=url, api_key=key, tool_choice="auto")
    agent = ToolCallingAgent(list(map(tool, TOOLS)), model, instructions=SYSTEM, verbosity_level=LogLevel.OFF)
    for number, question in enumerate(QUESTIONS):
        agent.run(question, reset=number == 0)


def agentscope(url: str, key: str) -> None:
    """AgentScope over chat completions."""
    from agentscope.agent import Agent, InjectionConfig
    from agentscope.credential import OpenAICredential
    from agentscope.message import UserMsg
    from agentscope.model import OpenAIChatModel
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="It only reads.")
    model = OpenAIChatModel(OpenAICredential(api_key=key, base_url=url), "policy", stream=False)
    toolkit = Toolkit([FunctionTool(one, permission=allowed) for one in TOOLS])
    # It would tell its agents the time, and no recording would repeat itself.
    agent = Agent("researcher", SYSTEM, model, toolkit, injection_config=InjectionConfig(inject_runtime_state=False))

    async def play() -> None:
        for question in QUESTIONS:
            await agent.reply(UserMsg("user", question))

    asyncio.run(play())


def schema(
    tool: Callable[..., str], description: str, required: list[str], **properties: dict[str, str]
) -> dict[str, Any]:
    """A tool as OpenAI's API takes it."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": tool.__name__, "description": description, "parameters": parameters}


SCHEMAS = (
    schema(
        search,
        "Searches the library of reports and returns the number, title and one finding of each report found.",
        ["query"],
        query={"type": "string", "description": "What to look for, in a few plain words."},
        max_results={"type": "integer", "description": "How many reports to return at most, from 1 to 5."},
    ),
    schema(
        read_report,
        "Reads one section of a report from the library.",
        ["report"],
        report={"type": "string", "description": "The report's number as a search shows it, such as R271."},
        section={"type": "string", "description": "Which section to read: summary, methods or costs."},
    ),
    schema(
        compare,
        "Compares two measures by the library's tables: cooling at noon, cooling at night, cost and water.",
        ["first", "second"],
        first={"type": "string", "description": "The first measure, in a word or two."},
        second={"type": "string", "description": "The second measure, in a word or two."},
        years={"type": "integer", "description": "Over how many years cost and water are summed up."},
    ),
)

FRAMEWORKS = {
    "raw HTTP": Framework(raw_http, ("httpx",), frozenset({Habit.ASKS_TWICE, Habit.SUMS_UP})),
    "LangGraph": Framework(langgraph, ("langgraph", "langchain-openai"), frozenset({Habit.HAS_HELPER})),
    "OpenAI Agents": Framework(openai_agents, ("openai-agents",), frozenset({Habit.HAS_HELPER})),
    "Pydantic AI": Framework(pydantic_ai, ("pydantic-ai-slim",), frozenset({Habit.HAS_HELPER})),
    "smolagents": Framework(smolagents, ("smolagents",), frozenset({Habit.ANSWERS_BY_TOOL})),
    "AgentScope": Framework(agentscope, ("agentscope",)),
}
