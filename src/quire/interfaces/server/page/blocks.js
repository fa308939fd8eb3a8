// The block map. A small cache is shown block by block. A large one is shown as ranges of blocks, and a range is opened on
// demand; so a picture has a bounded number of squares, and is drawn at most once a frame, however large the cache is.

import { drawBlock, drawRange } from "./block_drawing.js";
import { BlockLegend, showSwap } from "./block_legend.js";
import { NOBODY, columnsOf, countsOf, sayBlock, sayRange } from "./block_states.js";
import { colourOf, scheme, surface } from "./colours.js";
import { count, plural, setText } from "./words.js";

// more squares than this are too small to be pointed at
const MOST_SQUARES = 1024;
// a cache that is a little larger still shows each block
const MOST_WITHOUT_ZOOM = 2048;
// ranges of which one is opened are this much smaller
const ZOOM = 16;
const HELP = {
  small: "Point at a square, or use the arrow keys, to read it.",
  large: "Point at a square, or use the arrow keys, to read it; press it, or Enter, to open it, and Escape to close.",
};

export class BlockMap {
  constructor() {
    this.canvas = document.getElementById("map");
    this.line = document.getElementById("block");
    this.actions = document.getElementById("map-actions");
    this.legend = new BlockLegend();
    this.cursor = -1;
    this.view = null;
    this.frame = null;
    // what is seen: blocks from `first` on, `each` in a square; opened ranges, the outermost first
    this.first = 0;
    this.each = 1;
    this.opened = [];
    // counts of the ranges that were drawn since the last change
    this.counts = [];
    this.#listen();
  }

