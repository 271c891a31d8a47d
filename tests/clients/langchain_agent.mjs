// LangChain.js' agent: node langchain_agent.mjs openai|anthropic whole|streamed
import { HumanMessage, createAgent, tool } from "langchain";
import { ChatAnthropic } from "@langchain/anthropic";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const [provider, how] = process.argv.slice(2);
const { BASE_URL, API_KEY } = process.env;
const shared = { model: "policy", apiKey: API_KEY, maxRetries: 0 };
const model =
  provider === "openai"
    ? new ChatOpenAI({ ...shared, configuration: { baseURL: BASE_URL } })
    : new ChatAnthropic({ ...shared, anthropicApiUrl: BASE_URL, maxTokens: 200 });
const add = tool(({ a, b }) => String(a + b), {
  name: "add",
  description: "Adds two whole numbers.",
  schema: z.object({ a: z.number().int(), b: z.number().int() }),
});
const agent = createAgent({ model, tools: [add] });

let messages = [];
for (const question of ["What is 2 + 3? Use the tool.", "And once more?"]) {
  const asked = { messages: [...messages, new HumanMessage(question)] };
  if (how === "streamed") {
    // Not `streaming: true`, with which it counts tokens by tables that it loads from the net.
    for await (const [mode, part] of await agent.stream(asked, { streamMode: ["messages", "values"] }))
      if (mode === "values") ({ messages } = part);
  } else ({ messages } = await agent.invoke(asked));
  console.log(messages.at(-1).text);
}
