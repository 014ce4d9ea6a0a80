// The dashboard: asks for the figures once a second and turns counters into rates.

import { apiKey, get, keepKey } from "./api.js";
import { TimeChart, bars, duration, percent, short, split } from "./charts.js";
import { draftState, endOf, serverState } from "./states.js";

const SPAN = 600; // seconds that charts show at most
const LEAST = 60; // and at least
const SPACING = 4.5; // seconds between rows of the history, at least
const at = (id) => document.getElementById(id);

let rows = []; // of the server's history, and what this page has seen since; oldest first
let oldest = null; // all metrics at the time of the first row
let newest = null; // the last sample
let offset = 0; // of the page's clock from the server's
let asked = 0; // when the page was last answered, by its own clock

const charts = {
  speed: new TimeChart(at("speed_chart"), { unit: "tokens/s" }),
  length: new TimeChart(at("length_chart"), { unit: "tokens per pass" }),
  running: new TimeChart(at("running_chart"), { unit: "running", whole: true }),
};

// ---- what has happened

/** How much a counter grew over the window; null when it started anew or is missing. */
function grown(name) {
  const [before, after] = [oldest?.[name], newest.metrics[name]];
  return before === undefined || after === undefined || after < before ? null : after - before;
}

/** Its growth over the window, or its value since the start where it did not grow. */
function recent(name) {
  return grown(name) || (newest.metrics[name] ?? 0);
}

/** Like `recent`, for two counters that only make sense over the same time. */
function recentRatio(above, below) {
  const [a, b] = [grown(above), grown(below)];
  if (a !== null && b) return a / b;
  return newest.metrics[below] ? newest.metrics[above] / newest.metrics[below] : null;
}

/** Growth by label over the window; since the start where there was none. */
function recentByLabel(name) {
  const [before, after] = [oldest?.[name] ?? {}, newest.metrics[name] ?? {}];
  const difference = Object.entries(after).map(([label, value]) => [label, value - (before[label] ?? 0)]);
  const isUseful = difference.every(([, value]) => value >= 0) && difference.some(([, value]) => value > 0);
  return isUseful ? difference : Object.entries(after);
}

/** A quantile of a histogram, linear within its bucket as Prometheus does it; null when it is empty. */
function quantile(name, q) {
  const buckets = recentByLabel(name)
    .map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count])
    .sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return null;
  let [lower, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= q * total) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (q * total - below)) / (count - below || 1);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

const running = ({ metrics, load }) => metrics.running_sequences ?? load.running;
const waiting = ({ metrics, load }) => metrics.queue_depth ?? load.waiting;

function rowOf(sample) {
  const { metrics, time } = sample;
  return {
    time,
    // The gateway counts tokens at the end of a continuation, the verifier as they come.
    tokens: metrics.generation_tokens_total ?? metrics.gateway_output_tokens_total ?? null,
    emitted: metrics.emitted_tokens_total ?? null,
    verifies: metrics.verifies_total ?? null,
    running: running(sample),
  };
}

async function takeHistory() {
  const history = await get("/dashboard/history");
  rows = history.rows.map((row) => Object.fromEntries(history.columns.map((name, index) => [name, row[index]])));
  oldest = history.oldest;
}

function take(sample) {
  newest = sample;
  offset = Date.now() / 1000 - sample.time;
  const last = rows.at(-1);
  if (!last || sample.time - last.time >= SPACING) rows.push(rowOf(sample));
  while (rows.length && sample.time - rows[0].time > SPAN + 6) rows.shift();
  show(sample);
}

/** Points between rows, the newest one from the last second: {time, value}. */
function points(value) {
  const all = rows.at(-1).time < newest.time - 1.5 ? [...rows, rowOf(newest)] : rows;
  return all.slice(1).map((row, index) => ({ time: row.time + offset, value: value(all[index], row) }));
}

function rate(above, below) {
  return (before, after) => {
    const [a, b] = [after[above] - before[above], after[below] - before[below]];
    const isKnown = before[above] !== null && after[above] !== null && a >= 0 && b > 0;
    return isKnown ? a / b : null;
  };
}

const latest = (series) => series.at(-1)?.value ?? null;

// ---- drawing

