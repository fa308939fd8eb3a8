// The inside of a paragraph: emphasis, code, links, as elements and text nodes; never as HTML.
// Each character is looked at a bounded number of times, whatever the text is.

import { element } from "./words.js";

const SPECIAL = /[\\`*_~[<!]|https?:\/\//g;
const ESCAPED = /[!"#$%&'*+,\-./:;<=>?@\\^_`{|}~]/;
const ADDRESS = /https?:\/\/[^\s<>"`]{1,2000}/y;
const BREAK = /<br ?\/?>/iy;
const BRACKETED = /<(https?:\/\/[^\s<>]{1,2000})>/y;
// what a link may open: nothing that runs, and nothing of this machine
const SAFE = /^(?:https?:\/\/|mailto:)/i;
const LONGEST_LABEL = 500;
const LONGEST_ADDRESS = 2000;
const TAGS = { "*1": ["em"], _1: ["em"], "*2": ["strong"], _2: ["strong"], "*3": ["strong", "em"], _3: ["strong", "em"], "~2": ["del"] };

export function inline(text, hasLinks = true) {
  const parts = [];
  const closers = backtickRuns(text);
  let plain = 0;
  const put = (part, from, until) => {
    if (from > plain) parts.push(text.slice(plain, from));
    parts.push(part);
    plain = until;
  };
  SPECIAL.lastIndex = 0;
  for (let found = SPECIAL.exec(text); found; found = SPECIAL.exec(text)) {
    const at = found.index;
    const read = READERS[found[0]] ?? readAddress;
    const { part, until } = read(text, at, { closers, hasLinks }) ?? {};
    if (part) put(part, at, until);
    // a reader uses SPECIAL for the text of a link
    SPECIAL.lastIndex = until ?? at + 1;
  }
  if (plain < text.length) parts.push(text.slice(plain));
  return assembled(parts);
}

// Each says which part of the text it takes, or nothing; `until` alone: what is skipped, as text.
const READERS = {
  "\\": (text, at) => (ESCAPED.test(text[at + 1] ?? "") ? { part: text[at + 1], until: at + 2 } : null),
  "`": readCode,
  "*": readMarks,
  _: readMarks,
  "~": readMarks,
  "[": (text, at, context) => (context.hasLinks ? readLink(text, at) : null),
  // an image of the model's is named and linked, and not fetched
  "!": (text, at, context) => (context.hasLinks && text[at + 1] === "[" ? readLink(text, at + 1) : null),
  "<": readAngle,
};

// Where runs of backticks of each length begin, so that the end of a code span is found without a search.
function backtickRuns(text) {
  const runs = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, { starts: [], next: 0 });
    runs.get(run.length).starts.push(index);
  }
  return runs;
}

function endOfRun(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end;
}

function readCode(text, at, { closers }) {
  const begin = endOfRun(text, at);
  const length = begin - at;
  // none: the run begins behind a backtick that is escaped
  const same = closers.get(length) ?? { starts: [], next: 0 };
  while (same.starts[same.next] < begin) same.next += 1;
  const end = same.starts[same.next];
  if (end === undefined) return { until: begin };
  const inside = text.slice(begin, end);
  const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
  return { part: element("code", "", isPadded ? inside.slice(1, -1) : inside), until: end + length };
}

function readMarks(text, at) {
  const until = endOfRun(text, at);
  const key = text[at] + (until - at);
  if (!(key in TAGS)) return { until };
  const [before, after] = [text[at - 1] ?? " ", text[until] ?? " "];
  const isInWord = /[\p{L}\p{N}_]/u.test(before) && /[\p{L}\p{N}_]/u.test(after);
  // 2*3*4 is no emphasis, nor is a_name_of_two; words of languages without spaces may be strong
  if (isInWord && (text[at] === "_" || key === "*1")) return { until };
  const part = { key, text: text.slice(at, until), opens: /\S/.test(after), closes: /\S/.test(before) };
  return { part, until };
}

function readLink(text, at) {
  const close = text.indexOf("]", at);
  if (close < 0 || close - at > LONGEST_LABEL || text[close + 1] !== "(") return null;
  const until = endOfAddress(text, close + 2);
  if (until === null) return null;
  const address = text.slice(close + 2, until).trim().split(/\s/, 1)[0].replace(/^<|>$/g, "");
  if (!SAFE.test(address)) return null;
  return { part: link(address, inline(text.slice(at + 1, close), false)), until: until + 1 };
}

// The bracket that closes an address; it may have brackets inside.
function endOfAddress(text, at) {
  let depth = 0;
  const last = Math.min(text.length, at + LONGEST_ADDRESS);
  for (let place = at; place < last; place += 1) {
    const letter = text[place];
    if (letter === "\n") return null;
    if (letter === "(") depth += 1;
    if (letter !== ")") continue;
    if (depth === 0) return place;
    depth -= 1;
  }
  return null;
}

function readAngle(text, at, { hasLinks }) {
  BREAK.lastIndex = at;
  if (BREAK.test(text)) return { part: element("br"), until: BREAK.lastIndex };
  BRACKETED.lastIndex = at;
  const found = hasLinks ? BRACKETED.exec(text) : null;
  return found ? { part: link(found[1], found[1]), until: BRACKETED.lastIndex } : null;
}

function readAddress(text, at, { hasLinks }) {
  ADDRESS.lastIndex = at;
  const found = hasLinks ? ADDRESS.exec(text) : null;
  if (!found) return null;
  let address = found[0];
  // what ends the sentence is no part of it
  const isNoPart = (letter) => ".,;:!?*_~'\"]".includes(letter) || (letter === ")" && !address.includes("("));
  while (isNoPart(address.at(-1))) address = address.slice(0, -1);
  return { part: link(address, address), until: at + address.length };
}

function link(address, inside) {
  const made = element("a");
  made.href = address;
  made.title = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  made.append(inside);
  return made;
}

// Pairs marks of emphasis, and builds. A mark that finds no partner is text; no emphasis stands in its own kind, so that
// the tree stays flat.
function assembled(parts) {
  const open = new Map();
  const ends = new Map();
  parts.forEach((part, index) => {
    if (part.key === undefined) return;
    const start = open.get(part.key);
    if (part.closes && start !== undefined) {
      ends.set(start, index);
      // what began inside and is not closed ends here, as text
      for (const [key, begun] of open) if (begun >= start) open.delete(key);
    } else if (part.opens) {
      open.set(part.key, index);
    }
  });
  const root = document.createDocumentFragment();
  const stack = [{ node: root, end: -1 }];
  let text = "";
  const put = (...nodes) => {
    stack.at(-1).node.append(...(text ? [text] : []), ...nodes);
    text = "";
  };
  parts.forEach((part, index) => {
    if (index === stack.at(-1).end) {
      put();
      stack.pop();
    } else if (typeof part === "string") {
      text += part;
    } else if (part.key === undefined) {
      put(part);
    } else if (ends.has(index)) {
      const tags = TAGS[part.key].map((tag) => element(tag));
      tags.reduce((outer, inner) => (outer.append(inner), inner));
      put(tags[0]);
      stack.push({ node: tags.at(-1), end: ends.get(index) });
    } else {
      text += part.text;
    }
  });
  put();
  return root;
}
