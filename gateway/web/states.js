// What the server and its drafts do, in a word and a sentence each.

import { short } from "./charts.js";

const plural = (count, one) => `${short(count)} ${one}${count === 1 ? "" : "s"}`;

/** A draft's state as {word, tone, why}; `draft` is one of /dashboard/figures. */
export function draftState(draft) {
  const each = draft.tokens_per_tree === undefined ? "" : draft.tokens_per_tree.toFixed(1);
  const some = draft.attached < draft.verifiers ? ` It is attached at ${draft.attached} of ${draft.verifiers} verifiers.` : "";
  const about = {
    drafting: () => {
      const passes = `${short(draft.trees)} of the last ${plural(draft.verifies, "pass")}`.replace("passs", "passes");
      return ["Drafting", "good", `${passes} verified a draft, which brought ${each} tokens each.`];
    },
    suspended: () => [
      "Suspended",
      "warn",
      `Plain decoding is faster now: ${each ? `what it drafted last brought ${each} tokens a pass` : "its drafts cost more than they bring"}. It is tried again now and then.`,
    ],
    unmatched: () => ["Nothing to draft", "", "No text seen so far goes on like the one being written; n-grams draft when text repeats."],
    idle: () => ["Ready", "good", "Attached. Nothing that it could draft for has run in the last half minute."],
    attached: () => ["Attached", "good", "Its figures are not at hand, so that no more can be told."],
    loading: () => ["Loading", "warn", "The draft has not attached yet. Answers come meanwhile, decoded plainly."],
    lost: () => ["Lost", "bad", "The draft is gone. Answers come all the same, decoded plainly; it attaches by itself when it is back."],
  }[draft.state];
  if (!about) return { word: draft.state, tone: "", why: "" };
  const [word, tone, why] = about();
  return { word, tone, why: why + some };
}

/** The whole server in few words, for the header: {state, text}. */
export function serverState(figures) {
  if (!figures.load.verifiers) return { state: "down", text: "verifier lost" };
  const states = figures.drafts.map(({ state }) => state);
  if (!states.length) return { state: "ok", text: "ready" };
  if (states.includes("lost")) return { state: "degraded", text: "ready, draft lost" };
  if (states.includes("loading")) return { state: "degraded", text: "ready, draft loading" };
  if (states.includes("drafting")) return { state: "ok", text: "drafting" };
  if (states.includes("suspended")) return { state: "ok", text: "ready, drafting suspended" };
  return { state: "ok", text: "ready" };
}

// Ends of a continuation, as the gateway counts them: words, and whether somebody is at fault.
const ENDS = {
  stop: ["finished by themselves, or at a stop text", "done"],
  length: ["reached their token limit", "done"],
  tool_calls: ["called a tool", "done"],
  abort: ["ended by /abort_request, or by a server that stopped", "left"],
  cancelled: ["client went away", "left"],
  slow_client: ["client read too slowly", "left"],
  invalid: ["refused: something in the request was wrong", "left"],
  rate_limited: ["refused: the key's limit was reached", "left"],
  overloaded: ["refused: the queue was full", "fault"],
  queue_timeout: ["gave up waiting in the queue", "fault"],
  deadline: ["took longer than allowed", "fault"],
  unavailable: ["no verifier was there", "fault"],
  internal: ["a defect of the server; see its log", "fault"],
};

/** Why requests ended: [words, kind], kind being done, left or fault. */
export function endOf(outcome) {
  return ENDS[outcome] ?? [outcome.replaceAll("_", " "), "fault"];
}
