// A button that copies. Browsers hide their clipboard from pages that came over plain HTTP from another machine: there
// the text is selected and copied as a user would do it.

import { element } from "./words.js";

async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = element("textarea", "visually-hidden");
  field.value = text;
  // inside the dialog or page that has the focus
  document.activeElement.after(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  if (!isDone) throw new Error("this browser does not let the page copy");
}

// textOf: asked when the button is pressed
export function copyButton(textOf, what) {
  const button = element("button", "quiet small", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", `Copy ${what}`);
  button.addEventListener("click", async () => {
    try {
      await copy(textOf());
      said(button, "Copied");
    } catch {
      said(button, "Not allowed");
    }
    button.focus();
  });
  return button;
}

function said(button, text) {
  button.textContent = text;
  document.getElementById("chat-status").textContent = text;
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
