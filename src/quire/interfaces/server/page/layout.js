// Whether the chat stands beside the engine's sections or takes the whole width above them; this browser remembers it.

const WIDTH = "quire-chat-width";
const button = document.getElementById("widen");

function show(isWide) {
  document.querySelector("main").dataset.chat = isWide ? "wide" : "beside";
  button.setAttribute("aria-pressed", String(isWide));
}

export function offerWideChat() {
  show(localStorage.getItem(WIDTH) === "wide");
  button.addEventListener("click", () => {
    const isWide = button.getAttribute("aria-pressed") !== "true";
    if (isWide) localStorage.setItem(WIDTH, "wide");
    else localStorage.removeItem(WIDTH);
    show(isWide);
  });
}
