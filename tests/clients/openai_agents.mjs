// OpenAI's Agents SDK: node openai_agents.mjs responses|chat_completions whole|streamed
import { Agent, run, setDefaultOpenAIClient, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { OpenAI } from "openai";
import { z } from "zod";

const [api, how] = process.argv.slice(2);
setTracingDisabled(true);
setOpenAIAPI(api);
setDefaultOpenAIClient(new OpenAI({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 }));
const add = tool({
  name: "add",
  description: "Adds two whole numbers.",
  parameters: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => String(a + b),
});
const agent = new Agent({ name: "adder", instructions: "You add.", model: "policy", tools: [add] });

let history = [];
for (const question of ["What is 2 + 3? Use the tool.", "And once more?"]) {
  const asked = [...history, { role: "user", content: question }];
  const result = how === "streamed" ? await run(agent, asked, { stream: true }) : await run(agent, asked);
  if (how === "streamed") {
    for await (const _ of result);
    await result.completed;
  }
  history = result.history;
  console.log(result.finalOutput);
}
