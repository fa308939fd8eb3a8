// The list of messages. It stays at its end while the reader is there, whatever grows or shrinks around it, and says new
// text to a screen reader a block at a time.

import { element } from "./words.js";

const NEAR = 48;
const MOST_SPOKEN = 20;

export class Log {
  constructor() {
    this.element = document.getElementById("log");
    this.spoken = document.getElementById("spoken");
    this.empty = document.getElementById("empty");
    this.isAtEnd = true;
    this.element.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      this.isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR;
    });
    // settings that open below, a keyboard on a phone
    new ResizeObserver(() => this.follow()).observe(this.element);
  }

  add(message) {
    this.empty.remove();
    this.element.append(message);
    this.isAtEnd = true;
    this.follow();
  }

  clear() {
    this.element.replaceChildren(this.empty);
    this.spoken.replaceChildren();
  }

  follow() {
    if (this.isAtEnd) this.element.scrollTop = this.element.scrollHeight;
  }

  speak(text) {
    this.spoken.append(element("p", "", text));
    while (this.spoken.childElementCount > MOST_SPOKEN) this.spoken.firstChild.remove();
  }

  setBusy(isBusy) {
    this.element.setAttribute("aria-busy", String(isBusy));
  }
}
