// The playground: a prompt or a conversation, one or two runs of it, and what came of each pass.

import { Problem, apiKey, get, keepKey, stream, watchHealth } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Inspector } from "./inspector.js";
import { copyFrom, snippet } from "./snippets.js";
import { draftState } from "./states.js";
import { Transcript } from "./transcript.js";
import { FEW_DRAFTS, LoadWatch, compare, equalityOf } from "./verdict.js";

const MAX_SEED = 2 ** 32;
const LOAD_SECONDS = 0.25; // between looks at how busy the server is while a run goes
const at = (id) => document.getElementById(id);

const ui = {
  form: at("form"), run: at("run"), stop: at("stop"), error: at("error"), panels: at("panels"), prompt: at("prompt"),
  verdict: at("verdict"), title: at("verdict_title"), detail: at("verdict_detail"),
};

let server = null; // what is served, once it has said so
let running = null; // AbortController of the run under way
let transcripts = [];
let turns = []; // of the conversation so far: {role, content}
const written = { text: "", chat: "" }; // in the prompt, of the kind that is not shown
const seen = new Set(); // prompts and seeds that have run
const isChat = () => ui.form.elements.kind.value === "chat";
const inspector = new Inspector();

// ---- what is served

async function introduce() {
  try {
    const [model, settings] = await Promise.all([get("/get_model_info"), get("/get_server_info")]);
    server = { ...settings, chat: model.has_chat_template };
  } catch (problem) {
    if (problem.status === 401) at("key_field").hidden = false;
    setTimeout(introduce, 1000);
    return;
  }
  const how = server.speculative_algorithm === "NONE" ? "no drafts" : `${server.speculative_algorithm} drafts`;
  at("model").textContent = `${server.served_model_name} · ${how} · ${server.dtype} · ${server.device}`;
  at("kind_field").hidden = !server.chat;
  at("max_tokens").max = server.context_length;
  const limit = server.speculative_num_draft_tokens - 1;
  at("draft_tokens").max = Math.max(limit, 1);
  at("draft_tokens").disabled = limit < 1;
  at("draft_tokens").placeholder = limit < 1 ? "none" : `up to ${limit}`;
  at("equality").textContent = equalityOf(server);
  at("equality").hidden = !equalityOf(server);
  showCode();
}

// ---- running

function bodyOf(enabled) {
  const number = (id) => at(id).valueAsNumber;
  const speculation = { enabled };
  if (enabled && !Number.isNaN(number("draft_tokens"))) speculation.num_draft_tokens = number("draft_tokens") + 1;
  const body = {
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stream: true,
    return_provenance: true,
    speculation,
  };
  const prompt = ui.prompt.value;
  if (!isChat()) return ["/v1/completions", { prompt, ...body }];
  return ["/v1/chat/completions", { messages: [...turns, { role: "user", content: prompt }], ...body }];
}

async function runOne(transcript, enabled, numOwn, signal) {
  const [path, body] = bodyOf(enabled);
  const load = new LoadWatch();
  const watch = setInterval(() => noteLoad(transcript, load, numOwn), LOAD_SECONDS * 1000);
  transcript.started = performance.now();
  try {
    for await (const chunk of stream(path, body, signal)) {
      for (const choice of chunk.choices) transcript.add(choice);
      if (enabled) inspector.follow(transcript);
    }
  } finally {
    clearInterval(watch);
    transcript.end();
  }
  return load;
}

/** Asks how many requests run; what fails is left out, as the run itself tells of it. */
async function noteLoad(transcript, load, numOwn) {
  if (!transcript.first || transcript.finish) return;
  const info = await get("/get_server_info").catch(() => null);
  if (!info || transcript.finish) return;
  load.note(Object.values(info.verifiers).reduce((sum, one) => sum + one.running + one.waiting, 0), numOwn);
}

