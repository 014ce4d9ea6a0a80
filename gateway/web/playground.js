// The playground: a prompt, one or two runs of it, and what came of each pass.

import { Problem, get, keepKey, stream, watchHealth } from "./api.js";
import { EXAMPLES } from "./examples.js";
import { Transcript } from "./transcript.js";
import { describe, draw } from "./tree.js";

const MAX_SEED = 2 ** 32;
const at = (id) => document.getElementById(id);

const ui = {
  form: at("form"), run: at("run"), stop: at("stop"), error: at("error"), panels: at("panels"),
  verdict: at("verdict"), title: at("verdict_title"), detail: at("verdict_detail"),
  inspector: at("inspector"), inspectorTitle: at("inspector_title"), inspectorText: at("inspector_text"), tree: at("tree"),
  previous: at("previous"), next: at("next"),
};

let server = null; // what is served, once it has said so
let running = null; // AbortController of the run under way
let transcripts = [];
let shown = null; // {transcript, index} in the inspector
let isPinned = false; // a person chose what the inspector shows
const seen = new Set(); // prompts and seeds that have run

// ---- what is served

async function introduce() {
  try {
    const [model, settings] = await Promise.all([get("/get_model_info"), get("/get_server_info")]);
    server = { ...settings, chat: model.has_chat_template };
  } catch (problem) {
    if (problem.status === 401) askForKey();
    setTimeout(introduce, 1000);
    return;
  }
  const how = server.speculative_algorithm === "NONE" ? "no drafts" : `${server.speculative_algorithm} drafts`;
  at("model").textContent = `${server.served_model_name} · ${how} · ${server.device}`;
  at("chat_field").hidden = !server.chat;
  at("max_tokens").max = server.context_length;
  const limit = server.speculative_num_draft_tokens - 1;
  at("draft_tokens").max = Math.max(limit, 1);
  at("draft_tokens").disabled = limit < 1;
  at("draft_tokens").placeholder = limit < 1 ? "none" : `up to ${limit}`;
}

function askForKey() {
  at("key_field").hidden = false;
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
  const prompt = at("prompt").value;
  if (!at("chat").checked) return ["/v1/completions", { ...body, prompt }];
  return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: prompt }] }];
}

async function runOne(transcript, enabled, signal) {
  const [path, body] = bodyOf(enabled);
  transcript.started = performance.now();
  try {
    for await (const chunk of stream(path, body, signal)) {
      for (const choice of chunk.choices) transcript.add(choice);
      if (!isPinned && enabled) follow(transcript);
    }
  } finally {
    transcript.end();
  }
}

async function run() {
  if (running || !ui.form.reportValidity()) return;
  const mode = ui.form.elements.mode.value;
  const controller = (running = new AbortController());
  const stopped = { value: false };
  controller.signal.addEventListener("abort", () => (stopped.value = true));
  setRunning(true);
  showProblem(null);
  forgetInspector();
  const repeated = rememberRun();
  transcripts = makePanels(mode, at("chat").checked ? "" : at("prompt").value);
  say("running", mode === "single" ? "Running" : "Comparing", "Drafted tokens appear in blue, the target's own in orange.");
  const speculative = () => runOne(transcripts[0], true, controller.signal);
  const plain = () => runOne(transcripts[1], false, controller.signal);
  let problem = null;
  try {
    // Speculation goes first: n-gram drafts would otherwise know the text from the plain run.
    if (mode === "turns") {
      await speculative();
      await plain();
    } else {
      await Promise.all(mode === "single" ? [speculative()] : [speculative(), plain()]);
    }
  } catch (error) {
    controller.abort();
    if (error.name !== "AbortError") problem = error;
  }
  running = null;
  setRunning(false);
  if (problem) {
    showProblem(problem);
    say("idle", "Not finished", "");
  } else {
    judge(mode, stopped.value, repeated);
  }
  if (transcripts[0].steps.some((step) => step.element)) {
    const index = mostTelling(transcripts[0]);
    if (!isPinned) {
      select(transcripts[0], index);
      transcripts[0].reveal(index);
    }
  }
}

// The first pass whose tree says most: a few tokens accepted, and others rejected beside them.
function mostTelling(transcript) {
  const worth = ({ element, accepted, drafted }) =>
    element ? 2 * Math.min(accepted.length, 4) + Math.min(drafted.length - accepted.length, 4) : -1;
  const steps = transcript.steps;
  return steps.reduce((best, step, index) => (worth(step) > worth(steps[best]) ? index : best), 0);
}

function rememberRun() {
  const key = JSON.stringify(bodyOf(true)[1]);
  const repeated = seen.has(key);
  seen.add(key);
  return repeated;
}

function makePanels(mode, prompt) {
  const kinds = [{ title: "Speculative", note: draftNote() }];
  if (mode !== "single") kinds.push({ title: "Plain", note: "one token per pass" });
  ui.panels.replaceChildren();
  return kinds.map(({ title, note }) => {
    const panel = at("panel").content.firstElementChild.cloneNode(true);
    ui.panels.append(panel);
    return new Transcript(panel, { title, note, prompt, label: `${title} text`, onSelect: choose });
  });
}

