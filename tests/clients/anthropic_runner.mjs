// The tool runner of Anthropic's SDK: node anthropic_runner.mjs whole|streamed
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const [how] = process.argv.slice(2);
const client = new Anthropic({ baseURL: process.env.BASE_URL, apiKey: process.env.API_KEY, maxRetries: 0 });
const add = betaZodTool({
  name: "add",
  description: "Adds two whole numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  run: ({ a, b }) => String(a + b),
});

let messages = [];
for (const question of ["What is 2 + 3? Use the tool.", "And once more?"]) {
  messages.push({ role: "user", content: question });
  const stream = how === "streamed";
  const runner = client.beta.messages.toolRunner({ model: "policy", max_tokens: 200, messages, tools: [add], stream });
  const last = await runner;
  messages = [...runner.params.messages];
  if (messages.at(-1).role !== "assistant") messages.push({ role: "assistant", content: last.content });
  console.log(last.content.filter((block) => block.type === "text").map((block) => block.text).join(""));
}
