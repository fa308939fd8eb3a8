// The block map: a square for each block of the KV cache, coloured by its sequence, with a pattern for its state.

import { colourOf, scheme, surface } from "./colours.js";
import { count, element, plural, setText } from "./words.js";

const NAMES = ["free", "cached", "own", "shared", "kept", "pinned"];
const [FREE, CACHED, OWN, SHARED, KEPT, PINNED] = NAMES.keys();
const STATE = 0x0f;
const NOT_FULL = 0x40;
const COPIED = 0x80;
const NOBODY = 0xffff;
// more squares than this say nothing; then one stands for several blocks
const MOST_SQUARES = 8192;
// of the blocks behind one square, the one that is shown
const RANK = [0, 1, 3, 5, 2, 4];
const LEGEND = [
  [OWN, "of one sequence, in its colour"],
  [SHARED, "shared by several"],
  [OWN | COPIED, "just copied, because one of them writes"],
  [CACHED, "of an earlier prompt, kept for reuse"],
  [KEPT, "of an open session"],
  [PINNED, "pinned, never given away"],
  [FREE, "free"],
];

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

export class BlockMap {
  constructor() {
    this.canvas = document.getElementById("map");
    this.line = document.getElementById("block");
    this.cursor = -1;
    this.view = null;
    this.#makeLegend();
    this.canvas.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#pointAt(event));
    this.canvas.addEventListener("pointerleave", () => this.#read(-1));
    this.canvas.addEventListener("blur", () => this.#read(-1));
    this.canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  show(view) {
    const owners = bytes(view.owners);
    this.view = {
      ...view,
      states: bytes(view.states),
      owners: new Uint16Array(owners.buffer),
      holders: bytes(view.num_holders),
    };
    setText("summary", view.summary);
    NAMES.forEach((name) => {
      const found = this.counts[name];
      if (found) found.textContent = count(view.counts_by_state[name]);
    });
    const copied = this.view.states.reduce((sum, state) => sum + (state & COPIED ? 1 : 0), 0);
    this.counts.copied.textContent = count(copied);
    this.#showSwap(view);
    this.draw();
    if (this.cursor >= 0) this.#read(this.cursor);
  }

  draw() {
    if (!this.view) return;
    const width = this.canvas.clientWidth;
    if (!width) return;
    const total = this.view.num_blocks;
    this.each = Math.ceil(total / MOST_SQUARES);
    const squares = Math.ceil(total / this.each);
    // as large as is useful: a small cache in large squares, a large one in small ones
    const wanted = Math.floor(Math.sqrt((width * 300) / squares));
    this.pitch = Math.max(5, Math.min(22, wanted));
    this.across = Math.max(1, Math.floor(width / this.pitch));
    // the rows fill the width
    this.wide = width / this.across;
    const height = Math.ceil(squares / this.across) * this.pitch;
    const { pen } = surface(this.canvas, height);
    const colours = scheme();
    const size = this.pitch - (this.pitch > 7 ? 2 : 1);
    for (let square = 0; square < squares; square += 1) {
      const block = this.#blockOf(square);
      const left = Math.round((square % this.across) * this.wide);
      const top = Math.floor(square / this.across) * this.pitch;
      drawBlock(pen, left, top, size, this.view.states[block], this.#colour(block), colours);
      if (square === this.cursor) {
        pen.strokeStyle = colours.ink;
        pen.lineWidth = 2;
        pen.strokeRect(left - 1, top - 1, size + 2, size + 2);
      }
    }
    const many = this.each > 1 ? `each square is ${this.each} blocks of the KV cache` : "each square is a block of the KV cache";
    setText("scale", `${many}, ${plural(this.view.block_size, "token")} a block`);
  }

  // Of the blocks behind a square, the one that says most.
  #blockOf(square) {
    const first = square * this.each;
    let best = first;
    const end = Math.min(first + this.each, this.view.num_blocks);
    for (let block = first + 1; block < end; block += 1) {
      if (RANK[this.view.states[block] & STATE] > RANK[this.view.states[best] & STATE]) best = block;
    }
    return best;
  }

  #colour(block) {
    const owner = this.view.owners[block];
    return owner === NOBODY ? null : colourOf(this.view.sequences[owner][0]);
  }

  #pointAt(event) {
    if (!this.view) return;
    const box = this.canvas.getBoundingClientRect();
    const across = Math.floor((event.clientX - box.left) / this.wide);
    const down = Math.floor((event.clientY - box.top) / this.pitch);
    this.#read(across < this.across ? down * this.across + across : -1);
  }

  #onKey(event) {
    if (!this.view) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.across, ArrowUp: -this.across };
    const squares = Math.ceil(this.view.num_blocks / this.each);
    let next = null;
    if (event.key in steps) next = this.cursor < 0 ? 0 : this.cursor + steps[event.key];
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = squares - 1;
    if (next === null) return;
    event.preventDefault();
    this.#read(Math.min(Math.max(next, 0), squares - 1));
  }

  #read(square) {
    const isThere = this.view && square >= 0 && square * this.each < this.view.num_blocks;
    const changed = this.cursor !== (isThere ? square : -1);
    this.cursor = isThere ? square : -1;
    const said = isThere ? this.#sayBlock(this.#blockOf(square)) : "\u00a0";
    if (this.line.textContent !== said) this.line.textContent = said;
    if (changed) this.draw();
  }

  #sayBlock(block) {
    const state = this.view.states[block];
    const owner = this.view.owners[block];
    const request = owner === NOBODY ? "" : `request ${this.view.sequences[owner][0]}`;
    const sharers = this.view.holders[block];
    const says = {
      [FREE]: "free",
      [CACHED]: "of an earlier prompt, kept for reuse",
      [OWN]: `held by ${request}`,
      [SHARED]: `shared by ${sharers >= 255 ? "255 or more" : sharers}, ${request} among them`,
      [KEPT]: "of an open session",
      [PINNED]: sharers > 1 ? `pinned, and in use by ${sharers - 1}` : "pinned",
    }[state & STATE];
    const notes = (state & COPIED ? "; copied a moment ago" : "") + (state & NOT_FULL ? "; not full yet" : "");
    return `Block ${count(block)}: ${says}${notes}.`;
  }

  #makeLegend() {
    const list = document.getElementById("legend");
    this.counts = {};
    this.samples = LEGEND.map(([state, says]) => {
      const item = element("li");
      const sample = element("canvas");
      sample.setAttribute("aria-hidden", "true");
      const number = element("b", "", "0");
      item.append(sample, number, ` ${says}`);
      list.append(item);
      this.counts[state & COPIED ? "copied" : NAMES[state]] = number;
      return { sample, state };
    });
    this.drawLegend();
  }

  drawLegend() {
    const colours = scheme();
    for (const { sample, state } of this.samples) {
      const found = surface(sample);
      const owned = [OWN, SHARED].includes(state & STATE);
      if (found) drawBlock(found.pen, 1, 1, 14, state, owned ? colourOf(0) : null, colours);
    }
  }

  #showSwap(view) {
    document.getElementById("swap").hidden = !view.num_host_blocks_used;
    if (!view.num_host_blocks_used) return;
    const who = view.swapped.map(([request, blocks]) => `request ${request} (${plural(blocks, "block")})`).join(", ");
    setText("swap-text", `${count(view.num_host_blocks_used)} of ${plural(view.num_host_blocks, "block")} in use: ${who}.`);
    const found = surface(document.getElementById("swap-map"));
    if (!found) return;
    const { pen, width, height } = found;
    const colours = scheme();
    let left = 0;
    for (const [request, blocks] of view.swapped) {
      const wide = Math.max(2, (blocks / view.num_host_blocks) * width);
      pen.fillStyle = colourOf(request);
      pen.fillRect(left, 0, wide - 1, height);
      left += wide;
    }
    pen.strokeStyle = colours["strong-line"];
    pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  }
}

