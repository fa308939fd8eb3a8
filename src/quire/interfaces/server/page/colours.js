// Colours: those of the style sheet, and one for each request. Every state has a pattern as well (blocks.js, lanes.js).

const dark = matchMedia("(prefers-color-scheme: dark)");
export const onSchemeChange = (then) => dark.addEventListener("change", then);

export function scheme() {
  const styles = getComputedStyle(document.documentElement);
  const names = ["paper", "card", "ink", "soft", "line", "strong-line", "accent", "well", "good", "warn", "bad"];
  return Object.fromEntries(names.map((name) => [name, styles.getPropertyValue(`--${name}`).trim()]));
}

// Neighbouring numbers get hues that lie far apart; numbers that share a hue differ in lightness.
export function colourOf(request) {
  const hue = (request * 137.508 + 215) % 360;
  const shift = ((request >> 3) % 3) * 6 - 6;
  return dark.matches ? `hsl(${hue} 58% ${64 + shift}%)` : `hsl(${hue} 60% ${44 + shift}%)`;
}

// A canvas of the size that it has on the page, sharp on every screen; null while it is not shown.
export function surface(canvas, height) {
  const width = canvas.clientWidth;
  if (!width) return null;
  const tall = height ?? canvas.clientHeight;
  const ratio = window.devicePixelRatio || 1;
  if (height !== undefined) canvas.style.height = `${height}px`;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, tall);
  return { pen, width, height: tall };
}
