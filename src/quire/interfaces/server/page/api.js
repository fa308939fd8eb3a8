// Speaks to this server, and to no other. The key lives in sessionStorage: in this tab, until it is closed.

const KEY = "quire-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers() {
  const found = { "content-type": "application/json" };
  if (key.get()) found.authorization = `Bearer ${key.get()}`;
  return found;
}

async function checked(response) {
  if (response.ok) return response;
  let [message, code] = [`The server answered ${response.status}.`, null];
  try {
    const { error } = await response.json();
    [message, code] = [error.message || message, error.code];
  } catch {
    // not an error object: the status must do
  }
  throw new ApiError(response.status, message, code);
}

async function send(path, options) {
  try {
    return await checked(await fetch(path, options));
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
}

export async function getJson(path) {
  const response = await send(path, { headers: headers(), signal: AbortSignal.timeout(15000) });
  return response.json();
}

export async function getBlob(path) {
  return (await send(path, { headers: headers() })).blob();
}

// The events of a streamed completion, one after the other.
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(500, event.error.message);
        yield event;
      }
    }
  } finally {
    // a reader that leaves early tells the server, which frees the request's memory
    reader.cancel().catch(() => {});
  }
}
