// What OpenAI's own client for JavaScript gets of a server, as JSON on standard output.
// Usage: node node_client.mjs URL STOPS, the latter tokens that end the answers of the agent, in a folder whose node_modules has the package "openai".
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const find = createRequire(`${process.cwd()}/package.json`);
const { default: OpenAI } = await import(pathToFileURL(find.resolve("openai")).href);
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "built-in";
const messages = [
  { role: "system", content: "You answer in few words. ".repeat(6) },
  { role: "user", content: [{ type: "text", text: "Who are " }, { type: "text", text: "you, Jürgen?" }] },
];
const told = {};

told.models = [];
for await (const each of client.models.list()) told.models.push(each.id);

const whole = await client.chat.completions.create({ model, messages, max_tokens: 24, temperature: 0 });
told.chat = whole.choices[0].message.content;
told.usage = whole.usage;

const asked = { model, messages, max_tokens: 24, temperature: 0, stream: true, stream_options: { include_usage: true } };
told.pieces = [];
for await (const chunk of await client.chat.completions.create(asked)) {
  if (chunk.choices.length) told.pieces.push(chunk.choices[0].delta.content ?? "");
  else told.streamed_usage = chunk.usage;
}

// the client's own collector of a stream, which insists on roles, indices and ends
const collected = await client.chat.completions.stream({ ...asked, n: 2, seed: 5 }).finalChatCompletion();
told.collected = collected.choices.map((each) => [each.index, each.message.role, each.message.content]);

told.completion = (await client.completions.create({ model, prompt: "Once", max_tokens: 8, temperature: 0 })).choices[0].text;

// an agent's loop: the model calls a tool, the client runs it, and the model answers
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    function: (given) => {
      const { city } = JSON.parse(given);
      told.tool_ran = [...(told.tool_ran ?? []), city];
      return `rain in ${city}`;
    },
  },
};
told.agents = [];
for (const stream of [false, true]) {
  const agent = client.chat.completions.runTools({
    model, messages: [{ role: "user", content: "Sun in Köln?" }], tools: [weather], max_tokens: 50, temperature: 0, stream,
    stop_token_ids: JSON.parse(process.argv[3]),
  });
  told.agents.push({ answer: await agent.finalContent(), roles: agent.messages.map((each) => each.role) });
}

// a client that leaves in the midst of a stream, and errors by their class
const left = await client.chat.completions.create({ ...asked, max_tokens: 1500, ignore_eos: true });
for await (const _ of left) break;
const failed = async (body) => {
  try {
    await client.chat.completions.create(body);
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.param];
  }
};
told.errors = [
  await failed({ model, messages: [], max_tokens: 4 }),
  await failed({ model: "another", messages, max_tokens: 4 }),
  await failed({ model, messages, max_tokens: 1_000_000 }),
];

console.log(JSON.stringify(told));
