// An answer on the page, while it arrives or as it was kept: thoughts and tool calls folded, text, figures, and what went wrong.

import { Chunks } from "./chunks.js";
import { Markdown } from "./markdown.js";
import { count, element, figure, milliseconds, plural } from "./words.js";

export const newAnswer = () => ({
  role: "assistant",
  content: "",
  reasoning: "",
  toolCalls: [],
  facts: "",
  ending: "running",
});

export class Answer {
  // watch: { onBlock, onDrawn } of the text
  constructor(message, isChat, watch) {
    this.message = message;
    this.onDrawn = watch.onDrawn;
    this.folds = element("div", "folds");
    this.text = element("div", "text markdown");
    this.notes = element("div", "notes");
    this.parts = [this.folds, this.text, this.notes];
    this.writer = new Markdown(this.text, { isPlain: !isChat, ...watch });
    this.thoughts = null;
    this.calls = [];
    this.began = performance.now();
    this.first = null;
    this.usage = null;
    this.finish = null;
  }

  // ---- as it arrives ----

  // event: of the stream
  take(event) {
    this.usage = event.usage ?? this.usage;
    const [choice] = event.choices;
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.#think(thought);
    if (delta.content) this.#write(delta.content);
    for (const call of delta.tool_calls ?? []) this.#call(call);
  }

  async end() {
    await this.writer.end();
    this.message.ending = null;
    this.message.facts = this.#figures();
    this.#settle();
  }

  // how: "stopped", or what went wrong
  async fail(how) {
    await this.writer.end();
    this.message.ending = how;
    this.#settle();
  }

  // ---- as it was kept ----

  async showKept() {
    const { reasoning, content, toolCalls } = this.message;
    if (reasoning) this.#showThought(reasoning);
    toolCalls.forEach((call) => this.#openCall(call).arguments.add(call.arguments));
    this.writer.push(content);
    await this.writer.end();
    this.#settle();
  }

  // ---- parts ----

  #think(text) {
    this.#arrived();
    this.message.reasoning += text;
    this.#showThought(text);
    this.onDrawn();
  }

  #showThought(text) {
    if (!this.thoughts) {
      const fold = foldOf("Thinks …", "thoughts");
      this.folds.append(fold.details);
      this.thoughts = { summary: fold.summary, text: new Chunks(fold.inside, "div") };
    }
    this.thoughts.text.add(text);
  }

  #write(text) {
    this.#arrived();
    this.message.content += text;
    this.#endThoughts();
    this.writer.push(text);
  }

  // A piece of a call; its first one has the name.
  #call({ index, id, function: called }) {
    this.#arrived();
    let call = this.message.toolCalls[index];
    if (!call) {
      call = { id: id ?? `call-${index}`, name: called.name ?? "", arguments: "" };
      this.message.toolCalls.push(call);
      this.calls.push(this.#openCall(call));
    }
    const piece = called.arguments ?? "";
    call.arguments += piece;
    this.calls[index].arguments.add(piece);
    this.onDrawn();
  }

  #openCall(call) {
    this.#endThoughts();
    const fold = foldOf(`Calls ${call.name}`, "call");
    this.folds.append(fold.details);
    return { arguments: new Chunks(fold.inside, "div") };
  }

  #endThoughts() {
    if (this.thoughts) this.thoughts.summary.textContent = "Thoughts";
  }

  #arrived() {
    this.first ??= performance.now();
  }

  #settle() {
    this.#endThoughts();
    const { facts, ending } = this.message;
    const isCut = ending === "running";
    const isFailed = !isCut && ending !== null && ending !== "stopped";
    if (facts) this.notes.append(element("p", "facts", facts));
    if (isCut) this.notes.append(element("p", "facts", "cut: the page was left before the end"));
    else if (isFailed) this.notes.append(element("p", "error", ending));
    else if (ending) this.notes.append(element("p", "facts", ending));
    this.onDrawn();
  }

  #figures() {
    if (!this.usage) return "";
    const { completion_tokens: generated, prompt_tokens: asked, prompt_tokens_details: details } = this.usage;
    const ended = performance.now();
    const parts = [plural(generated, "token")];
    if (this.first !== null) {
      parts.push(`${milliseconds((this.first - this.began) / 1000)} ms to the first`);
      const seconds = (ended - this.first) / 1000;
      if (generated > 1 && seconds > 0) parts.push(`${figure((generated - 1) / seconds)} a second`);
    }
    const miss = details?.first_miss;
    const why = miss && miss !== "new" ? ` (${miss.replaceAll("_", " ")})` : "";
    parts.push(`${count(details?.cached_tokens ?? 0)} of ${plural(asked, "prompt token")} from the cache${why}`);
    if (this.finish === "length") parts.push("cut at the longest length");
    return parts.join(" · ");
  }
}

function foldOf(title, className) {
  const details = element("details", `fold ${className}`);
  const summary = element("summary", "", title);
  const inside = element("div", "inside");
  details.append(summary, inside);
  return { details, summary, inside };
}
