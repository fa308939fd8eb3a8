// The list of kept conversations: opens them again, deletes them, and keeps the one that is seen while it grows.

import { Conversation } from "./conversation.js";
import { History } from "./history.js";
import { element, setText } from "./words.js";

// in this tab: the conversation that a reload shows again
const SEEN = "quire-conversation";
// in this browser: "no" where nothing more shall be kept
const KEEPS = "quire-keeps-history";
const EVERY = 3000;

export class HistoryList {
  constructor() {
    this.history = new History();
    this.chat = null;
    this.timer = null;
    this.deleted = new Set();
    this.panel = document.getElementById("history");
    this.list = document.getElementById("history-items");
    this.toggle = document.getElementById("history-toggle");
    this.all = document.getElementById("delete-all");
    this.toggle.addEventListener("click", () => this.#open(this.panel.hidden));
    this.panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.#open(false);
      this.toggle.focus();
    });
    const keeps = document.getElementById("keeps-history");
    keeps.checked = localStorage.getItem(KEEPS) !== "no";
    keeps.addEventListener("change", () => {
      if (keeps.checked) localStorage.removeItem(KEEPS);
      else localStorage.setItem(KEEPS, "no");
    });
    this.all.addEventListener("click", () => this.#deleteAll());
    this.all.addEventListener("blur", () => this.#sure(false));
    document.addEventListener("visibilitychange", () => document.hidden && this.keep(this.chat.conversation));
  }

  // Shows again what this tab showed before it was loaded anew.
  async resume(chat) {
    this.chat = chat;
    const id = sessionStorage.getItem(SEEN);
    if (id) await this.#tried(async () => this.#show(await this.history.read(id)));
  }

  // It has changed, or is shown. While an answer grows it is written again and again.
  async keep(conversation) {
    clearTimeout(this.timer);
    sessionStorage.setItem(SEEN, this.chat.conversation.id);
    if (conversation.isEmpty || this.deleted.has(conversation.id) || localStorage.getItem(KEEPS) === "no") return;
    if (conversation.messages.at(-1).ending === "running") this.timer = setTimeout(() => this.keep(conversation), EVERY);
    await this.#tried(() => this.history.write(conversation));
    if (!this.panel.hidden) await this.#draw();
  }

  #show(kept) {
    if (kept) this.chat.open(new Conversation(kept));
  }

  #open(isOpen) {
    this.panel.hidden = !isOpen;
    this.toggle.setAttribute("aria-expanded", String(isOpen));
    if (isOpen) this.#draw();
  }

  async #draw() {
    const titles = (await this.#tried(() => this.history.titles())) ?? [];
    this.all.disabled = !titles.length;
    const items = titles.map((kept) => this.#item(kept));
    if (!items.length) items.push(element("li", "empty", "No conversation is kept yet."));
    const focused = document.activeElement?.dataset?.conversation;
    this.list.replaceChildren(...items);
    if (focused) this.list.querySelector(`[data-conversation="${focused}"]`)?.focus();
  }

  #item({ id, title, changed }) {
    const item = element("li");
    const open = element("button", "entry");
    const when = new Date(changed).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
    open.type = "button";
    open.dataset.conversation = id;
    open.append(element("span", "title", title), element("span", "hint", when));
    if (id === this.chat.conversation.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", async () => {
      // where the list covers the conversation
      if (getComputedStyle(this.panel).position === "absolute") this.#open(false);
      await this.#tried(async () => this.#show(await this.history.read(id)));
      this.chat.prompt.focus();
    });
    const remove = element("button", "quiet small", "Delete");
    remove.type = "button";
    remove.setAttribute("aria-label", `Delete: ${title}`);
    remove.addEventListener("click", () => this.#delete(id));
    item.append(open, remove);
    return item;
  }

  async #delete(id) {
    this.deleted.add(id);
    await this.#tried(() => this.history.remove(id));
    if (id === this.chat.conversation.id) this.chat.begin();
    await this.#draw();
    (this.list.querySelector("button") ?? this.toggle).focus();
    setText("history-status", "Deleted.");
  }

  // Pressed twice: nothing brings them back.
  async #deleteAll() {
    if (this.all.dataset.sure !== "yes") {
      this.#sure(true);
      return;
    }
    for (const { id } of (await this.#tried(() => this.history.titles())) ?? []) this.deleted.add(id);
    this.deleted.add(this.chat.conversation.id);
    await this.#tried(() => this.history.removeAll());
    this.#sure(false);
    this.chat.begin();
    await this.#draw();
    setText("history-status", "All conversations are deleted.");
  }

  #sure(isSure) {
    this.all.dataset.sure = isSure ? "yes" : "";
    this.all.textContent = isSure ? "Really delete all?" : "Delete all";
  }

  // A browser may refuse to keep anything; the chat goes on without.
  async #tried(work) {
    try {
      return await work();
    } catch (error) {
      setText("history-status", `This browser keeps nothing here: ${error.message}`);
      return undefined;
    }
  }
}