async function run() {
  if (running || !ui.form.reportValidity()) return;
  const mode = ui.form.elements.mode.value;
  const controller = (running = new AbortController());
  const message = ui.prompt.value;
  setRunning(true);
  showProblem(null);
  inspector.forget();
  const repeated = rememberRun();
  transcripts = makePanels(mode, message);
  say("running", mode === "single" ? "Running" : "Comparing", "Drafted tokens appear in blue, the model's own in orange.");
  if (matchMedia("(max-width: 900px)").matches) at("results").scrollIntoView({ block: "start" });
  const { signal } = controller;
  const numOwn = mode === "together" ? 2 : 1;
  const speculative = () => runOne(transcripts[0], true, numOwn, signal);
  const plain = () => runOne(transcripts[1], false, numOwn, signal);
  let problem = null;
  let loads = [];
  try {
    // Speculation goes first: n-gram drafts would otherwise know the text from the plain run.
    if (mode === "turns") loads = [await speculative(), await plain()];
    else loads = await Promise.all(mode === "single" ? [speculative()] : [speculative(), plain()]);
  } catch (error) {
    if (error.name !== "AbortError") problem = error;
    controller.abort();
  }
  const stopped = signal.aborted;
  if (!problem) await judge({ mode, stopped, repeated, server, loads });
  if (!problem && !stopped && isChat()) keepTurn(message);
  running = null;
  if (problem) showProblem(problem);
  if (transcripts[0].steps.some((step) => step.element)) inspector.settle(transcripts[0]);
  setRunning(false);
}

function rememberRun() {
  const key = JSON.stringify(bodyOf(true)[1]);
  const repeated = seen.has(key);
  seen.add(key);
  return repeated;
}

function makePanels(mode, prompt) {
  const algorithm = server && server.speculative_algorithm !== "NONE" ? `${server.speculative_algorithm} drafts` : "";
  const kinds = [{ title: "Speculative", note: algorithm }];
  if (mode !== "single") kinds.push({ title: "Plain", note: "one token per pass" });
  const chat = isChat() && prompt ? [...turns, { role: "user", content: prompt }] : [];
  return showPanels(kinds, chat.length ? "" : prompt, chat);
}

function showPanels(kinds, prompt, chat = []) {
  ui.panels.replaceChildren();
  return kinds.map(({ title, note }) => {
    const panel = at("panel").content.firstElementChild.cloneNode(true);
    ui.panels.append(panel);
    const choose = (transcript, index) => inspector.choose(transcript, index);
    const transcript = new Transcript(panel, { title, note, prompt, turns: chat, label: `${title} text`, onSelect: choose });
    const button = panel.querySelector(".copy");
    button.setAttribute("aria-label", `Copy the ${title.toLowerCase()} text`);
    button.addEventListener("click", () => copyFrom(button, transcript.text));
    return transcript;
  });
}

function setRunning(is) {
  ui.run.disabled = is;
  ui.stop.disabled = !is;
  ui.panels.setAttribute("aria-busy", is);
  document.body.dataset.running = is;
  if (!is) document.body.dataset.runs = Number(document.body.dataset.runs ?? 0) + 1;
}

// ---- the verdict

function say(state, title, detail) {
  ui.verdict.dataset.state = state;
  ui.title.textContent = title;
  ui.detail.textContent = detail;
}

async function judge(about) {
  const [drafted, plain] = transcripts;
  if (about.mode === "single" || !plain.numTokens) {
    const length = drafted.acceptLength;
    const title = about.stopped ? `Stopped after ${drafted.numTokens} tokens` : `${drafted.numTokens} tokens`;
    say("idle", title, length ? `${length.toFixed(2)} tokens per pass of the model.` : "");
    return;
  }
  const why = drafted.drafted < FEW_DRAFTS ? await whyLittle() : "";
  const { state, title, detail } = compare(transcripts, { ...about, why });
  say(state, title, detail);
}

