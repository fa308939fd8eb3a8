// What the squares mean, with how many blocks are in each state; and the bar of the swap space.

import { drawBlock } from "./block_drawing.js";
import { CACHED, COPIED, FREE, KEPT, NAMES, OWN, PINNED, SHARED, STATE } from "./block_states.js";
import { colourOf, scheme, surface } from "./colours.js";
import { count, element, plural, setText } from "./words.js";

const MEANINGS = [
  [OWN, "of one sequence, in its colour"],
  [SHARED, "shared by several"],
  [OWN | COPIED, "just copied, because one of them writes"],
  [CACHED, "of an earlier prompt, kept for reuse"],
  [KEPT, "of an open session"],
  [PINNED, "pinned, never given away"],
  [FREE, "free"],
];

export class BlockLegend {
  constructor() {
    const list = document.getElementById("legend");
    this.numbers = {};
    this.samples = MEANINGS.map(([state, says]) => {
      const item = element("li");
      const sample = element("canvas");
      sample.setAttribute("aria-hidden", "true");
      const number = element("b", "", "0");
      item.append(sample, number, ` ${says}`);
      list.append(item);
      this.numbers[state & COPIED ? "copied" : NAMES[state]] = number;
      return { sample, state };
    });
    this.draw();
  }

  show({ byState, copied }) {
    NAMES.forEach((name, state) => (this.numbers[name].textContent = count(byState[state])));
    this.numbers.copied.textContent = count(copied);
  }

  draw() {
    const colours = scheme();
    for (const { sample, state } of this.samples) {
      const found = surface(sample);
      const isOwned = [OWN, SHARED].includes(state & STATE);
      if (found) drawBlock(found.pen, 1, 1, 14, state, isOwned ? colourOf(0) : null, colours);
    }
  }
}

export function showSwap(view) {
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
