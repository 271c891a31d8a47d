// Mastra's agent on the AI SDK's OpenAI-compatible provider: node mastra_agent.mjs whole|streamed
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const [how] = process.argv.slice(2);
const { BASE_URL, API_KEY } = process.env;
const add = createTool({
  id: "add",
  description: "Adds two whole numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => a + b,
});
const model = { providerId: "swarm", modelId: "policy", url: `${BASE_URL}/v1`, apiKey: API_KEY };
const agent = new Agent({ id: "adder", name: "adder", instructions: "You add.", model, tools: { add } });

let messages = [];
for (const question of ["What is 2 + 3? Use the tool.", "And once more?"]) {
  messages.push({ role: "user", content: question });
  if (how === "streamed") {
    const output = await agent.stream(messages);
    for await (const _ of output.textStream);
    messages.push(...(await output.response).messages);
    console.log(await output.text);
  } else {
    const output = await agent.generate(messages);
    messages.push(...output.response.messages);
    console.log(output.text);
  }
}