/** Why little is drafted, as the server tells it; empty where it does not. */
async function whyLittle() {
  const figures = await get("/dashboard/figures").catch(() => null);
  const telling = figures?.drafts.find(({ state }) => ["suspended", "unmatched", "loading", "lost"].includes(state));
  return telling ? draftState(telling).why : "";
}

function showProblem(problem) {
  ui.error.hidden = !problem;
  ui.verdict.hidden = Boolean(problem);
  ui.error.replaceChildren();
  if (!problem) return;
  if (!(problem instanceof Problem)) console.error(problem);
  const title = document.createElement("strong");
  title.textContent = problem.title ?? "The page has a defect";
  ui.error.append(title, problem.detail ?? problem.message);
  if (problem.status === 401) {
    at("key_field").hidden = false;
    at("key").focus();
  }
  if (problem.retryable) {
    const again = document.createElement("button");
    again.type = "button";
    again.textContent = "Try again";
    again.addEventListener("click", run);
    ui.error.append(document.createElement("br"), again);
  }
}

// ---- the conversation

function keepTurn(message) {
  turns.push({ role: "user", content: message }, { role: "assistant", content: transcripts[0].text });
  ui.prompt.value = "";
  at("new_chat").hidden = false;
  showKind();
}

function showKind() {
  const chat = isChat();
  at("prompt_label").textContent = chat ? (turns.length ? "Next message" : "Message") : "Prompt";
  at("examples").hidden = chat;
  at("new_chat").hidden = !chat || !turns.length;
  showCode();
}

function startOver() {
  turns = [];
  ui.prompt.value = "";
  showKind();
  ui.prompt.focus();
}

function changeKind() {
  const [now, before] = isChat() ? ["chat", "text"] : ["text", "chat"];
  written[before] = ui.prompt.value;
  ui.prompt.value = written[now];
  showKind();
}

// ---- the request as code

function showCode() {
  if (!at("code").open) return;
  const [path, body] = bodyOf(true);
  delete body.return_provenance;
  const language = ui.form.elements.language.value;
  at("snippet").textContent = snippet(language, location.origin, path, body, Boolean(apiKey()) || !at("key_field").hidden);
}

// ---- at first sight

/** Shows a run that was recorded, so that there is something to look at before the first one. */
async function showExample() {
  const example = await get("/web/example.json").catch(() => null);
  if (!example || running || document.body.dataset.runs) return;
  transcripts = showPanels([{ title: "Speculative", note: `an example, recorded: ${example.model}, ${example.algorithm} drafts` }], example.prompt);
  ui.panels.firstElementChild.dataset.recorded = "";
  for (const choice of example.choices) transcripts[0].add(choice, false);
  transcripts[0].end();
  inspector.settle(transcripts[0]);
}

for (const example of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = example.name;
  button.addEventListener("click", () => {
    ui.prompt.value = example.prompt;
    ui.prompt.scrollTop = 0;
    showCode();
  });
  at("examples").append(button);
}
ui.prompt.value = EXAMPLES[0].prompt;
at("parameters").open = !matchMedia("(max-width: 900px)").matches;
at("reseed").addEventListener("click", () => {
  at("seed").value = Math.floor(Math.random() * MAX_SEED);
  showCode();
});
at("key").addEventListener("change", () => keepKey(at("key").value.trim()));
ui.form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
ui.form.addEventListener("input", showCode);
at("code").addEventListener("toggle", showCode);
at("copy_code").addEventListener("click", () => copyFrom(at("copy_code"), at("snippet").textContent));
for (const choice of ui.form.elements.kind) choice.addEventListener("change", changeKind);
at("new_chat").addEventListener("click", startOver);
ui.stop.addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape" && running) {
    running.abort();
  }
});
transcripts = makePanels("single", "");
showExample();
introduce();
watchHealth(({ state, text }) => {
  at("health").dataset.state = state;
  at("health").textContent = text;
});
