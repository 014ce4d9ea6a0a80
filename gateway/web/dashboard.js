// The dashboard: asks for the figures once a second and turns counters into rates.

import { get } from "./api.js";
import { bars, duration, line, percent, short, split } from "./charts.js";

const SPAN = 120;
const SMOOTH = 5; // seconds over which the number beside a chart is taken
const at = (id) => document.getElementById(id);

const samples = []; // newest last, at most SPAN + 1
const rates = { speed: [], length: [], running: [] };

/** How much a counter grew between two samples; null when it started anew or is missing. */
function grown(name, from, to) {
  const [before, after] = [from.metrics[name], to.metrics[name]];
  return before === undefined || after === undefined || after < before ? null : after - before;
}

/** Its growth over the page's window, or its value since the start where it did not grow. */
function recent(name) {
  const newest = samples.at(-1);
  return grown(name, samples[0], newest) || (newest.metrics[name] ?? 0);
}

/** Like `recent`, for two counters that only make sense over the same time. */
function recentRatio(above, below) {
  const newest = samples.at(-1);
  const [a, b] = [grown(above, samples[0], newest), grown(below, samples[0], newest)];
  if (a !== null && b) return a / b;
  return newest.metrics[below] ? newest.metrics[above] / newest.metrics[below] : null;
}

