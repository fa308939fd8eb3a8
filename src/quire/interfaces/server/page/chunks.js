// Long text in pieces of bounded size, so that what is added costs the same however much is there already.

import { element } from "./words.js";

const CHUNK = 8000;

export class Chunks {
  // tag: of a piece; a block element, because a browser lays out a block at a time
  constructor(parent, tag = "span") {
    this.parent = parent;
    this.tag = tag;
    this.last = null;
  }

  add(text) {
    for (let at = 0; at < text.length; ) {
      if (!this.last || this.last.length >= CHUNK) this.#begin();
      const room = CHUNK - this.last.length;
      const end = text.length - at <= room ? text.length : endOfPiece(text, at, at + room);
      this.last.appendData(text.slice(at, end));
      if (end < text.length) this.last = null;
      at = end;
    }
  }

  #begin() {
    const piece = element(this.tag, "chunk");
    this.last = document.createTextNode("");
    piece.append(this.last);
    this.parent.append(piece);
  }
}

// A piece ends behind a line, else behind a word, else where it must; never inside a character.
export function endOfPiece(text, from, until) {
  for (const separator of ["\n", " "]) {
    const found = text.lastIndexOf(separator, until - 1);
    if (found > from + (until - from) / 2) return found + 1;
  }
  const isHighSurrogate = (text.charCodeAt(until - 1) & 0xfc00) === 0xd800;
  return isHighSurrogate && until - 1 > from ? until - 1 : until;
}
