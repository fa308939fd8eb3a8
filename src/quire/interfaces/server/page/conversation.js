// What was said: messages, and the request that asks for the next one. Plain data, so that it can be kept.
//
//   { role: "user", content, images: [data URL] }
//   { role: "assistant", content, reasoning, toolCalls: [{ id, name, arguments }], facts, ending }
//   { role: "tool", toolCallId, name, content }
//
// ending: null of a whole answer, "running", "stopped", or what went wrong

const LONGEST_TITLE = 80;

export class Conversation {
  constructor({ id = newId(), messages = [], settings = {} } = {}) {
    this.id = id;
    this.messages = messages;
    this.settings = settings;
  }

  get isEmpty() {
    return !this.messages.length;
  }

  get title() {
    const words = (this.messages[0]?.content ?? "").trim().replace(/\s+/g, " ");
    return words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE)} …` : words || "Images";
  }

  // Up to a message, which is left out; by another name where that loses an answer, so that what was said is kept.
  until(index) {
    const isOnlyLast = this.messages.length - index <= 2;
    const id = isOnlyLast ? this.id : newId();
    return new Conversation({ id, messages: this.messages.slice(0, index), settings: this.settings });
  }

  // The call whose result the model waits for, if any.
  get openCall() {
    const last = this.messages.findLastIndex((message) => message.role === "assistant");
    if (last < 0) return null;
    const known = new Set(this.messages.slice(last + 1).map((message) => message.toolCallId));
    return this.messages[last].toolCalls.find((call) => !known.has(call.id)) ?? null;
  }

  // What the model is told. A question that got no answer is left out, with its failure.
  asked() {
    const kept = [];
    for (const message of this.messages) {
      const isNothing = message.role === "assistant" && !message.content && !message.toolCalls.length;
      if (!isNothing) kept.push(message);
      else if (kept.at(-1)?.role === "user") kept.pop();
    }
    return kept.map(sent);
  }
}

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

function sent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  if (message.role === "assistant") {
    const calls = message.toolCalls.map((call) => ({
      id: call.id,
      type: "function",
      function: { name: call.name, arguments: call.arguments },
    }));
    return { role: "assistant", content: message.content, ...(calls.length ? { tool_calls: calls } : {}) };
  }
  if (!message.images.length) return { role: "user", content: message.content };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  const text = message.content ? [{ type: "text", text: message.content }] : [];
  return { role: "user", content: [...images, ...text] };
}
