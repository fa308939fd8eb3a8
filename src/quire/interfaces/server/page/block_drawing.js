// Squares of the block map: one block each, or a range of blocks.

import { CACHED, COPIED, FREE, KEPT, OWN, PINNED, SHARED, STATE } from "./block_states.js";

// own: full; shared: split corner to corner; copied: a ring around it; cached: an outline with a dot; kept: half;
// pinned: full with a hole; free: a faint outline. Nothing is said by colour alone.
export function drawBlock(pen, left, top, size, flags, colour, colours) {
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

// A range: filled as far as its blocks are held, striped as far as they are of earlier prompts; a corner is missing where
// some are shared.
export function drawRange(pen, left, top, size, { byState }, colours) {
  const number = byState.reduce((sum, one) => sum + one, 0);
  const held = byState[OWN] + byState[SHARED] + byState[KEPT] + byState[PINNED];
  const tall = Math.round((held / number) * size);
  const striped = Math.round(((held + byState[CACHED]) / number) * size);
  pen.fillStyle = colours.accent;
  pen.fillRect(left, top + size - tall, size, tall);
  pen.fillStyle = colours["strong-line"];
  for (let up = tall + 2; up < striped; up += 3) pen.fillRect(left + 1, top + size - up, size - 2, 1);
  if (byState[SHARED]) {
    pen.fillStyle = colours.well;
    pen.beginPath();
    pen.moveTo(left + size, top + size);
    pen.lineTo(left + size, top + size * 0.55);
    pen.lineTo(left + size * 0.55, top + size);
    pen.closePath();
    pen.fill();
  }
  pen.strokeStyle = held ? colours["strong-line"] : colours.line;
  pen.lineWidth = 1;
  pen.strokeRect(left + 0.5, top + 0.5, size - 1, size - 1);
}
