// Requests over the last half minute, a lane each: waiting, running, given way, in swap space; and who runs and waits now.

import { colourOf, scheme, surface } from "./colours.js";
import { count, element, plural, setText } from "./words.js";

const SECONDS = 30;
const LANE = 18;
const MOST_LANES = 24;
const LEFT = 8;
const AXIS = 18;

const WAITS = {
  input: () => "waits for more of its prompt",
  rows: (one) => `waits for a place in the batch: it needs ${count(one.needed)}, ${count(one.there)} can be had`,
  memory: (one) => `waits for memory: it needs ${plural(one.needed, "block")}, ${count(one.there)} can be had`,
  order: () => "waits its turn: others go first",
  turn: () => "starts in the next step that has room in its token budget",
};

export class Lanes {
  constructor() {
    this.canvas = document.getElementById("lanes");
    this.lanes = new Map();
    this.now = 0;
  }

  // Decisions as they come, oldest first.
  learn(decisions) {
    for (const one of decisions) {
      if (one.request < 0) continue;
      if (one.kind === "arrived") this.#begin(one, "waits");
      else if (one.kind === "started") this.#begin(one, "runs");
      else if (one.kind === "preempted") this.#begin(one, one.amount ? "swap" : "gave");
      else if (one.kind === "refused" || (one.kind === "ended" && one.amount === 0)) this.#end(one);
    }
  }

  forgetAll() {
    this.lanes.clear();
  }

  #begin(one, kind) {
    const spans = this.lanes.get(one.request) ?? [];
    if (spans.length) spans.at(-1).until ??= one.time;
    spans.push({ kind, from: one.time });
    this.lanes.set(one.request, spans);
  }

  #end(one) {
    const spans = this.lanes.get(one.request);
    if (spans) spans.at(-1).until ??= one.time;
  }

  at(now) {
    this.now = now;
    for (const [request, spans] of this.lanes) {
      if ((spans.at(-1).until ?? now) < now - SECONDS) this.lanes.delete(request);
    }
  }

  draw() {
    const { shown, lanes, hidden } = this.#placed();
    const height = AXIS + Math.max(lanes, 4) * LANE + 6;
    const found = surface(this.canvas, height);
    if (!found) return;
    const { pen, width } = found;
    const colours = scheme();
    const x = (time) => LEFT + (1 - (this.now - time) / SECONDS) * (width - LEFT - 8);
    this.#axis(pen, x, height, colours, width);
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "middle";
    setText("lanes-more", hidden ? `${plural(hidden, "request")} more would not fit into the picture.` : "");
    if (!shown.length) {
      pen.fillStyle = colours.soft;
      pen.textAlign = "center";
      pen.fillText("No request in the last half minute.", (LEFT + width) / 2, height / 2 - 6);
    }
    for (const { request, spans, lane } of shown) {
      const top = 6 + lane * LANE;
      for (const span of spans) {
        const from = Math.max(LEFT, x(span.from));
        const until = x(span.until ?? this.now);
        if (until < LEFT) continue;
        bar(pen, from, top, Math.max(until - from, 1.5), LANE - 4, span.kind, colourOf(request), colours);
        if (span.kind === "runs") label(pen, `${request}`, from, until, top + (LANE - 4) / 2 + 1, colours);
      }
    }
  }

  // Each goes into the first lane that is free when it arrives, as cars would.
  #placed() {
    const freeAt = [];
    const shown = [];
    let hidden = 0;
    const byArrival = [...this.lanes].sort((one, other) => one[1][0].from - other[1][0].from);
    for (const [request, spans] of byArrival) {
      const until = spans.at(-1).until ?? Infinity;
      let lane = freeAt.findIndex((time) => time <= spans[0].from);
      if (lane < 0) lane = freeAt.length;
      if (lane >= MOST_LANES) {
        hidden += 1;
        continue;
      }
      freeAt[lane] = until + 0.05;
      shown.push({ request, spans, lane });
    }
    return { shown, lanes: freeAt.length, hidden };
  }

  #axis(pen, x, height, colours, width) {
    pen.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    pen.textBaseline = "alphabetic";
    pen.textAlign = "center";
    pen.lineWidth = 1;
    const every = width < 500 ? 10 : 5;
    for (let back = 0; back < SECONDS; back += every) {
      const at = Math.round(x(this.now - back)) - 0.5;
      pen.strokeStyle = colours.line;
      pen.beginPath();
      pen.moveTo(at, 0);
      pen.lineTo(at, height - AXIS);
      pen.stroke();
      pen.fillStyle = colours.soft;
      pen.textAlign = back ? "center" : "right";
      pen.fillText(back ? `${back} s ago` : "now", at, height - 5);
    }
  }
}

// The number of a request, where its bar is wide enough for it.
function label(pen, text, from, until, middle, colours) {
  if (pen.measureText(text).width > until - from - 8) return;
  pen.fillStyle = colours.card;
  pen.textAlign = "left";
  pen.fillText(text, from + 4, middle);
}

// waits: an outline; runs: full; gave way: stripes; in swap space: dots
function bar(pen, left, top, wide, tall, kind, colour, colours) {
  if (kind === "runs") {
    pen.fillStyle = colour;
    pen.fillRect(left, top, wide, tall);
    return;
  }
  pen.save();
  pen.beginPath();
  pen.rect(left, top, wide, tall);
  pen.clip();
  pen.strokeStyle = pen.fillStyle = kind === "waits" ? colours["strong-line"] : colour;
  pen.lineWidth = 1.5;
  if (kind === "gave") {
    pen.beginPath();
    for (let at = left - tall; at < left + wide; at += 6) {
      pen.moveTo(at, top + tall);
      pen.lineTo(at + tall, top);
    }
    pen.stroke();
  }
  if (kind === "swap") {
    for (let at = left + 4; at < left + wide; at += 6) {
      for (const down of [4, 10]) {
        pen.beginPath();
        pen.arc(at, top + down, 1.4, 0, Math.PI * 2);
        pen.fill();
      }
    }
  }
  pen.lineWidth = 2;
  pen.strokeRect(left, top, wide, tall);
  pen.restore();
}

// ---- the lists beside the lanes ----

export function showLists(state) {
  const running = state.running.map((one) => {
    const sequences = one.num_sequences > 1 ? `${plural(one.num_sequences, "sequence")}, ` : "";
    const reached = `${count(Math.min(one.num_computed_tokens, one.num_tokens))} of ${plural(one.num_tokens, "token")} computed`;
    return entry(one.request, `${sequences}${reached}, ${plural(one.num_blocks, "block")}${one.is_idle ? ", waits for input" : ""}`);
  });
  const waiting = state.waiting.map((one) => {
    const past = one.has_run ? (one.is_swapped ? "in swap space; " : "gave way; ") : "";
    return entry(one.request, `${past}${(WAITS[one.waits_for] ?? WAITS.turn)(one)}`);
  });
  fill("running-list", running, state.num_running, "Nothing runs.");
  fill("waiting-list", waiting, state.num_waiting, "Nothing waits.");
}

function entry(request, says) {
  const item = element("li");
  const mark = element("span", "mark");
  mark.style.background = colourOf(request);
  mark.setAttribute("aria-hidden", "true");
  item.append(mark, element("b", "", `request ${request}`), ` ${says}`);
  return item;
}

function fill(id, items, total, otherwise) {
  const list = document.getElementById(id);
  if (!items.length) items.push(element("li", "empty", otherwise));
  else if (total > items.length) items.push(element("li", "empty", `and ${count(total - items.length)} more`));
  list.replaceChildren(...items);
}