  // view: of /v1/observe/blocks
  show(view) {
    const isOther = view.num_blocks !== this.view?.num_blocks;
    this.view = columnsOf(view);
    if (isOther) this.#showWhole();
    setText("summary", view.summary);
    this.counts = [];
    this.legend.show(countsOf(this.view.states, 0, view.num_blocks));
    showSwap(view);
    this.#read(this.cursor);
    this.draw();
  }

  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#draw();
    });
  }

  drawLegend() {
    this.legend.draw();
  }

  // ---- what is seen ----

  get #until() {
    const most = this.opened.length ? MOST_SQUARES * this.each : Infinity;
    return Math.min(this.view.num_blocks, this.first + most);
  }

  get #squares() {
    return Math.ceil((this.#until - this.first) / this.each);
  }

  #rangeOf(square) {
    const from = this.first + square * this.each;
    return [from, Math.min(from + this.each, this.#until)];
  }

  #showWhole() {
    this.opened = [];
    this.first = 0;
    this.each = 1;
    if (this.view.num_blocks > MOST_WITHOUT_ZOOM) {
      while (this.view.num_blocks > this.each * MOST_SQUARES) this.each *= 2;
    }
    this.#moved(-1);
  }

  #zoomIn() {
    if (this.each === 1) return;
    const [block] = this.#rangeOf(Math.max(this.cursor, 0));
    this.opened.push({ first: this.first, each: this.each });
    this.each = Math.max(1, this.each / ZOOM);
    this.first = this.#windowOf(block);
    this.#moved((block - this.first) / this.each);
  }

  #zoomOut() {
    const outer = this.opened.pop();
    if (!outer) return;
    const block = this.first + Math.max(this.cursor, 0) * this.each;
    Object.assign(this, outer);
    this.#moved(Math.floor((block - this.first) / this.each));
  }

  // The neighbouring part of the cache, as closely seen.
  #turn(direction) {
    const first = this.first + direction * MOST_SQUARES * this.each;
    if (!this.opened.length || first < 0 || first >= this.view.num_blocks) return;
    this.first = first;
    this.#moved(Math.min(this.cursor, this.#squares - 1));
  }

  #windowOf(block) {
    const wide = MOST_SQUARES * this.each;
    return Math.floor(block / wide) * wide;
  }

  #moved(cursor) {
    this.counts = [];
    const isLarge = this.each > 1 || this.opened.length > 0;
    this.actions.hidden = !isLarge;
    setText("map-help", isLarge ? HELP.large : HELP.small);
    document.getElementById("zoom-in").disabled = this.each === 1;
    document.getElementById("zoom-out").disabled = !this.opened.length;
    document.getElementById("map-earlier").disabled = this.first === 0;
    document.getElementById("map-later").disabled = this.#until === this.view.num_blocks;
    if (document.activeElement?.disabled) this.canvas.focus();
    const what = this.each > 1 ? `is ${this.each} blocks` : "is a block";
    const where = this.opened.length ? `blocks ${count(this.first)} to ${count(this.#until - 1)}: ` : "";
    setText("scale", `${where}each square ${what} of the KV cache, ${plural(this.view.block_size, "token")} a block`);
    document.getElementById("range-key").hidden = this.each === 1;
    this.#read(cursor);
    this.draw();
  }

  // ---- drawing ----

  #draw() {
    const width = this.canvas.clientWidth;
    if (!this.view || !width) return;
    const squares = this.#squares;
    // as large as is useful: a small cache in large squares, a large one in small ones
    this.pitch = Math.max(5, Math.min(22, Math.floor(Math.sqrt((width * 300) / squares))));
    this.across = Math.max(1, Math.floor(width / this.pitch));
    // the rows fill the width
    this.wide = width / this.across;
    const { pen } = surface(this.canvas, Math.ceil(squares / this.across) * this.pitch);
    const colours = scheme();
    const size = this.pitch - (this.pitch > 7 ? 2 : 1);
    for (let square = 0; square < squares; square += 1) {
      const left = Math.round((square % this.across) * this.wide);
      const top = Math.floor(square / this.across) * this.pitch;
      this.#drawSquare(pen, square, left, top, size, colours);
      if (square !== this.cursor) continue;
      pen.strokeStyle = colours.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left - 1, top - 1, size + 2, size + 2);
    }
  }

  #drawSquare(pen, square, left, top, size, colours) {
    const [from, until] = this.#rangeOf(square);
    if (this.each > 1) {
      this.counts[square] ??= countsOf(this.view.states, from, until);
      drawRange(pen, left, top, size, this.counts[square], colours);
      return;
    }
    const owner = this.view.owners[from];
    const colour = owner === NOBODY ? null : colourOf(this.view.sequences[owner][0]);
    drawBlock(pen, left, top, size, this.view.states[from], colour, colours);
  }

  // ---- pointer and keys ----

  #listen() {
    const on = (id, act) => document.getElementById(id).addEventListener("click", () => this.view && act());
    on("zoom-in", () => this.#zoomIn());
    on("zoom-out", () => this.#zoomOut());
    on("map-earlier", () => this.#turn(-1));
    on("map-later", () => this.#turn(1));
    on("map", () => this.cursor >= 0 && this.#zoomIn());
    this.canvas.addEventListener("pointermove", (event) => this.#pointAt(event));
    this.canvas.addEventListener("pointerdown", (event) => this.#pointAt(event));
    this.canvas.addEventListener("pointerleave", () => this.#read(-1));
    this.canvas.addEventListener("keydown", (event) => this.view && this.#onKey(event));
  }

  #pointAt(event) {
    if (!this.across) return;
    const box = this.canvas.getBoundingClientRect();
    const across = Math.floor((event.clientX - box.left) / this.wide);
    const down = Math.floor((event.clientY - box.top) / this.pitch);
    this.#read(across < this.across ? down * this.across + across : -1);
  }

  #onKey(event) {
    const last = this.#squares - 1;
    const to = (square) => this.#read(Math.min(Math.max(square, 0), last));
    const by = (step) => to(this.cursor < 0 ? 0 : this.cursor + step);
    const keys = {
      ArrowRight: () => by(1),
      ArrowLeft: () => by(-1),
      ArrowDown: () => by(this.across),
      ArrowUp: () => by(-this.across),
      Home: () => to(0),
      End: () => to(last),
      Enter: () => this.#zoomIn(),
      Escape: () => this.#zoomOut(),
      PageUp: () => this.#turn(-1),
      PageDown: () => this.#turn(1),
    };
    if (!(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  }

  // Puts the cursor on a square and says what it is; -1: on none.
  #read(square) {
    const isThere = this.view !== null && square >= 0 && square < this.#squares;
    const cursor = isThere ? square : -1;
    const said = isThere ? this.#say(square) : "\u00a0";
    if (this.line.textContent !== said) this.line.textContent = said;
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }

  #say(square) {
    const [from, until] = this.#rangeOf(square);
    return this.each > 1 ? sayRange(this.view, from, until) : sayBlock(this.view, from);
  }
}
