// The official client for Node: what an application does with it.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.URL, apiKey: process.env.KEY, maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is seven plus five?" }];
const schema = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];

function assert(condition, text) {
  if (!condition) throw new Error(text);
}

const checks = {
  async models() {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    assert(ids.includes(model), `${ids}`);
    assert((await client.models.retrieve(model)).id === model, "retrieve");
  },
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_completion_tokens: 8, temperature: 0 });
    assert(answer.choices[0].message.role === "assistant", "role");
    assert(answer.usage.total_tokens > 0, "usage");
    assert(answer._request_id, "request id");
  },
  async stream_of_a_chat() {
    const body = { model, messages, max_completion_tokens: 16, temperature: 0 };
    const whole = await client.chat.completions.create(body);
    const stream = await client.chat.completions.create({ ...body, stream: true, stream_options: { include_usage: true } });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert(text === whole.choices[0].message.content, text);
    assert(usage.completion_tokens === whole.usage.completion_tokens, "usage");
  },
  async stream_helper() {
    const stream = client.chat.completions.stream({ model, messages, max_completion_tokens: 100, temperature: 0 });
    let pieces = "";
    stream.on("content", (delta) => (pieces += delta));
    const final = await stream.finalChatCompletion();
    assert(pieces === final.choices[0].message.content, pieces);
  },
  async completion() {
    const answer = await client.completions.create({ model, prompt: ["Once", "The"], max_tokens: 4, logprobs: 1, echo: true });
    assert(answer.choices.length === 2, "choices");
    assert(answer.choices[0].logprobs.token_logprobs[0] === null, "the first score");
  },
  async a_call_of_a_tool() {
    const body = { model, messages, tools, tool_choice: "required", temperature: 0, max_completion_tokens: 100 };
    const answer = await client.chat.completions.create(body);
    const call = answer.choices[0].message.tool_calls[0];
    assert(call.function.name === "get_weather", "name");
    assert(typeof JSON.parse(call.function.arguments).city === "string", "arguments");
    const stream = client.chat.completions.stream(body);
    const final = await stream.finalChatCompletion();
    assert(final.choices[0].message.tool_calls[0].function.name === "get_weather", "streamed");
  },
  async an_answer_of_a_schema() {
    const response_format = { type: "json_schema", json_schema: { name: "city", strict: true, schema } };
    const body = { model, messages, response_format, max_completion_tokens: 100 };
    const answer = await client.chat.completions.parse(body);
    assert(typeof answer.choices[0].message.parsed.city === "string", "parsed");
  },
  async scores() {
    const body = { model, messages, max_completion_tokens: 3, logprobs: true, top_logprobs: 2 };
    const answer = await client.chat.completions.create(body);
    assert(answer.choices[0].logprobs.content[0].top_logprobs.length === 2, "top_logprobs");
  },
  async errors() {
    try {
      await client.chat.completions.create({ model, messages, temperature: -1 });
    } catch (error) {
      assert(error instanceof OpenAI.BadRequestError, `${error}`);
      assert(error.param === "temperature" && error.code === null && error.requestID, "fields");
    }
    try {
      await client.chat.completions.create({ model: "none", messages });
    } catch (error) {
      assert(error instanceof OpenAI.NotFoundError && error.code === "model_not_found", `${error}`);
    }
    try {
      await new OpenAI({ baseURL: process.env.URL, apiKey: "wrong", maxRetries: 0 }).models.list();
      assert(!process.env.KEY, "no error");
    } catch (error) {
      assert(error instanceof OpenAI.AuthenticationError, `${error}`);
    }
  },
  async leaving_a_stream() {
    const stream = await client.chat.completions.create({ model, messages, max_completion_tokens: 200, stream: true });
    for await (const chunk of stream) {
      if (chunk) break;
    }
    await client.chat.completions.create({ model, messages, max_completion_tokens: 1 });
  },
};

for (const [name, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`ok ${name}`);
  } catch (error) {
    console.log(`FAIL ${name}: ${String(error).replaceAll("\n", " ").slice(0, 400)}`);
    process.exitCode = 1;
  }
}