/** Growth by label over the window; since the start where there was none. */
function recentByLabel(name) {
  const after = samples.at(-1).metrics[name] ?? {};
  const before = samples[0].metrics[name] ?? {};
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

function take(sample) {
  const last = samples.at(-1);
  if (last && sample.time <= last.time) return;
  samples.push(sample);
  if (samples.length > SPAN + 1) samples.shift();
  // The gateway counts tokens at the end of a continuation, the verifier as they come.
  const counter = "generation_tokens_total" in sample.metrics ? "generation_tokens_total" : "gateway_output_tokens_total";
  const tokens = last ? grown(counter, last, sample) : null;
  const [emitted, verifies] = last
    ? [grown("emitted_tokens_total", last, sample), grown("verifies_total", last, sample)]
    : [null, null];
  push("speed", tokens === null ? null : tokens / (sample.time - last.time));
  push("length", verifies ? emitted / verifies : null);
  push("running", running(sample));
  show(sample);
}

function push(name, value) {
  rates[name].push(value);
  if (rates[name].length > SPAN) rates[name].shift();
}

const running = ({ metrics, load }) => metrics.running_sequences ?? load.running;
const waiting = ({ metrics, load }) => metrics.queue_depth ?? load.waiting;

function mean(values) {
  const present = values.filter((value) => value !== null);
  return present.length ? present.reduce((sum, value) => sum + value, 0) / present.length : null;
}

// ---- drawing

function show(sample) {
  const { metrics } = sample;
  at("partial").hidden = "verifies_total" in metrics;
  at("model").textContent = `${sample.model} · ${sample.device}`;

  at("speed").textContent = short(mean(rates.speed.slice(-SMOOTH)));
  line(at("speed_chart"), rates.speed, SPAN, "tokens per second");
  at("speed_foot").textContent = `${short(metrics.gateway_output_tokens_total ?? 0)} tokens answered since the start`;

  at("length").textContent = short(mean(rates.length.slice(-SMOOTH)) ?? recentRatio("emitted_tokens_total", "verifies_total"));
  line(at("length_chart"), rates.length, SPAN, "tokens per verification");
  const rate = recentRatio("accepted_tokens_total", "draft_tokens_total");
  at("length_foot").textContent = rate === null ? "" : `${percent(rate)} of drafted tokens accepted`;

  at("running").textContent = short(running(sample));
  at("waiting").textContent = short(waiting(sample));
  line(at("running_chart"), rates.running, SPAN, "running requests");
  const outcomes = Object.entries(metrics.gateway_requests_total ?? {}).sort(([, a], [, b]) => b - a);
  const ended = outcomes.map(([outcome, count]) => `${short(count)} by ${outcome}`).join(", ");
  at("requests_foot").textContent = ended ? `Ended: ${ended}` : "No request has ended yet.";

  showDepth();
  showStep();
  showKv(sample);
  for (const [id, name] of [["first", "gateway_time_to_first_token_seconds_bucket"], ["inter", "gateway_inter_token_latency_seconds_bucket"]]) {
    at(`${id}_50`).textContent = duration(quantile(name, 0.5));
    at(`${id}_95`).textContent = duration(quantile(name, 0.95));
  }
  showDraft(sample);
  facts("server_facts", [
    ["model", sample.model],
    ["device", `${sample.device}, ${sample.dtype}`],
    ["context", `${short(sample.context_length)} tokens`],
    ["KV pool", `${short(sample.kv_tokens)} tokens`],
    ["batch at most", sample.max_running_requests],
    ["verifiers", sample.load.verifiers],
    ["version", sample.version],
  ]);
}

function showDepth() {
  const name = "accepted_tokens_per_position_total";
  const drafts = recent("drafts_total");
  const depths = recentByLabel(name)
    .map(([depth, count]) => [Number(depth) + 1, drafts ? Math.min(1, count / drafts) : 0])
    .sort(([a], [b]) => a - b)
    .slice(0, 12);
  at("depth").hidden = !depths.length;
  bars(at("depth"), depths);
  at("depth_foot").textContent = drafts ? `${short(drafts)} trees` : "No tree has been verified yet.";
}

function showStep() {
  const each = (part) => recentRatio(`${part}_seconds_sum`, "step_seconds_count") ?? 0;
  const [step, wait, forward, verify] = ["step", "draft_wait", "target_forward", "verify"].map(each);
  const rest = Math.max(0, step - wait - forward - verify);
  at("step").textContent = step ? short(step * 1000) : "–";
  split(at("split"), at("split_keys"), [
    ["target's forward", forward, duration(forward)],
    ["wait for the draft", wait, duration(wait)],
    ["choosing and walking", verify, duration(verify)],
    ["the rest", rest, duration(rest)],
  ]);
  at("step_foot").textContent = `${short(recent("step_seconds_count"))} steps`;
}

function showKv({ metrics, load, page_size: pageSize }) {
  const total = metrics.kv_pages ?? load.total_pages;
  const used = metrics.kv_pages_used ?? load.total_pages - load.free_pages;
  const cached = metrics.kv_pages_cached ?? 0;
  at("kv").textContent = total ? percent(used / total) : "–";
  split(at("kv_split"), at("kv_keys"), [
    ["held by requests", used, `${short(used)} pages`],
    ["cached prefixes", cached, `${short(cached)} pages`],
    ["free", Math.max(0, total - used - cached), `${short(Math.max(0, total - used - cached))} pages`],
  ]);
  const hits = recentRatio("prefix_cache_hit_tokens_total", "prompt_tokens_total");
  at("kv_foot").textContent = `Pages of ${pageSize} tokens` + (hits === null ? "" : ` · ${percent(hits)} of prompt tokens found in the cache`);
}

function showDraft({ algorithm, draft_model: model, num_draft_tokens: rows, metrics, load }) {
  const isDrafting = algorithm !== "NONE";
  const isHere = load.verifiers > 0 && (metrics.draft_available ?? (load.draft_available ? 1 : 0)) > 0;
  at("draft").textContent = isDrafting ? (isHere ? "available" : "away") : "none configured";
  at("draft").dataset.state = isDrafting ? (isHere ? "ok" : "away") : "";
  const list = [["algorithm", algorithm]];
  if (isDrafting) {
    if (model) list.push(["model", model]);
    list.push(["tree", `up to ${rows - 1} tokens`]);
    const own = recentRatio("draft_seconds_sum", "draft_seconds_count");
    if (own !== null) list.push(["its time in a step", duration(own)]);
    if (metrics.drafter_trie_nodes) list.push(["n-gram nodes", short(metrics.drafter_trie_nodes)]);
    list.push(["steps that failed", short(metrics.draft_failures_total ?? 0)]);
  }
  facts("draft_facts", list);
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

function health(state, text) {
  if (at("health").textContent === text) return;
  at("health").dataset.state = state;
  at("health").textContent = text;
}

async function ask() {
  if (!document.hidden) {
    try {
      const sample = await get("/dashboard/figures");
      at("error").hidden = true;
      const isDrafting = sample.algorithm !== "NONE";
      const isHere = (sample.metrics.draft_available ?? (sample.load.draft_available ? 1 : 0)) > 0;
      if (!sample.load.verifiers) health("down", "no verifier");
      else if (isDrafting && !isHere) health("degraded", "ready, draft away");
      else health("ok", "ready");
      take(sample);
    } catch (problem) {
      health("down", problem.status === 503 ? "starting" : "not reachable");
      at("error").textContent = `${problem.title ?? "The page has a defect"}. ${problem.message} The numbers are those of the last answer.`;
      at("error").hidden = false;
      if (problem.title === undefined) console.error(problem);
    }
  }
  setTimeout(ask, 1000);
}

ask();
