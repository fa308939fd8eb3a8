// Conversations that this browser keeps: in its IndexedDB, for this server's address alone, within bounds. The oldest leave.

const NAME = "quire-history";
const MOST_CONVERSATIONS = 200;
const MOST_CHARACTERS = 20_000_000;

const done = (request) =>
  new Promise((succeeded, failed) => {
    request.addEventListener("success", () => succeeded(request.result));
    request.addEventListener("error", () => failed(request.error));
  });

const finished = (transaction) =>
  new Promise((succeeded, failed) => {
    transaction.addEventListener("complete", succeeded);
    transaction.addEventListener("error", () => failed(transaction.error));
    transaction.addEventListener("abort", () => failed(transaction.error));
  });

export class History {
  // [{ id, title, changed, size }], newest first
  async titles() {
    const { titles } = await this.#stores("readonly");
    return newestFirst(await done(titles.getAll()));
  }

  async read(id) {
    const { conversations } = await this.#stores("readonly");
    return done(conversations.get(id));
  }

  async write({ id, title, messages, settings }) {
    const size = JSON.stringify(messages).length;
    const { titles, conversations, transaction } = await this.#stores("readwrite");
    titles.put({ id, title, changed: Date.now(), size });
    conversations.put({ id, messages, settings });
    let kept = 0;
    newestFirst(await done(titles.getAll())).forEach((one, place) => {
      kept += one.size;
      if (place < MOST_CONVERSATIONS && kept <= MOST_CHARACTERS) return;
      titles.delete(one.id);
      conversations.delete(one.id);
    });
    await finished(transaction);
  }

  async remove(id) {
    const { titles, conversations, transaction } = await this.#stores("readwrite");
    titles.delete(id);
    conversations.delete(id);
    await finished(transaction);
  }

  async removeAll() {
    const { titles, conversations, transaction } = await this.#stores("readwrite");
    titles.clear();
    conversations.clear();
    await finished(transaction);
  }

  async #stores(mode) {
    this.database ??= openDatabase();
    const transaction = (await this.database).transaction(["titles", "conversations"], mode);
    return { transaction, titles: transaction.objectStore("titles"), conversations: transaction.objectStore("conversations") };
  }
}

function openDatabase() {
  const request = indexedDB.open(NAME, 1);
  request.addEventListener("upgradeneeded", () => {
    for (const store of ["titles", "conversations"]) request.result.createObjectStore(store, { keyPath: "id" });
  });
  return done(request);
}

const newestFirst = (titles) => titles.sort((one, other) => other.changed - one.changed);