function show(sample) {
  const { metrics } = sample;
  at("figures").dataset.state = "live";
  at("key_form").hidden = true;
  at("figures").hidden = false;
  at("partial").hidden = "verifies_total" in metrics;
  at("model").textContent = `${sample.model} · ${sample.dtype} · ${sample.device}`;

  const to = sample.time + offset;
  const from = Math.max(to - SPAN, Math.min(rows[0].time + offset, to - LEAST));
  const speed = points(rate("tokens", "time"));
  const length = points(rate("emitted", "verifies"));
  charts.speed.show(speed, from, to);
  charts.length.show(length, from, to);
  charts.running.show(points((_, after) => after.running), from, to);

  at("speed").textContent = short(latest(speed));
  at("speed_foot").textContent = `${short(metrics.gateway_output_tokens_total ?? 0)} tokens answered since the start`;
  at("length").textContent = (latest(length) ?? recentRatio("emitted_tokens_total", "verifies_total"))?.toFixed(2) ?? "–";
  const share = recentRatio("accepted_tokens_total", "draft_tokens_total");
  at("length_foot").textContent = share === null ? "1 is plain decoding" : `${percent(share)} of drafted tokens accepted · 1 is plain decoding`;
  at("running").textContent = short(running(sample));
  at("waiting").textContent = short(waiting(sample));
  at("requests_foot").textContent = `at most ${short(sample.max_running_requests)} run at once`;

  showDrafts(sample);
  showDepth();
  showStep();
  showKv(sample);
  showEnded();
  for (const [id, name] of [["first", "time_to_first_token"], ["inter", "inter_token_latency"], ["whole", "end_to_end"]]) {
    at(`${id}_50`).textContent = duration(quantile(`gateway_${name}_seconds_bucket`, 0.5));
    at(`${id}_95`).textContent = duration(quantile(`gateway_${name}_seconds_bucket`, 0.95));
  }
  facts("server_facts", [
    ["model", sample.model],
    ["device", `${sample.device}, ${sample.dtype}`],
    ["context", `${short(sample.context_length)} tokens`],
    ["KV pool", `${short(sample.kv_tokens)} tokens`],
    ["verifiers", sample.load.verifiers],
    ["version", sample.version],
  ]);
}

let drafts = ""; // as shown; a screen reader hears of changes alone

function showDrafts({ drafts: list, draft_model: model, num_draft_tokens: numRows, metrics }) {
  const shown = list.map((draft) => [draft.name, draftState(draft)]);
  if (!shown.length) shown.push(["", { word: "No draft", tone: "", why: "This server was started without one: every token is decoded plainly." }]);
  const own = recentRatio("draft_seconds_sum", "draft_seconds_count");
  const facts = list.length && [
    model && list.length === 1 ? model : "",
    numRows > 1 ? `drafts of up to ${short(numRows - 1)} tokens` : "",
    own === null ? "" : `${duration(own)} of drafting a step`,
    metrics.drafter_trie_nodes ? `${short(metrics.drafter_trie_nodes)} n-gram nodes` : "",
    `${short(metrics.draft_failures_total ?? 0)} failed steps`,
  ].filter(Boolean).join(" · ");
  const text = JSON.stringify([shown, facts]);
  if (text === drafts) return;
  drafts = text;
  const items = shown.map(([name, { word, tone, why }]) => {
    const item = document.createElement("li");
    const [pill, title, sentence] = ["span", "b", "p"].map((tag) => document.createElement(tag));
    pill.className = "pill";
    pill.dataset.tone = tone;
    pill.textContent = word;
    [title.textContent, sentence.textContent] = [name, why];
    item.append(pill, title, sentence);
    return item;
  });
  if (facts) {
    const line = document.createElement("p");
    line.className = "facts-line";
    line.textContent = facts;
    items.at(-1).append(line);
  }
  at("drafts").replaceChildren(...items);
}

function showDepth() {
  const trees = recent("drafts_total");
  const depths = recentByLabel("accepted_tokens_per_position_total")
    .map(([depth, count]) => [Number(depth) + 1, trees ? Math.min(1, count / trees) : 0])
    .sort(([a], [b]) => a - b)
    .slice(0, 12);
  at("depth").hidden = !depths.length;
  bars(at("depth"), depths);
  at("depth_foot").textContent = trees ? `${short(trees)} trees verified` : "No tree has been verified yet.";
}

function showStep() {
  const each = (part) => recentRatio(`${part}_seconds_sum`, "step_seconds_count") ?? 0;
  const [step, wait, forward, verify] = ["step", "draft_wait", "target_forward", "verify"].map(each);
  const rest = Math.max(0, step - wait - forward - verify);
  at("step").textContent = step ? short(step * 1000) : "–";
  const own = recentRatio("draft_seconds_sum", "draft_seconds_count");
  const drafting = own === null ? "" : `the draft itself computes ${duration(own)}, in its own process`;
  split(at("split"), at("split_keys"), [
    ["the model's forward pass", forward, duration(forward), ranksOf(recent("step_seconds_count"))],
    ["planning, and standing still for the draft", wait, duration(wait), drafting],
    ["choosing tokens, walking trees", verify, duration(verify)],
    ["the rest", rest, duration(rest)],
  ]);
  at("step_foot").textContent = `mean of ${short(recent("step_seconds_count"))} steps`;
}

