// The states of blocks as the server tells them (ObservedBlocks): a byte each, with two flags. Counts and words.

import { count, plural } from "./words.js";

export const NAMES = ["free", "cached", "own", "shared", "kept", "pinned"];
export const [FREE, CACHED, OWN, SHARED, KEPT, PINNED] = NAMES.keys();
export const STATE = 0x0f;
export const NOT_FULL = 0x40;
export const COPIED = 0x80;
export const NOBODY = 0xffff;

const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

export const columnsOf = (view) => ({
  ...view,
  states: bytes(view.states),
  owners: new Uint16Array(bytes(view.owners).buffer),
  holders: bytes(view.num_holders),
});

// How many blocks of this range are in each state, and how many were just copied.
export function countsOf(states, from, until) {
  const found = { byState: new Uint32Array(NAMES.length), copied: 0 };
  for (let block = from; block < until; block += 1) {
    found.byState[states[block] & STATE] += 1;
    if (states[block] & COPIED) found.copied += 1;
  }
  return found;
}

export function sayBlock(view, block) {
  const state = view.states[block];
  const owner = view.owners[block];
  const request = owner === NOBODY ? "" : `request ${view.sequences[owner][0]}`;
  const sharers = view.holders[block];
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

export function sayRange(view, from, until) {
  const { byState, copied } = countsOf(view.states, from, until);
  const parts = [
    [byState[OWN], "of one sequence"],
    [byState[SHARED], "shared by several"],
    [byState[PINNED], "pinned"],
    [byState[KEPT], "of open sessions"],
    [byState[CACHED], "of earlier prompts"],
    [byState[FREE], "free"],
    [copied, "just copied"],
  ];
  const says = parts.filter(([number]) => number).map(([number, what]) => `${count(number)} ${what}`);
  return `${plural(until - from, "block")} from ${count(from)} on: ${says.join(", ")}.`;
}
