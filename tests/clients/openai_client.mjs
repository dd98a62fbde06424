// What the README of OpenAI's client for JavaScript shows, against the server whose address is the first argument; the
// second names an example, the third the model. What was answered is printed as JSON.

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = process.argv[4] ?? "small";
const messages = [{ role: "user", content: "What is the weather in Köln?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

async function toolsByHand() {
  const tools = [{ type: "function", function: { name: "weather", parameters, strict: true } }];
  const first = await client.chat.completions.create({ model, messages, tools });
  const { message, finish_reason } = first.choices[0];
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: "30 °C in Köln" }));
  const second = await client.chat.completions.create({ model, messages: [...messages, message, ...results], tools });
  const calls = message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return { calls, finish_reason, answer: second.choices[0].message.content };
}

async function toolsByRunner(stream = false) {
  const asked = [];
  const weather = ({ city }) => {
    asked.push(city);
    return `30 °C in ${city}`;
  };
  const runner = client.chat.completions.runTools({
    model,
    messages,
    stream,
    tools: [{ type: "function", function: { function: weather, parse: JSON.parse, name: "weather", parameters } }],
  });
  return { asked, answer: await runner.finalContent() };
}

const toolsByStreamedRunner = () => toolsByRunner(true);

async function toolsInResponses(streamed = false) {
  const tools = [{ type: "function", name: "weather", parameters, strict: true }];
  const calls = [];
  const input = [...messages];
  for (;;) {
    const asked = { model, input, tools };
    const response = streamed ? await client.responses.stream(asked).finalResponse() : await client.responses.create(asked);
    input.push(...response.output);
    const called = response.output.filter((item) => item.type === "function_call");
    if (!called.length) return { calls, answer: response.output_text };
    for (const call of called) {
      calls.push([call.name, JSON.parse(call.arguments)]);
      input.push({ type: "function_call_output", call_id: call.call_id, output: "30 °C in Köln" });
    }
  }
}

const toolsInStreamedResponses = () => toolsInResponses(true);

async function streamed() {
  let text = "";
  const usages = [];
  const stream = await client.chat.completions.create({
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    if (chunk.usage) usages.push(chunk.usage.completion_tokens > 0);
  }
  return { text, usages };
}

async function parsed() {
  const Animal = z.object({ name: z.enum(["cat", "dog"]), legs: z.number().int().min(0).max(9) });
  const answer = await client.chat.completions.parse({
    model,
    messages,
    response_format: zodResponseFormat(Animal, "animal"),
  });
  return answer.choices[0].message.parsed;
}

async function responses() {
  const whole = await client.responses.create({ model, input: "Hot in Köln?", instructions: "Be brief." });
  let text = "";
  const kinds = [];
  for await (const event of await client.responses.create({ model, input: "Hot?", stream: true })) {
    kinds.push(event.type);
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  return { whole: whole.output_text, text, last: kinds.at(-1) };
}

async function refused() {
  try {
    await client.chat.completions.create({ model, messages, temperature: -1 });
  } catch (error) {
    return { bad: error instanceof OpenAI.BadRequestError, status: error.status, param: error.param };
  }
}

async function left() {
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  for await (const _ of stream) break; // aborts the request
  return stream.controller.signal.aborted;
}

const todo = {
  toolsByHand,
  toolsByRunner,
  toolsByStreamedRunner,
  toolsInResponses,
  toolsInStreamedResponses,
  streamed,
  parsed,
  responses,
  refused,
  left,
};
console.log(JSON.stringify(await todo[process.argv[3]]()));
