// One message of the log: who says it, what, and what can be done with it.

import { copyButton } from "./clipboard.js";
import { showImage } from "./images.js";
import { element } from "./words.js";

let number = 0;

// parts: elements; actions: buttons
export function messageOf(role, who, parts, actions) {
  const made = element("article", `message ${role}`);
  const name = element("p", "who", who);
  name.id = `who-${(number += 1)}`;
  made.setAttribute("aria-labelledby", name.id);
  const row = element("div", "actions");
  row.append(...actions);
  made.append(name, ...parts, row);
  return made;
}

export function answerMessage(answer, who, onRetry) {
  const retry = actionButton("Try again", onRetry);
  retry.classList.add("retry");
  const copy = copyButton(() => answer.message.content, "this answer");
  return messageOf("assistant", who, answer.parts, [copy, retry]);
}

export function userMessage(message, who, onEdit) {
  const text = element("div", "text", message.content);
  const images = element("div", "images");
  message.images.forEach((url, index) => images.append(showImage(url, `Image ${index + 1}`)));
  const edit = actionButton("Edit", () => openEditor(made, message, onEdit));
  const made = messageOf("user", who, message.images.length ? [images, text] : [text], [edit]);
  return made;
}

export function toolMessage(message) {
  return messageOf("user", `Result of ${message.name}`, [element("div", "text", message.content)], []);
}

function actionButton(text, onPress) {
  const button = element("button", "quiet small", text);
  button.type = "button";
  button.addEventListener("click", onPress);
  return button;
}

// Enter sends, Escape leaves all as it was.
function openEditor(made, message, onEdit) {
  const form = element("form", "editor");
  const field = element("textarea");
  field.value = message.content;
  field.rows = Math.min(12, message.content.split("\n", 12).length + 1);
  field.setAttribute("aria-label", "Your message, to be changed");
  const send = element("button", "primary small", "Send");
  const cancel = actionButton("Cancel", close);
  const row = element("div", "actions");
  row.append(send, cancel);
  form.append(field, row);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) onEdit(field.value);
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (!isSending(event)) return;
    event.preventDefault();
    form.requestSubmit();
  });
  function close() {
    form.remove();
    made.classList.remove("edited");
    made.querySelector(".actions button").focus();
  }
  made.classList.add("edited");
  made.append(form);
  field.focus();
}

export const isSending = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
