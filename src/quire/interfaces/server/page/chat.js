// The chat, or a box for completions where the model has no chat template: what is asked, stopped, tried again and changed.

import { stream } from "./api.js";
import { Answer, newAnswer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { Attachments } from "./images.js";
import { Log } from "./log.js";
import { answerMessage, isSending, toolMessage, userMessage } from "./message.js";
import { Settings } from "./settings.js";
import { element, setText } from "./words.js";

const EXAMPLES = {
  chat: ["What can you do?", "Write a Python function that sorts words by their length.", "Tell me a short story."],
  completion: ["Once upon a time", "The three primary colours are", "def fibonacci(n):"],
};

// By what a model makes, where that is no text: there is nothing to talk about.
const OTHER_ANSWERS = {
  labels: {
    title: "Scores and labels",
    text: "This model judges texts and writes none: it compares two of them, or tells what one is. "
      + "Ask POST /v1/rerank, /v1/score or /v1/classify.",
  },
  vectors: {
    title: "Vectors",
    text: "This model makes vectors of texts and writes none: similar texts have vectors that point the same way. "
      + "Ask POST /v1/embeddings, /v1/score or /v1/rerank.",
  },
  transcripts: {
    title: "Speech",
    text: "This model writes down what it hears. Send a recording to POST /v1/audio/transcriptions.",
  },
};

export class Chat {
  // onRefused(message): the key is not taken; onChange(conversation): something is to be kept
  constructor(onRefused, onChange) {
    this.onRefused = onRefused;
    this.onChange = onChange;
    this.conversation = new Conversation();
    this.isChat = true;
    this.running = null;
    this.log = new Log();
    this.settings = new Settings();
    this.attachments = new Attachments();
    this.prompt = document.getElementById("prompt");
    document.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    document.getElementById("stop").addEventListener("click", () => this.stop());
    document.getElementById("new").addEventListener("click", () => this.begin());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (!isSending(event)) return;
      event.preventDefault();
      this.#submit();
    });
    this.#offerExamples();
  }

  // What the model can do, once it is known.
  adapt(model) {
    if (model.makes in OTHER_ANSWERS) {
      this.#tell(OTHER_ANSWERS[model.makes]);
      return;
    }
    this.attachments.offer(model.has_chat_template && model.takes_images);
    if (this.isChat === model.has_chat_template) return;
    this.isChat = model.has_chat_template;
    setText("chat-title", this.isChat ? "Chat" : "Completion");
    this.prompt.placeholder = this.isChat ? "Ask anything" : "Once upon a time";
    for (const id of ["system-field", "tools-field"]) document.getElementById(id).hidden = !this.isChat;
    if (!this.isChat) setText("empty-text", "This model has no chat template: it continues texts.");
    this.#labelPrompt();
    this.#offerExamples();
  }

  // Of a model that writes nothing: what it is for, in the place of a conversation.
  #tell({ title, text }) {
    setText("chat-title", title);
    setText("empty-text", text);
    for (const id of ["composer", "examples", "new", "history-toggle"]) document.getElementById(id).hidden = true;
  }

  stop() {
    this.running?.abort();
  }

  // An empty conversation.
  begin() {
    this.open(new Conversation({ settings: this.settings.get() }));
    this.prompt.focus();
  }

  // Shows a conversation, instead of the one that is seen.
  async open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.settings.set(conversation.settings);
    this.log.clear();
    setText("composer-error", "");
    this.#labelPrompt();
    this.onChange(conversation);
    for (const [index, message] of conversation.messages.entries()) {
      if (this.conversation !== conversation) return;
      await this.#show(message, index);
    }
  }

  // ---- what the user does ----

  #submit() {
    const text = this.prompt.value;
    if (this.running || (!text.trim() && !this.attachments.urls.length)) return;
    if (!this.#isSound()) return;
    const call = this.conversation.openCall;
    this.prompt.value = "";
    if (call) {
      this.#add({ role: "tool", toolCallId: call.id, name: call.name, content: text });
      if (this.conversation.openCall) return;
    } else {
      this.#add({ role: "user", content: text, images: this.attachments.giveAll() });
    }
    this.#answer();
  }

  // Whether the settings can be sent; otherwise says what is wrong.
  #isSound() {
    try {
      this.settings.asked(this.isChat);
      setText("composer-error", "");
      return true;
    } catch (error) {
      setText("composer-error", error.message);
      return false;
    }
  }

  // Asks again: from the message at this place on, which has another text or is an answer that is made anew.
  async #goBack(index, text = null) {
    if (!this.#isSound()) return;
    this.stop();
    const asked = this.conversation.messages[index];
    await this.open(this.conversation.until(index));
    if (text !== null) this.#add({ ...asked, content: text });
    this.prompt.focus();
    this.#answer();
  }

  #offerExamples() {
    const items = EXAMPLES[this.isChat ? "chat" : "completion"].map((text) => {
      const item = element("li");
      const button = element("button", "example", text);
      button.type = "button";
      button.addEventListener("click", () => {
        this.prompt.value = text;
        this.prompt.focus();
        this.#submit();
      });
      item.append(button);
      return item;
    });
    document.getElementById("examples").replaceChildren(...items);
  }

  // ---- what is seen ----

  #add(message) {
    this.conversation.messages.push(message);
    this.#show(message, this.conversation.messages.length - 1);
    this.#labelPrompt();
  }

  async #show(message, index) {
    if (message.role === "assistant") {
      await this.#place(message, index).showKept();
    } else if (message.role === "tool") {
      this.log.add(toolMessage(message));
    } else {
      const who = this.isChat ? "You" : "Your text";
      this.log.add(userMessage(message, who, (text) => this.#goBack(index, text)));
    }
  }

  #place(message, index) {
    const onDrawn = () => this.log.follow();
    const onBlock = (text) => message.ending === "running" && this.running && this.log.speak(text);
    const answer = new Answer(message, this.isChat, { onBlock, onDrawn });
    this.log.add(answerMessage(answer, this.isChat ? "Model" : "Continued", () => this.#goBack(index)));
    return answer;
  }

  // A tool's result is typed where a message would be.
  #labelPrompt() {
    const call = this.conversation.openCall;
    const otherwise = this.isChat ? "Your message" : "Text to continue";
    setText("prompt-label", call ? `Result of ${call.name}, which the model waits for` : otherwise);
  }

  // ---- what the server does ----

  async #answer() {
    const { conversation } = this;
    const request = this.#request();
    conversation.settings = this.settings.get();
    const message = newAnswer();
    conversation.messages.push(message);
    const answer = this.#place(message, conversation.messages.length - 1);
    const running = new AbortController();
    this.running = running;
    this.#busy(true);
    this.onChange(conversation);
    try {
      for await (const event of stream(...request, running.signal)) answer.take(event);
      await answer.end();
      setText("chat-status", "The answer is complete.");
    } catch (error) {
      await this.#failed(answer, error);
    } finally {
      // another conversation may have been opened meanwhile
      if (this.running === running) {
        this.running = null;
        this.#busy(false);
      }
      this.#labelPrompt();
      this.onChange(conversation);
    }
  }

  #request() {
    const body = { stream: true, stream_options: { include_usage: true }, ...this.settings.asked(this.isChat) };
    if (!this.isChat) return ["/v1/completions", { ...body, prompt: this.conversation.messages.at(-1).content }];
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return ["/v1/chat/completions", { ...body, messages: [...system, ...this.conversation.asked()] }];
  }

  async #failed(answer, error) {
    const isStopped = error.name === "AbortError";
    await answer.fail(isStopped ? "stopped" : error.message);
    setText("chat-status", isStopped ? "Stopped." : error.message);
    if (error.status === 401) this.onRefused(error.message);
  }

  #busy(isBusy) {
    this.log.setBusy(isBusy);
    const [send, stop] = [document.getElementById("send"), document.getElementById("stop")];
    const hadFocus = [send, stop].includes(document.activeElement);
    send.hidden = isBusy;
    stop.hidden = !isBusy;
    if (hadFocus) (isBusy ? stop : this.prompt).focus();
  }
}
