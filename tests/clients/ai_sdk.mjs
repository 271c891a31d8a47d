// Vercel's AI SDK: node ai_sdk.mjs openai|openai-compatible|anthropic whole|streamed
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const [provider, how] = process.argv.slice(2);
const settings = { baseURL: `${process.env.BASE_URL}/v1`, apiKey: process.env.API_KEY };
const model = {
  openai: () => createOpenAI(settings)("policy"),
  "openai-compatible": () => createOpenAICompatible({ ...settings, name: "swarm" })("policy"),
  anthropic: () => createAnthropic(settings)("policy"),
}[provider]();
const tools = {
  add: tool({
    description: "Adds two whole numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async ({ a, b }) => a + b,
  }),
};

const messages = [];
for (const question of ["What is 2 + 3? Use the tool.", "And once more?"]) {
  messages.push({ role: "user", content: question });
  const asked = { model, messages, tools, stopWhen: isStepCount(5), maxRetries: 0 };
  if (how === "streamed") {
    const result = streamText({ ...asked, onError: ({ error }) => { throw error; } });
    for await (const _ of result.textStream);
    messages.push(...(await result.responseMessages));
    console.log(await result.text);
  } else {
    const result = await generateText(asked);
    messages.push(...result.responseMessages);
    console.log(result.text);
  }
}
