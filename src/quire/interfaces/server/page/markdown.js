// Markdown as it arrives: push(text) for each piece, end() behind the last. Only what is new is read, and only the block
// that is not complete is drawn again, so an answer costs what its length costs, once. Everything becomes elements and text
// nodes; HTML in the text is text.

import { Code, Paragraph, Plain, Table, alignmentsOf, cellsOf } from "./markdown_leaves.js";
import { element } from "./words.js";

// characters that are read before the browser gets its turn
const MOST_AT_ONCE = 65536;
// a line whose beginning does not say yet what it is waits, up to this length
const MOST_HELD = 300;
const LONGEST_ROW = 4000;
const MOST_DEPTH = 8;
// what a browser lays out without trouble; behind it the text goes on unformatted
const MOST_ELEMENTS = 6000;

const UNDECIDED = /^(?:[ \t>]|[-*+] |\d{1,9}[.)] )*(?:[-*+_=~`|: ]*|#{1,6} *|\d{1,9}[.)]? ?|(?:`{3,}|~{3,})[^`]*)$/;
const FENCE = /^( *)(`{3,20}|~{3,20}) *([^`]{0,100})$/;
const HEADING = /^ {0,3}(#{1,6})(?: +|$)/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)(?:[-*+]|(\d{1,9})[.)])(?: +|$)/;

class Quote {
  static of(text) {
    const found = QUOTE.exec(text);
    return found && { taken: found[0].length, open: () => new Quote() };
  }

  attach(parent) {
    this.element = element("blockquote");
    parent.append(this.element);
  }

  // what is left of a line that goes on inside; null of one that does not
  continued(text) {
    const found = QUOTE.exec(text);
    return found ? text.slice(found[0].length) : null;
  }

  continuedCode(text) {
    return this.continued(text);
  }
}

class Item {
  static of(text) {
    const found = ITEM.exec(text);
    return found && { taken: found[0].length, number: found[2], open: () => new Item(found) };
  }

  constructor([taken, indent, number]) {
    this.content = taken.length;
    // models indent by less than the letter of the rule
    this.needed = Math.min(taken.length, indent.length + 2);
    this.number = number;
    this.kind = number === undefined ? taken.trim() : taken.trim().at(-1);
  }

  // before: the item whose place in the list it follows, if any
  attach(parent, before) {
    this.list = before?.kind === this.kind ? before.list : this.#newList(parent);
    this.element = element("li");
    this.list.append(this.element);
  }

  #newList(parent) {
    const list = element(this.number === undefined ? "ul" : "ol");
    if (this.number !== undefined && Number(this.number) !== 1) list.start = Number(this.number);
    parent.append(list);
    return list;
  }

  continued(text) {
    const indent = text.length - text.trimStart().length;
    if (indent === text.length) return "";
    return indent >= this.needed ? text.slice(Math.min(indent, this.content)) : null;
  }

  // code in an item ends with its fence, however it is indented
  continuedCode(text) {
    const indent = text.length - text.trimStart().length;
    return text.slice(Math.min(indent, this.content));
  }
}

export class Markdown {
  // isPlain: the text is not Markdown; onBlock(text): a block is complete, in words; onDrawn(): something new is seen
  constructor(root, { isPlain = false, onBlock = () => {}, onDrawn = () => {} } = {}) {
    this.root = root;
    this.onBlock = onBlock;
    this.onDrawn = onDrawn;
    this.rest = "";
    this.containers = [];
    this.leaf = isPlain ? new Plain(root) : null;
    this.isInLine = false;
    this.isPlain = isPlain;
    this.isEnded = false;
    this.numElements = 0;
    this.frame = null;
  }

  push(text) {
    this.rest += text;
    this.frame ??= requestAnimationFrame(() => this.#onFrame());
  }

  // Draws what is left. A page that nobody looks at gets no frames, so none is waited for.
  async end() {
    cancelAnimationFrame(this.frame);
    this.frame = null;
    this.isEnded = true;
    while (this.rest) {
      this.#work();
      if (this.rest) await new Promise((go) => setTimeout(go));
    }
    this.#closeLeaf();
    this.onDrawn();
  }

  #onFrame() {
    this.frame = null;
    const isMore = this.rest.length > MOST_AT_ONCE;
    this.#work();
    if (isMore) this.push("");
  }

  #work() {
    const part = this.rest.slice(0, MOST_AT_ONCE);
    const isLast = this.isEnded && part.length === this.rest.length;
    const used = this.#read(part, isLast);
    this.rest = this.rest.slice(used);
    this.leaf?.draw();
    this.onDrawn();
  }

  // Returns how many characters were taken.
  #read(text, isLast) {
    let at = 0;
    while (at < text.length) {
      const end = text.indexOf("\n", at);
      const line = end < 0 ? text.slice(at) : text.slice(at, end);
      if (this.isInLine) {
        this.leaf?.add(line);
      } else {
        if (end < 0 && !isLast && this.#mustWait(line)) return at;
        this.#startLine(line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    ")));
        this.isInLine = true;
      }
      if (end < 0) return text.length;
      this.#endLine();
      at = end + 1;
    }
    return at;
  }

  #mustWait(line) {
    if (this.isPlain) return false;
    if (this.leaf?.waitsForLine) return line.length <= LONGEST_ROW;
    return line.length <= MOST_HELD && UNDECIDED.test(line);
  }

  #endLine() {
    this.isInLine = false;
    this.leaf?.endLine();
    if (this.leaf?.isOneLine) this.#closeLeaf();
  }

  #startLine(line) {
    if (!this.isPlain && this.numElements + (this.leaf?.numElements ?? 0) > MOST_ELEMENTS) this.#goOnPlain();
    if (this.isPlain) this.leaf.begin(line);
    else if (!(this.leaf instanceof Code && this.#continueCode(line))) this.#startBlock(line);
  }

  #goOnPlain() {
    this.#leave(0);
    this.root.append(element("p", "facts", "The rest is too long to be formatted."));
    this.isPlain = true;
    this.leaf = new Plain(this.root);
  }

  #continueCode(line) {
    let text = line;
    for (const container of this.containers) {
      text = container.continuedCode(text);
      if (text === null) return false;
    }
    if (this.leaf.isClosedBy(text)) this.#closeLeaf();
    else this.leaf.begin(text);
    return true;
  }

  #startBlock(line) {
    let text = line;
    let depth = 0;
    for (; depth < this.containers.length; depth += 1) {
      const inside = this.containers[depth].continued(text);
      if (inside === null) break;
      text = inside;
    }
    if (!text.trim()) {
      this.#closeLeaf();
      return;
    }
    const isInside = depth === this.containers.length;
    const isParagraph = this.leaf instanceof Paragraph;
    const found = this.#containersOf(text, depth, isParagraph && isInside);
    text = text.slice(found.taken);
    const isText = !found.opened.length && !startsBlock(text);
    if (isParagraph && isText) {
      // a line that goes on with a paragraph belongs to it, even where it forgets the marks of what is around it
      this.#continueParagraph(text);
      return;
    }
    if (this.leaf instanceof Table && isInside && isText && text.includes("|") && text.length <= LONGEST_ROW) {
      this.leaf.begin(text);
      return;
    }
    const before = this.containers[depth];
    this.#leave(depth);
    found.opened.forEach((container, index) => this.#enter(container, index ? null : before));
    this.#startLeaf(text);
  }

  // Which quotes and items begin here; interrupts: whether they would end a paragraph.
  #containersOf(text, depth, interrupts) {
    const opened = [];
    let taken = 0;
    while (depth + opened.length < MOST_DEPTH) {
      const left = text.slice(taken);
      if (RULE.test(left)) break;
      const found = Quote.of(left) ?? Item.of(left);
      // "1986. It was a good year" inside a paragraph is no list
      if (!found || (interrupts && !opened.length && found.number !== undefined && found.number !== "1")) break;
      opened.push(found.open());
      taken += found.taken;
    }
    return { opened, taken };
  }

  #continueParagraph(text) {
    const alignments = alignmentsOf(text);
    if (alignments && cellsOf(this.leaf.lastLine).length === alignments.length && this.leaf.lastLine.includes("|")) {
      const header = cellsOf(this.leaf.giveLastLine());
      this.#closeLeaf();
      this.leaf = new Table(this.#parent, header, alignments);
    } else {
      this.leaf.begin(text);
    }
  }

  #startLeaf(text) {
    if (!text.trim()) return;
    const fence = FENCE.exec(text);
    const heading = HEADING.exec(text);
    if (RULE.test(text)) {
      this.#parent.append(element("hr"));
      this.numElements += 1;
    } else if (fence) {
      this.leaf = new Code(this.#parent, { indent: fence[1].length, fence: fence[2], info: fence[3] });
    } else {
      // the page's own headings are of the first two levels
      const level = heading && Math.min(heading[1].length + 2, 6);
      this.leaf = new Paragraph(this.#parent, heading ? `h${level}` : "p");
      this.leaf.begin(heading ? text.slice(heading[0].length) : text.trimStart());
    }
  }

  get #parent() {
    return this.containers.at(-1)?.element ?? this.root;
  }

  #enter(container, before) {
    container.attach(this.#parent, before);
    this.containers.push(container);
    this.numElements += 2;
  }

  // Closes the leaf, and the containers from this depth on.
  #leave(depth) {
    this.#closeLeaf();
    this.containers.length = depth;
  }

  #closeLeaf() {
    const leaf = this.leaf;
    if (!leaf) return;
    this.leaf = null;
    leaf.close();
    this.numElements += leaf.numElements;
    const spoken = leaf.spoken().trim();
    if (spoken) this.onBlock(spoken);
  }
}

const startsBlock = (text) => FENCE.test(text) || HEADING.test(text) || RULE.test(text);