function draftNote() {
  return server && server.speculative_algorithm !== "NONE" ? `${server.speculative_algorithm} drafts` : "";
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

function judge(mode, stopped, repeated) {
  const [drafted, plain] = transcripts;
  if (mode === "single" || !plain.numTokens) {
    const length = drafted.acceptLength;
    const per = length ? `${length.toFixed(2)} tokens per pass of the model.` : "";
    say("idle", stopped ? `Stopped after ${drafted.numTokens} tokens` : `${drafted.numTokens} tokens`, per);
    return;
  }
  const common = Math.min(drafted.numTokens, plain.numTokens);
  const difference = drafted.ids.findIndex((id, index) => index < common && id !== plain.ids[index]);
  const isWhole = !stopped;
  const isEqual = difference < 0 && (!isWhole || (drafted.text === plain.text && drafted.numTokens === plain.numTokens));
  if (!isEqual) {
    const where = difference < 0 ? common : difference;
    const why = drafted.account?.lossy
      ? "This server accepts drafts by a threshold below 1, which may change the text."
      : "Two tokens lie within rounding of each other there, or the arithmetic is coarser than float32.";
    say("differs", `The texts differ from token ${where + 1} on`, why);
    return;
  }
  const isBunched = drafted.isBunched || plain.isBunched;
  const speeds = [drafted.speed(isBunched), plain.speed(isBunched)];
  const ratio = speeds[0] && speeds[1] ? speeds[0] / speeds[1] : null;
  const same = isWhole ? "Same text" : `Same text so far (${common} tokens)`;
  say("equal", ratio ? `${same}, ${ratio.toFixed(2)}× the speed` : same, [
    isWhole ? `${drafted.numTokens} tokens, equal one for one.` : "",
    ratio && ratio < 1 ? "Drafting did not pay on this prompt." : "",
    isBunched ? "Timed with the prompt's pass: tokens came in bunches." : "",
    mode === "together" ? "Both shared the machine." : "",
    repeated && server?.speculative_algorithm === "NGRAM" ? "This prompt ran before, and n-gram drafts remember it." : "",
  ].filter(Boolean).join(" "));
}

// ---- errors

function showProblem(problem) {
  ui.error.hidden = !problem;
  ui.error.replaceChildren();
  if (!problem) return;
  if (!(problem instanceof Problem)) console.error(problem);
  const title = document.createElement("strong");
  title.textContent = problem.title ?? "The page has a defect";
  ui.error.append(title, problem.detail ?? problem.message);
  if (problem.status === 401) {
    askForKey();
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

// ---- the inspector

let pending = false;

// While text streams the inspector shows the newest pass, at most once a frame.
function follow(transcript) {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    const index = transcript.steps.findLastIndex((step) => step.texts.length >= step.tokens);
    if (!isPinned && running && index >= 0) select(transcript, index);
  });
}

function choose(transcript, index) {
  isPinned = true;
  select(transcript, index);
}

function select(transcript, index, focus = false) {
  if (shown && shown.transcript !== transcript) shown.transcript.unmark();
  shown = { transcript, index };
  transcript.mark(index, focus);
  const pass = transcript.pass(index);
  ui.inspector.dataset.shown = "";
  const which = transcripts.length > 1 ? ` · ${transcript.title.toLowerCase()}` : "";
  ui.inspectorTitle.textContent = index ? `Pass ${index}${which}` : `The prompt's pass${which}`;
  ui.inspectorText.textContent = describe(pass);
  draw(ui.tree, pass);
  ui.previous.disabled = index <= 0;
  ui.next.disabled = !transcript.steps[index + 1]?.element;
}

function forgetInspector() {
  shown = null;
  isPinned = false;
  delete ui.inspector.dataset.shown;
  ui.tree.replaceChildren();
}

function stepBy(delta) {
  if (!shown) return;
  isPinned = true;
  select(shown.transcript, shown.index + delta);
  shown.transcript.steps[shown.index].element.scrollIntoView({ block: "nearest" });
}

// ---- wiring

for (const example of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = example.name;
  button.addEventListener("click", () => {
    at("prompt").value = example.prompt;
    at("prompt").scrollTop = 0;
  });
  at("examples").append(button);
}
at("prompt").value = EXAMPLES[0].prompt;
at("reseed").addEventListener("click", () => {
  at("seed").value = Math.floor(Math.random() * MAX_SEED);
});
at("key").addEventListener("change", () => keepKey(at("key").value.trim()));
ui.form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
ui.stop.addEventListener("click", () => running?.abort());
at("hide").addEventListener("click", () => {
  shown?.transcript.unmark();
  forgetInspector();
  isPinned = true;
});
ui.previous.addEventListener("click", () => stepBy(-1));
ui.next.addEventListener("click", () => stepBy(1));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    run();
  } else if (event.key === "Escape" && running) {
    running.abort();
  }
});
transcripts = makePanels("turns", "");
introduce();
watchHealth(({ state, text }) => {
  at("health").dataset.state = state;
  at("health").textContent = text;
});
