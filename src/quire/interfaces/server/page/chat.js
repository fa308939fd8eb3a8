// The chat, or a box for completions where the model has no chat template. Texts are shown as texts, never as HTML.

import { stream } from "./api.js";
import { count, element, figure, milliseconds, plural, setText } from "./words.js";

export class Chat {
  constructor(onRefused) {
    this.onRefused = onRefused;
    this.messages = [];
    this.isChat = true;
    this.running = null;
    this.log = document.getElementById("log");
    this.prompt = document.getElementById("prompt");
    this.empty = document.getElementById("empty");
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    document.getElementById("stop").addEventListener("click", () => this.running?.abort());
    document.getElementById("clear").addEventListener("click", () => this.#clear());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
  }

  // What the model can do, once it is known.
  adapt(model) {
    if (this.isChat === model.has_chat_template) return;
    this.isChat = model.has_chat_template;
    setText("chat-title", this.isChat ? "Chat" : "Completion");
    setText("prompt-label", this.isChat ? "Your message" : "Text to continue");
    this.prompt.placeholder = this.isChat ? "Ask anything" : "Once upon a time";
    document.getElementById("system-field").hidden = !this.isChat;
    setText("empty", this.isChat ? this.empty.textContent : "This model has no chat template: it continues texts.");
  }

  #clear() {
    this.running?.abort();
    this.messages = [];
    this.log.replaceChildren(this.empty);
    this.prompt.focus();
  }

  async #send() {
    const text = this.prompt.value;
    if (!text.trim() || this.running) return;
    this.prompt.value = "";
    this.empty.remove();
    this.messages.push({ role: "user", content: text });
    this.#bubble("user", this.isChat ? "You" : "Your text").textContent = text;
    const answer = this.#bubble("assistant", this.isChat ? "Model" : "Continued");
    this.running = new AbortController();
    this.#busy(true);
    try {
      await this.#receive(answer);
    } catch (error) {
      this.#failed(answer, error);
      this.log.scrollTop = this.log.scrollHeight;
    } finally {
      this.running = null;
      this.#busy(false);
    }
  }

  async #receive(answer) {
    const began = performance.now();
    let [content, first, usage, finish] = ["", null, null, null];
    try {
      for await (const event of stream(...this.#request(), this.running.signal)) {
        usage = event.usage ?? usage;
        const [choice] = event.choices;
        if (!choice) continue;
        finish = choice.finish_reason ?? finish;
        const piece = this.isChat ? (choice.delta.content ?? "") : choice.text;
        if (!piece) continue;
        first ??= performance.now();
        content += piece;
        this.#write(answer, content);
      }
    } finally {
      if (content) this.messages.push({ role: "assistant", content });
    }
    this.#facts(answer, { began, first, ended: performance.now(), usage, finish });
    setText("chat-status", "The answer is complete.");
  }

  #request() {
    const body = { stream: true, stream_options: { include_usage: true } };
    const temperature = document.getElementById("temperature").value;
    const longest = Number(document.getElementById("max-tokens").value);
    if (temperature !== "") body.temperature = Number(temperature);
    if (longest > 0) body.max_tokens = longest;
    if (!this.isChat) return ["/v1/completions", { ...body, prompt: this.messages.at(-1).content }];
    const system = document.getElementById("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return ["/v1/chat/completions", { ...body, messages: [...first, ...this.messages] }];
  }

  #write(answer, content) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 48;
    answer.replaceChildren(...paragraphs(content));
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #facts(answer, { began, first, ended, usage, finish }) {
    if (!usage) return;
    const parts = [plural(usage.completion_tokens, "token")];
    if (first !== null) parts.push(`${milliseconds((first - began) / 1000)} ms to the first`);
    const seconds = first === null ? 0 : (ended - first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) parts.push(`${figure((usage.completion_tokens - 1) / seconds)} a second`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const miss = usage.prompt_tokens_details?.first_miss;
    const why = miss && miss !== "new" ? ` (${miss.replaceAll("_", " ")})` : "";
    parts.push(`${count(cached)} of ${plural(usage.prompt_tokens, "prompt token")} from the cache${why}`);
    if (finish === "length") parts.push("cut at the longest length");
    answer.parentElement.append(element("p", "facts", parts.join(" · ")));
    this.log.scrollTop = this.log.scrollHeight;
  }

  #failed(answer, error) {
    if (error.name === "AbortError") {
      answer.parentElement.append(element("p", "facts", "stopped"));
      setText("chat-status", "Stopped.");
      return;
    }
    if (!answer.textContent) this.messages.pop();
    answer.parentElement.classList.add("failed");
    answer.append(element("span", "", `${answer.textContent ? "\n" : ""}${error.message}`));
    setText("chat-status", error.message);
    if (error.status === 401) this.onRefused(error.message);
  }

  #bubble(role, who) {
    const message = element("div", `message ${role}`);
    const text = element("div", "text");
    message.append(element("p", "who", who), text);
    this.log.append(message);
    this.log.scrollTop = this.log.scrollHeight;
    return text;
  }

  #busy(isBusy) {
    this.log.setAttribute("aria-busy", String(isBusy));
    const [send, stop] = [document.getElementById("send"), document.getElementById("stop")];
    const hadFocus = [send, stop].includes(document.activeElement);
    send.hidden = isBusy;
    stop.hidden = !isBusy;
    if (hadFocus) (isBusy ? stop : this.prompt).focus();
  }
}

// Code between fences stands in a block of its own; everything is text.
function paragraphs(content) {
  return content.split("```").map((part, number) => {
    if (number % 2 === 0) return element("span", "", part);
    return element("pre", "", part.replace(/^[^\n]*\n/, ""));
  });
}
