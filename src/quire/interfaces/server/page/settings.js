// What is asked of the model beside the conversation: the fields below the composer.

const FIELDS = { system: "system", temperature: "temperature", maxTokens: "max-tokens", tools: "tools" };
const field = (name) => document.getElementById(FIELDS[name]);

export class Settings {
  // As they are kept with a conversation.
  get() {
    return Object.fromEntries(Object.keys(FIELDS).map((name) => [name, field(name).value]));
  }

  // Those of a conversation; what it does not name stays.
  set(values) {
    for (const [name, value] of Object.entries(values)) if (name in FIELDS) field(name).value = value;
  }

  // The fields of a request. Throws what is wrong with the tools.
  asked(isChat) {
    const { temperature, maxTokens } = this.get();
    const asked = {};
    if (temperature !== "") asked.temperature = Number(temperature);
    if (Number(maxTokens) > 0) asked.max_tokens = Number(maxTokens);
    const tools = isChat ? this.#tools() : [];
    if (tools.length) asked.tools = tools;
    return asked;
  }

  get system() {
    return field("system").value.trim();
  }

  // A list of functions, with or without the frame that the API wants around each.
  #tools() {
    const text = field("tools").value.trim();
    if (!text) return [];
    let tools;
    try {
      tools = JSON.parse(text);
    } catch (error) {
      throw new Error(`The tools in the settings are no JSON: ${error.message}`);
    }
    if (!Array.isArray(tools)) throw new Error("The tools in the settings are no list: put [ and ] around them.");
    return tools.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
  }
}
