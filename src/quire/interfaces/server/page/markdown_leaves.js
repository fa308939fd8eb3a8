// What a line of Markdown can belong to: a paragraph or heading, code, a table. All have the same hooks: begin(text) and
// add(text) for the start of a line and what follows, endLine(), draw(), close(), spoken(). `waitsForLine`: its lines are
// read whole, and nothing follows. Drawing costs what is new, and one piece of bounded length.

import { Chunks, endOfPiece } from "./chunks.js";
import { copyButton } from "./clipboard.js";
import { inline } from "./markdown_inline.js";
import { element, plural } from "./words.js";

// a longer paragraph goes on in a second one
const LONGEST = 8000;
const MOST_SPOKEN = 1000;
const MOST_COLUMNS = 64;

export class Paragraph {
  constructor(parent, tag = "p") {
    this.parent = parent;
    this.tag = tag;
    this.isOneLine = tag !== "p";
    this.waitsForLine = false;
    this.numElements = 0;
    this.start = "";
    this.#begin();
  }

  begin(text) {
    this.add(text);
  }

  // Its last line, which turned out to be the head of a table.
  giveLastLine() {
    const text = this.text.trimEnd();
    const start = text.lastIndexOf("\n") + 1;
    this.text = text.slice(0, start);
    this.isDrawn = false;
    if (!this.text) this.element.remove();
    return text.slice(start);
  }

  get lastLine() {
    const text = this.text.trimEnd();
    return text.slice(text.lastIndexOf("\n") + 1);
  }

  add(text) {
    for (let at = 0; at < text.length; ) {
      this.text += text.slice(at, at + LONGEST);
      at += LONGEST;
      while (this.text.length > LONGEST) this.#cut();
    }
    this.isDrawn = false;
  }

  endLine() {
    this.add("\n");
  }

  draw() {
    if (this.isDrawn) return;
    this.element.replaceChildren(inline(this.text.trim()));
    this.isDrawn = true;
  }

  close() {
    this.draw();
    this.#count();
  }

  spoken() {
    return (this.start || this.element.textContent).slice(0, MOST_SPOKEN);
  }

  #cut() {
    const end = endOfPiece(this.text, 0, LONGEST);
    const rest = this.text.slice(end);
    this.element.replaceChildren(inline(this.text.slice(0, end).trimEnd()));
    this.#count();
    this.start ||= this.element.textContent;
    this.#begin();
    this.text = rest;
  }

  #begin() {
    this.element = element(this.tag);
    this.parent.append(this.element);
    this.text = "";
    this.isDrawn = true;
  }

  #count() {
    this.numElements += 1 + this.element.getElementsByTagName("*").length;
  }
}

export class Code {
  // indent: spaces that the fence stood behind, and that its lines lose
  constructor(parent, { fence, info, indent }) {
    this.waitsForLine = false;
    this.numElements = 6;
    this.closing = new RegExp(`^ *\\${fence[0]}{${fence.length},} *$`);
    this.language = info.trim().split(/\s/, 1)[0].slice(0, 30);
    this.indent = new RegExp(`^ {0,${indent}}`);
    this.numLines = 0;
    const frame = element("div", "code");
    const head = element("div", "code-head");
    const code = element("code");
    const body = element("pre");
    body.tabIndex = 0;
    body.setAttribute("role", "group");
    body.setAttribute("aria-label", this.language ? `Code in ${this.language}` : "Code");
    head.append(element("span", "", this.language || "code"), copyButton(() => code.textContent, "this code"));
    body.append(code);
    frame.append(head, body);
    parent.append(frame);
    this.chunks = new Chunks(code);
  }

  isClosedBy(line) {
    return this.closing.test(line);
  }

  begin(line) {
    if (this.numLines) this.chunks.add("\n");
    this.numLines += 1;
    this.add(line.replace(this.indent, ""));
  }

  add(text) {
    this.chunks.add(text);
  }

  endLine() {}

  draw() {}

  close() {}

  spoken() {
    return `Code${this.language ? ` in ${this.language}` : ""}, ${plural(this.numLines, "line")}.`;
  }
}

export class Table {
  constructor(parent, header, alignments) {
    this.waitsForLine = true;
    this.numElements = 4;
    this.alignments = alignments;
    const frame = element("div", "table");
    frame.tabIndex = 0;
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "Table");
    const table = element("table");
    const head = element("thead");
    this.body = element("tbody");
    table.append(head, this.body);
    frame.append(table);
    parent.append(frame);
    this.header = header;
    this.numRows = 0;
    this.#row(head, "th", header);
  }

  begin(line) {
    this.#row(this.body, "td", cellsOf(line));
    this.numRows += 1;
  }

  endLine() {}

  draw() {}

  close() {}

  spoken() {
    return `Table of ${this.header.join(", ")}; ${plural(this.numRows, "row")}.`.slice(0, MOST_SPOKEN);
  }

  #row(parent, tag, cells) {
    const row = element("tr");
    this.alignments.forEach((alignment, index) => {
      const cell = element(tag, alignment);
      cell.append(inline(cells[index] ?? ""));
      if (tag === "th") cell.scope = "col";
      row.append(cell);
    });
    this.numElements += 1 + row.getElementsByTagName("*").length;
    parent.append(row);
  }
}

export function cellsOf(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  const cells = [""];
  for (let at = 0; at < inside.length; at += 1) {
    if (inside[at] === "|") cells.push("");
    else if (inside[at] === "\\" && inside[at + 1] === "|") cells[cells.length - 1] += inside[(at += 1)];
    else cells[cells.length - 1] += inside[at];
  }
  return cells.map((cell) => cell.trim());
}

// The line below a table's head: where each column's text stands; null of any other line.
export function alignmentsOf(line) {
  if (!line.includes("|") || !line.includes("-")) return null;
  const cells = cellsOf(line);
  if (cells.length > MOST_COLUMNS || !cells.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return cells.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
}

// Text as it came: of a model without a chat template, and behind the bounds of what is formatted.
export class Plain {
  constructor(parent) {
    this.waitsForLine = false;
    const frame = element("div", "plain");
    parent.append(frame);
    this.chunks = new Chunks(frame, "div");
    this.numElements = 0;
  }

  begin(text) {
    this.chunks.add(text);
  }

  add(text) {
    this.chunks.add(text);
  }

  endLine() {
    this.chunks.add("\n");
  }

  draw() {}

  close() {}

  spoken() {
    return this.chunks.parent.textContent.slice(0, MOST_SPOKEN);
  }
}
