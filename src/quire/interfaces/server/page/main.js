// Starts the page: asks the server once a second what it does, and gives each section its part.

import { ApiError, getJson, key } from "./api.js";
import { BlockMap } from "./blocks.js";
import { Chat } from "./chat.js";
import { onSchemeChange } from "./colours.js";
import { Decisions } from "./decisions.js";
import { HistoryList } from "./history_list.js";
import { Lanes, showLists } from "./lanes.js";
import { offerWideChat } from "./layout.js";
import { Load } from "./load.js";
import { setText } from "./words.js";

const EVERY = 1000;
// a server that does not answer is asked less often
const LATER = 3000;

const load = new Load();
const map = new BlockMap();
const lanes = new Lanes();
const decisions = new Decisions();
const past = new HistoryList();
const chat = new Chat(askForKey, (conversation) => past.keep(conversation));
const dialog = document.getElementById("key-dialog");
// what only the administrator may see, on a server of several tenants
const withheld = ["load", "memory", "requests", "decisions"];
let [next, epoch, timer, isWithheld] = [0, 0, null, false];

function say(state, text) {
  document.getElementById("status").dataset.state = state;
  setText("status-text", text);
}

async function look() {
  if (isWithheld) {
    const [model] = (await getJson("/v1/models")).data;
    introduce({ name: model.id, ...model });
    say("ready", "Ready");
    return;
  }
  const [state, blocks, told] = await Promise.all([
    getJson("/v1/observe/state"),
    getJson("/v1/observe/blocks"),
    getJson(`/v1/observe/decisions?since=${next}`),
  ]);
  say("ready", state.num_running || state.num_waiting ? "Working" : "Ready");
  introduce(state.model);
  load.show(state);
  map.show(blocks);
  learn(told, state.is_recorded);
  showLists(state);
}

function introduce(model) {
  setText("model", model.name);
  document.title = `Quire · ${model.name}`;
  chat.adapt(model);
}

// Says what this key may not see, in the place of the empty sections; or shows them again.
function withhold(reason) {
  isWithheld = reason !== null;
  setText("withheld-reason", reason ?? "");
  document.getElementById("withheld").hidden = !isWithheld;
  document.getElementById("sections").hidden = isWithheld;
  for (const id of withheld) document.getElementById(id).hidden = isWithheld;
  if (isWithheld) document.getElementById("change-key").hidden = false;
}

function learn(told, isRecorded) {
  let fresh = told.decisions;
  if (told.epoch !== epoch) {
    // another engine, whose numbers begin anew
    lanes.forgetAll();
    decisions.forgetAll();
  } else {
    fresh = fresh.filter((one) => one.number >= next);
  }
  [next, epoch] = [told.next, told.epoch];
  lanes.learn(fresh);
  lanes.at(told.now);
  lanes.draw();
  decisions.show(fresh, told.now);
  if (!isRecorded) setText("trace-status", "Nothing is recorded: the server was started with recorder_bytes=0.");
}

async function tick() {
  let pause = EVERY;
  try {
    if (!dialog.open) await look();
  } catch (error) {
    const wasWithheld = isWithheld;
    explain(error);
    // what is left to ask for is asked for at once
    pause = isWithheld && !wasWithheld ? 0 : LATER;
  }
  timer = document.hidden ? null : setTimeout(tick, pause);
}

function explain(error) {
  if (!(error instanceof ApiError)) {
    say("away", "This page has a fault; its console says more");
    console.error(error);
  } else if (error.code === "administrators_only") {
    withhold(error.message);
  } else if (error.status === 401) {
    say("away", "An API key is needed");
    askForKey(key.get() ? error.message : "");
  } else if (error.status === 503) {
    say("connecting", /loading/.test(error.message) ? "The model is loading" : error.message);
  } else {
    say("away", error.status ? error.message : "The server cannot be reached");
  }
}

// ---- the key ----

function askForKey(message) {
  document.getElementById("change-key").hidden = false;
  setText("key-error", message);
  if (!dialog.open) dialog.showModal();
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = document.getElementById("key");
  key.set(field.value.trim());
  field.value = "";
  withhold(null);
  dialog.close();
});
document.getElementById("key-forget").addEventListener("click", () => {
  key.forget();
  withhold(null);
  dialog.close();
});
document.getElementById("change-key").addEventListener("click", () => askForKey(""));
dialog.addEventListener("close", again);

// ---- when to look ----

function again() {
  clearTimeout(timer);
  timer = setTimeout(tick, 0);
}

function draw() {
  load.draw();
  map.draw();
  map.drawLegend();
  lanes.draw();
}

document.addEventListener("visibilitychange", () => {
  // nobody looks: nothing is asked
  if (!document.hidden && timer === null) again();
});
new ResizeObserver(draw).observe(document.querySelector("main"));
onSchemeChange(draw);
offerWideChat();
past.resume(chat);
if (key.get()) document.getElementById("change-key").hidden = false;
tick();
