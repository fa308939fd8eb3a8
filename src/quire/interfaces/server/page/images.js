// Images of a message: chosen, pasted or dropped; shown on canvases, so that the page needs no address to load them from.

import { element, plural, setText } from "./words.js";

const TYPES = ["image/png", "image/jpeg", "image/webp"];
const MOST_IMAGES = 8;
// what is larger is drawn anew: all images of a conversation are sent with each question
const MOST_BYTES = 1_000_000;
const LONGEST_SIDE = 1600;
const SHOWN = 480;

export class Attachments {
  constructor() {
    this.list = document.getElementById("attached");
    this.button = document.getElementById("attach");
    this.files = document.getElementById("image-files");
    this.urls = [];
    this.isOffered = false;
    this.button.addEventListener("click", () => this.files.click());
    this.files.addEventListener("change", () => {
      this.#take([...this.files.files]);
      this.files.value = "";
    });
    document.getElementById("prompt").addEventListener("paste", (event) => this.#arrive(event, event.clipboardData));
    const composer = document.getElementById("composer");
    composer.addEventListener("dragover", (event) => this.isOffered && event.preventDefault());
    composer.addEventListener("drop", (event) => this.#arrive(event, event.dataTransfer));
  }

  offer(isOffered) {
    this.isOffered = isOffered;
    this.button.hidden = !isOffered;
  }

  // The images as data URLs; the composer has none any more.
  giveAll() {
    const given = this.urls;
    this.urls = [];
    this.#draw();
    return given;
  }

  #arrive(event, transfer) {
    const images = [...transfer.files].filter((file) => file.type.startsWith("image/"));
    if (!images.length || !this.isOffered) return;
    event.preventDefault();
    this.#take(images);
  }

  async #take(files) {
    for (const file of files) {
      if (this.urls.length >= MOST_IMAGES) {
        setText("chat-status", `A message has at most ${plural(MOST_IMAGES, "image")}.`);
        break;
      }
      try {
        this.urls.push(await urlOf(file));
        setText("chat-status", `${file.name} is attached.`);
      } catch {
        setText("composer-error", `${file.name} is no image that this browser reads.`);
      }
    }
    this.#draw();
  }

  #draw() {
    this.list.hidden = !this.urls.length;
    this.list.replaceChildren(
      ...this.urls.map((url, index) => {
        const item = element("li");
        const remove = element("button", "quiet small", "Remove");
        remove.type = "button";
        remove.setAttribute("aria-label", `Remove image ${index + 1}`);
        remove.addEventListener("click", () => {
          this.urls.splice(index, 1);
          this.#draw();
          this.button.focus();
        });
        item.append(showImage(url, `Image ${index + 1}`), remove);
        return item;
      }),
    );
  }
}

async function urlOf(file) {
  const bitmap = await createImageBitmap(file);
  const isSmall = file.size <= MOST_BYTES && Math.max(bitmap.width, bitmap.height) <= LONGEST_SIDE;
  if (isSmall && TYPES.includes(file.type)) return asUrl(file);
  const canvas = drawn(element("canvas"), bitmap, LONGEST_SIDE, "white");
  return canvas.toDataURL("image/jpeg", 0.9);
}

function asUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(reader.error));
    reader.readAsDataURL(file);
  });
}

function drawn(canvas, bitmap, longest, paper) {
  const scale = Math.min(1, longest / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const pen = canvas.getContext("2d");
  if (paper) {
    pen.fillStyle = paper;
    pen.fillRect(0, 0, canvas.width, canvas.height);
  }
  pen.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas;
}

// A canvas that shows the image once it is read.
export function showImage(url, name) {
  const canvas = element("canvas", "picture");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", name);
  const [head, content] = url.split(",", 2);
  const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
  const type = head.slice("data:".length).split(";", 1)[0];
  createImageBitmap(new Blob([bytes], { type })).then(
    (bitmap) => drawn(canvas, bitmap, SHOWN),
    () => canvas.setAttribute("aria-label", `${name}, which cannot be shown`),
  );
  return canvas;
}