// own: full; shared: split corner to corner; copied: a ring around it; cached: an outline with a dot; kept: half;
// pinned: full with a hole; free: a faint outline. Nothing is said by colour alone.
function drawBlock(pen, left, top, size, flags, colour, colours) {
  const state = flags & STATE;
  const soft = colours["strong-line"];
  if (state === FREE || state === CACHED) {
    pen.strokeStyle = state === FREE ? colours.line : soft;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
    if (state === CACHED) {
      pen.fillStyle = soft;
      const dot = Math.max(1.5, size / 3);
      pen.fillRect(left + (size - dot) / 2, top + (size - dot) / 2, dot, dot);
    }
    return;
  }
  pen.fillStyle = colour ?? soft;
  if (state === KEPT) {
    pen.fillRect(left, top + size / 2, size, size / 2);
    pen.strokeStyle = soft;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
    return;
  }
  pen.fillRect(left, top, size, size);
  if (state === SHARED) {
    pen.fillStyle = colours.well;
    pen.beginPath();
    pen.moveTo(left + size, top);
    pen.lineTo(left + size, top + size * 0.62);
    pen.lineTo(left + size * 0.38, top);
    pen.closePath();
    pen.fill();
    pen.strokeStyle = colour ?? soft;
    pen.lineWidth = 1;
    pen.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
  }
  if (state === PINNED) {
    pen.fillStyle = colours.well;
    const hole = Math.max(2, size / 2.6);
    pen.fillRect(left + (size - hole) / 2, top + (size - hole) / 2, hole, hole);
  }
  if (flags & COPIED) {
    pen.strokeStyle = colours.ink;
    pen.lineWidth = Math.max(1, size / 6);
    pen.strokeRect(left + pen.lineWidth / 2, top + pen.lineWidth / 2, size - pen.lineWidth, size - pen.lineWidth);
  }
}
