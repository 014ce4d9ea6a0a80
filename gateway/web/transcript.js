// One continuation on the page: its tokens, grouped by the pass of the target that brought them, and its figures.

/** The text of one run. Calls `onSelect(transcript, index)` when a pass is pointed at or reached by keyboard. */
export class Transcript {
  #output;
  #stats;
  #onSelect;
  #following = true;
  #numDrafted = 0;
  #filled = 0; // index of the pass that gets the next token
  #arrivals = []; // {time, tokens} of each time at which tokens came

  /**
   * @param {HTMLElement} panel
   * @param {{title: string, note: string, prompt: string, turns?: {role: string, content: string}[], label: string, onSelect: Function}} about
   */
  constructor(panel, { title, note, prompt, turns = [], label, onSelect }) {
    const heading = panel.querySelector("h2");
    heading.textContent = title;
    const small = document.createElement("small");
    small.textContent = note;
    heading.append(small);
    panel.setAttribute("aria-label", title);
    this.title = title;
    this.#output = panel.querySelector(".output");
    this.#output.setAttribute("aria-label", `${label}. Arrow keys walk from pass to pass.`);
    this.#stats = Object.fromEntries([...panel.querySelectorAll("[data-stat]")].map((cell) => [cell.dataset.stat, cell]));
    this.#onSelect = onSelect;
    this.steps = [];
    this.ids = [];
    this.text = "";
    this.account = null;
    this.finish = null;
    this.started = performance.now();
    this.first = null;
    this.last = 0;
    this.#output.replaceChildren();
    for (const { role, content } of turns) this.#addTurn(role, content);
    if (turns.length) this.#addTurn("assistant", "");
    if (prompt) {
      const given = document.createElement("span");
      given.className = "prompt";
      given.textContent = prompt;
      this.#output.append(given);
    }
    this.#listen();
  }

