// Numbers and small things in words.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const count = (value) => whole.format(value);
// three digits at most say what matters; what is nearly nothing is nothing
export const figure = (value) => (value >= 1000 ? whole.format(value) : value < 0.05 ? "0" : short.format(value));
export const milliseconds = (seconds) => figure(seconds * 1000);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function ago(seconds) {
  if (seconds < 10) return `${Math.max(seconds, 0).toFixed(1)} s ago`;
  if (seconds < 100) return `${Math.floor(seconds)} s ago`;
  if (seconds < 6000) return `${Math.floor(seconds / 60)} min ago`;
  return `${Math.floor(seconds / 3600)} h ago`;
}

// An element with a text; never any HTML.
export function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function setText(id, text) {
  const found = document.getElementById(id);
  if (found.textContent !== text) found.textContent = text;
}
