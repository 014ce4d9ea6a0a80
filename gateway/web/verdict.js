// What two runs of one prompt show: whether the texts are equal, and which was sooner where that can be told.

/** With fewer drafted tokens a ratio says nothing of drafting. */
export const FEW_DRAFTS = 20;
const MOST = 1.1; // of its tokens per pass, the speed that drafting can bring at most, and what timing is off by
const EVEN = 0.03; // a ratio this near to 1 is no difference
const SAME_LOAD = 0.25; // requests beside a run, in the mean, by which two may differ

/** How busy the server was beside a run, from what it says of itself while the run goes. */
export class LoadWatch {
  #counts = [];

  note(numRunning, numOwn) {
    this.#counts.push(Math.max(0, numRunning - numOwn));
  }

  /** Requests beside the own ones, in the mean; null where nothing was heard. */
  get others() {
    const counts = this.#counts;
    return counts.length ? counts.reduce((sum, count) => sum + count, 0) / counts.length : null;
  }
}

/**
 * The comparison as {state, title, detail}.
 *
 * @param {import("./transcript.js").Transcript[]} transcripts The speculative run and the plain one.
 * @param {{mode: string, stopped: boolean, repeated: boolean, server: object | null, loads: LoadWatch[], why: string}} about
 *     `why` is what the draft's state says when little is drafted.
 */
export function compare([drafted, plain], { mode, stopped, repeated, server, loads, why }) {
  const common = Math.min(drafted.numTokens, plain.numTokens);
  const difference = drafted.ids.findIndex((id, index) => index < common && id !== plain.ids[index]);
  const isWhole = !stopped;
  const isEqual = difference < 0 && (!isWhole || (drafted.text === plain.text && drafted.numTokens === plain.numTokens));
  if (!isEqual) return parted(difference < 0 ? common : difference, drafted.account?.lossy, server);
  const same = isWhole ? "Same text" : `Same text so far (${common} tokens)`;
  const equal = isWhole ? `${drafted.numTokens} tokens, equal one for one.` : "";
  const told = (...sentences) => sentences.filter(Boolean).join(" ");

  if (drafted.drafted < FEW_DRAFTS) {
    const few = `Too few drafts to compare: ${drafted.drafted || "no"} token${drafted.drafted === 1 ? " was" : "s were"} drafted.`;
    return { state: "even", title: same, detail: told(equal, few, why) };
  }
  const others = loads.map((load) => load.others);
  if (mode === "turns" && !others.includes(null) && Math.abs(others[0] - others[1]) > SAME_LOAD) {
    const detail = told(equal, "No ratio: other requests ran beside one of the two.");
    return { state: "even", title: same, detail };
  }
  const ratio = mode === "together" ? ratioAtOnce(drafted, plain) : ratioInTurn(drafted, plain);
  if (ratio === null) return { state: "even", title: same, detail: told(equal, "Too short to time.") };
  if (ratio > MOST * drafted.acceptLength) {
    const busy = "No ratio: something else on the machine slowed the plain run, as drafting cannot bring more than its tokens per pass.";
    return { state: "even", title: same, detail: told(equal, busy) };
  }
  const notes = [
    mode === "together" ? "Measured while both ran, in one batch." : "",
    mode === "turns" && (drafted.isBunched || plain.isBunched) ? "Timed with the prompt's pass: tokens came in bunches." : "",
    repeated && server?.speculative_algorithm?.includes("NGRAM") ? "This prompt ran before, and n-gram drafts remember it." : "",
  ];
  if (ratio > 1 + EVEN) return { state: "equal", title: `${same}, ${ratio.toFixed(2)}× the speed`, detail: told(equal, ...notes) };
  const held = `${drafted.accepted} of ${drafted.drafted} drafted tokens held, which is ${ratio < 1 - EVEN ? "less than checking them cost" : "about what checking them cost"}.`;
  if (ratio < 1 - EVEN) {
    return { state: "slower", title: `${same}, slower: ${ratio.toFixed(2)}× the speed`, detail: told(`Drafting did not pay here: ${held}`, equal, ...notes) };
  }
  return { state: "even", title: `${same}, same speed`, detail: told(held, equal, ...notes) };
}

function parted(where, isLossy, server) {
  const title = `The texts part at token ${where + 1}`;
  if (isLossy) return { state: "parted", title, detail: "This server accepts drafts by a threshold below 1, which may change the text." };
  if (equalityOf(server)) return { state: "parted", title, detail: equalityOf(server) };
  if (isStrict(server)) return { state: "differs", title, detail: "This server computes every row in one order of its own (--exactness strict), so that this should not happen: please report it." };
  return { state: "differs", title, detail: "In float32 that takes two tokens within rounding of each other. If it happens often, please report it." };
}

/** What equality to expect of a server's arithmetic; empty where the texts are equal. */
export function equalityOf(server) {
  if (!server || levelOf(server) !== "off") return "";
  return (
    `This server computes in ${server.dtype} with exactness off, and may round one row and several rows differently: both texts ` +
    "are the model's own, but may part where two tokens are almost equally likely. Where its level is float32 or strict, they are equal."
  );
}

function isStrict(server) {
  return Boolean(server) && levelOf(server) === "strict";
}

/** What holds for texts; by the type alone where several verifiers say different things, or nothing. */
function levelOf(server) {
  if (server.exactness && server.exactness.level) return server.exactness.level;
  return server.dtype === "float32" ? "float32" : "off";
}

function ratioInTurn(drafted, plain) {
  const isBunched = drafted.isBunched || plain.isBunched;
  const [a, b] = [drafted.speed(isBunched), plain.speed(isBunched)];
  return a && b ? a / b : null;
}

/** Tokens of both over the time in which both ran: what is left of the slower one has the machine to itself. */
function ratioAtOnce(drafted, plain) {
  if (!drafted.first || !plain.first) return null;
  const from = Math.max(drafted.first.time, plain.first.time);
  const to = Math.min(drafted.last, plain.last);
  const [a, b] = [drafted.between(from, to), plain.between(from, to)];
  return to > from && b >= 5 ? a / b : null;
}
