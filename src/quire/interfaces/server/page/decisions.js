// The scheduler's last decisions, newest first, in words.

import { getBlob } from "./api.js";
import { ago, element, setText } from "./words.js";

const MOST = 200;

export class Decisions {
  constructor() {
    this.list = document.getElementById("decision-list");
    this.isPaused = false;
    this.shown = [];
    const pause = document.getElementById("pause");
    pause.addEventListener("click", () => {
      this.isPaused = !this.isPaused;
      pause.setAttribute("aria-pressed", String(this.isPaused));
      pause.textContent = this.isPaused ? "Go on" : "Pause";
      if (!this.isPaused) this.#draw();
    });
    document.getElementById("save-trace").addEventListener("click", () => this.#save());
  }

  forgetAll() {
    this.shown = [];
  }

  show(decisions, now) {
    this.now = now;
    const fresh = decisions.map((one) => ({ ...one, item: makeItem(one) }));
    this.shown = [...fresh.reverse(), ...this.shown].slice(0, MOST);
    if (!this.isPaused) this.#draw();
  }

  #draw() {
    for (const one of this.shown) {
      const when = ago(this.now - one.time);
      if (one.item.firstChild.textContent !== when) one.item.firstChild.textContent = when;
    }
    if (!this.shown.length) return;
    const items = this.shown.map((one) => one.item);
    const isSame = this.list.firstChild === items[0] && this.list.childElementCount === items.length;
    // while somebody reads further down, nothing moves
    if (!isSame && this.list.scrollTop < 8) this.list.replaceChildren(...items);
  }

  async #save() {
    setText("trace-status", "The trace is being made …");
    try {
      const address = URL.createObjectURL(await getBlob("/v1/observe/trace"));
      const link = element("a");
      link.href = address;
      link.download = "quire.trace.json";
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 10000);
      setText("trace-status", "Saved as quire.trace.json.");
    } catch (error) {
      setText("trace-status", error.message);
    }
  }
}

function makeItem(one) {
  const item = element("li");
  const says = one.words[0].toUpperCase() + one.words.slice(1);
  item.append(element("span", "when"), element("span", "", `${says}.`));
  return item;
}