  /** Takes one choice of a chunk of the stream, or of a recording, whose times say nothing. */
  add(choice, isLive = true) {
    const now = performance.now();
    for (const step of choice.steps ?? []) {
      this.steps.push({ ...step, texts: [], element: null, before: "" });
    }
    const tokens = choice.provenance ?? [];
    if (tokens.length && isLive) {
      this.first ??= { time: now, tokens: tokens.length };
      if (now - this.last >= 1) this.#arrivals.push({ time: now, tokens: 0 });
      this.last = now;
      this.#arrivals.at(-1).tokens += tokens.length;
    }
    this.finish = choice.finish_reason ?? this.finish;
    for (const token of tokens) this.#addToken(token);
    this.text += choice.text ?? choice.delta?.content ?? "";
    this.account = choice.speculation ?? this.account;
    if (this.#following) this.#output.scrollTop = this.#output.scrollHeight;
    this.#show();
  }

  get numTokens() {
    return this.ids.length;
  }

  /** Whether tokens of many passes came at once, because something on the way was held up: then gaps say nothing. */
  get isBunched() {
    return this.#arrivals.length < Math.max(4, this.steps.length / 4);
  }

  /** Tokens that came after one time and no later than another. */
  between(from, to) {
    return this.#arrivals.reduce((sum, { time, tokens }) => sum + (time > from && time <= to ? tokens : 0), 0);
  }

  /** Tokens of the text that were drafted. */
  get accepted() {
    return this.#numDrafted;
  }

  /** Tokens that were drafted for it, accepted or not. */
  get drafted() {
    return this.account?.drafted_tokens ?? this.steps.reduce((sum, step) => sum + step.drafted.length, 0);
  }

  /**
   * Tokens per second from the first ones on, so that prefill, the queue and the prefix cache do not count; null where that
   * cannot be told, unless those of the whole request are asked for.
   */
  speed(isWhole = false) {
    if (!this.first || (this.isBunched && !isWhole)) return null;
    const [from, before] = isWhole ? [this.started, 0] : [this.first.time, this.first.tokens];
    const seconds = (this.last - from) / 1000;
    return seconds > 0 ? (this.numTokens - before) / seconds : null;
  }

  /** Tokens per pass of the target. The prompt's pass gave the first token and verified nothing. */
  get acceptLength() {
    const passes = this.account?.verify_steps ?? this.steps.length - 1;
    return passes > 0 ? (this.numTokens - 1) / passes : null;
  }

  /** What the tree drawing needs of a pass. */
  pass(index) {
    const step = this.steps[index];
    const isWhole = step.texts.length > step.accepted.length;
    const isEnd = this.finish === "stop" && index === this.steps.length - 1 && step.texts.at(-1) === "";
    return {
      before: index ? (this.steps[index - 1].texts.at(-1) ?? "") : "prompt",
      drafted: step.drafted,
      accepted: step.accepted.slice(0, step.texts.length), // the text may end before what was accepted
      added: isWhole ? (isEnd ? "end" : step.texts.at(-1)) : null,
    };
  }

  /** Marks a pass as the one that is shown. */
  mark(index, focus = false) {
    this.#output.querySelector("[data-selected]")?.removeAttribute("data-selected");
    const element = this.steps[index]?.element;
    if (!element) return;
    element.dataset.selected = "";
    for (const other of this.#output.querySelectorAll('.step[tabindex="0"]')) other.tabIndex = -1;
    // One stop for Tab: the pass that is shown, not the box around it.
    element.tabIndex = 0;
    this.#output.tabIndex = -1;
    if (focus) element.focus({ preventScroll: true });
    if (focus) element.scrollIntoView({ block: "nearest" });
  }

  /** Scrolls the box, and nothing else, to a pass. */
  reveal(index) {
    const { element } = this.steps[index];
    this.#output.scrollTop += element.getBoundingClientRect().top - this.#output.getBoundingClientRect().top - 80;
  }

  unmark() {
    this.#output.querySelector("[data-selected]")?.removeAttribute("data-selected");
  }

  /** Ends the live state: tells screen readers what each pass was. */
  end() {
    this.#show();
    this.steps.forEach((step, index) => {
      const drafted = Math.min(step.accepted.length, step.texts.length);
      step.element?.setAttribute("aria-label", `Pass ${index + 1}: ${step.texts.join("")}, ${drafted} of ${step.texts.length} drafted`);
    });
  }

  #addTurn(role, content) {
    const turn = document.createElement("span");
    turn.className = "turn";
    turn.dataset.role = { user: "You", assistant: "Model" }[role];
    turn.textContent = content;
    this.#output.append(turn);
  }

  #addToken(token) {
    this.ids.push(token.id);
    this.#numDrafted += token.drafted;
    let step = this.steps[this.#filled];
    while (step && step.texts.length >= step.tokens) {
      this.#filled += 1;
      step = this.steps[this.#filled];
    }
    if (!step) {
      step = { tokens: 1, drafted: [], accepted: [], texts: [], element: null };
      this.steps.push(step);
    }
    if (!step.element) {
      step.element = document.createElement("span");
      step.element.className = "step";
      step.element.tabIndex = -1;
      step.element.setAttribute("role", "group");
      step.element.dataset.index = this.#filled;
      this.#output.append(step.element);
    }
    step.texts.push(token.text);
    const span = document.createElement("span");
    span.className = `token ${token.drafted ? "drafted" : "added"}`;
    token.text.split("\n").forEach((line, index) => {
      if (index) span.append(sign("line-end"), "\n");
      span.append(line);
    });
    if (!token.text && this.finish === "stop") span.append(sign("end-sign"));
    step.element.append(span);
  }

  #show() {
    const { account, acceptLength, accepted, drafted } = this;
    const speed = this.speed();
    const values = {
      speed: speed === null ? "–" : speed.toFixed(speed < 100 ? 1 : 0),
      length: acceptLength === null ? "–" : acceptLength.toFixed(2),
      tokens: String(this.numTokens),
      passes: String(account?.verify_steps ?? Math.max(0, this.steps.length - 1)),
      accepted: drafted ? `${accepted} of ${drafted}` : "–",
      first: this.first ? `${Math.round(this.first.time - this.started)} ms` : "–",
    };
    for (const [name, value] of Object.entries(values)) {
      if (this.#stats[name].textContent !== value) this.#stats[name].textContent = value;
    }
  }

  #listen() {
    const output = this.#output;
    const indexOf = (target) => target.closest?.(".step")?.dataset.index;
    for (const kind of ["pointermove", "focusin", "click"]) {
      output.addEventListener(kind, (event) => {
        // Text that moves under a pointer at rest is not pointed at, nor what a finger scrolls over.
        if (kind === "pointermove" && (event.pointerType !== "mouse" || !(event.movementX || event.movementY))) return;
        const index = indexOf(event.target);
        if (index !== undefined) this.#onSelect(this, Number(index));
      });
    }
    output.addEventListener("scroll", () => {
      this.#following = output.scrollTop + output.clientHeight > output.scrollHeight - 40;
    });
    output.addEventListener("keydown", (event) => {
      const current = Number(indexOf(document.activeElement) ?? -1);
      const last = this.steps.findLastIndex((step) => step.element);
      const target = {
        ArrowRight: current + 1,
        ArrowDown: current + 1,
        ArrowLeft: current - 1,
        ArrowUp: current - 1,
        Home: 0,
        End: last,
      }[event.key];
      if (target === undefined || last < 0) return;
      event.preventDefault();
      this.#following = false;
      this.mark(Math.min(Math.max(target, 0), last), true);
    });
  }
}

// A sign that is seen but neither copied nor read aloud.
function sign(name) {
  const element = document.createElement("span");
  element.className = name;
  element.setAttribute("aria-hidden", "true");
  return element;
}