/** What each rank of a shared model does in a step; empty where there is one. */
function ranksOf(numSteps) {
  const words = { products: "computes", all_reduce: "sums", waiting: "waits" };
  const ranks = new Map();
  for (const [key, seconds] of recentByLabel("rank_seconds_total")) {
    const [rank, part] = key.split(" ");
    if (!ranks.has(rank)) ranks.set(rank, []);
    if (numSteps) ranks.get(rank).push(`${words[part]} ${duration(seconds / numSteps)}`);
  }
  return [...ranks].map(([rank, parts]) => `rank ${rank} ${parts.join(", ")}`).join("; ");
}

function showKv({ metrics, load, page_size: pageSize }) {
  const total = metrics.kv_pages ?? load.total_pages;
  const used = metrics.kv_pages_used ?? load.total_pages - load.free_pages;
  const cached = metrics.kv_pages_cached ?? 0;
  const free = Math.max(0, total - used - cached);
  at("kv").textContent = total ? short(used) : "–";
  at("kv_cached").textContent = total ? short(cached) : "–";
  at("kv_total").textContent = total ? `of ${short(total)} pages` : "";
  const pages = (count) => `${short(count)} · ${percent(total ? count / total : 0)}`;
  split(at("kv_split"), at("kv_keys"), [
    ["in use by running requests", used, pages(used)],
    ["cached prefixes, given up when needed", cached, pages(cached)],
    ["free", free, pages(free)],
  ]);
  const hits = recentRatio("prefix_cache_hit_tokens_total", "prompt_tokens_total");
  at("kv_foot").textContent = `pages of ${pageSize} tokens` + (hits === null ? "" : ` · ${percent(hits)} of prompt tokens found in the cache`);
}

function showEnded() {
  const outcomes = recentByLabel("gateway_requests_total").filter(([, count]) => count > 0).sort(([, a], [, b]) => b - a);
  const total = outcomes.reduce((sum, [, count]) => sum + count, 0);
  at("ended").replaceChildren(
    ...outcomes.slice(0, 6).map(([outcome, count]) => {
      const [words, kind] = endOf(outcome);
      const [item, bar, name, value] = ["li", "i", "span", "b"].map((tag) => document.createElement(tag));
      item.dataset.kind = kind;
      bar.style.width = `${(100 * count) / total}%`;
      [name.textContent, value.textContent] = [words, short(count)];
      item.append(bar, name, value);
      return item;
    }),
  );
  at("ended_foot").textContent = total ? `${short(total)} answers` : "No request has ended yet.";
}

function facts(id, list) {
  at(id).replaceChildren(
    ...list.flatMap(([name, value]) => {
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      detail.textContent = value;
      return [term, detail];
    }),
  );
}

// ---- asking

function health({ state, text }) {
  if (at("health").textContent === text) return;
  at("health").dataset.state = state;
  at("health").textContent = text;
}

async function ask() {
  if (!document.hidden) {
    try {
      // After a while without answers the server knows better what was.
      if (!rows.length || performance.now() - asked > 1000 * 2 * SPACING) await takeHistory();
      const sample = await get("/dashboard/figures");
      asked = performance.now();
      at("error").hidden = true;
      health(serverState(sample));
      take(sample);
    } catch (problem) {
      fail(problem);
    }
  }
  setTimeout(ask, 1000);
}

function fail(problem) {
  if (problem.status === 401 || problem.status === 403) {
    health({ state: "degraded", text: "asks for a key" });
    at("figures").hidden = at("key_form").hidden === false || !newest;
    at("key_form").hidden = false;
    at("key_refused").textContent = apiKey() ? "This key is not known to the server." : "";
    at("error").hidden = true;
    return;
  }
  if (problem.status === 503) health({ state: "down", text: newest ? "verifier lost" : "loading the model" });
  else health({ state: "down", text: "not reachable" });
  const stale = newest ? " The numbers are those of the last answer." : "";
  at("figures").dataset.state = "waiting";
  at("error").textContent = `${problem.title ?? "The page has a defect"}. ${problem.message}${stale}`;
  at("error").hidden = false;
  if (problem.title === undefined) console.error(problem);
}

at("key_form").addEventListener("submit", (event) => {
  event.preventDefault();
  keepKey(at("key").value.trim());
  at("key").value = "";
  at("key_refused").textContent = "";
});
ask();
