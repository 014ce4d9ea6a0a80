// The tree of one pass, under the texts: follows a run, and stays where a person points.

import { describe, draw } from "./tree.js";

const at = (id) => document.getElementById(id);
const HINT = "Point at a token, or move through the text with the arrow keys, to see what was drafted there.";

export class Inspector {
  #shown = null; // {transcript, index}
  #isPinned = false; // a person chose what is shown, or to see nothing
  #isPending = false;

  constructor() {
    at("hide").addEventListener("click", () => {
      this.#shown?.transcript.unmark();
      this.forget();
      this.#isPinned = true;
    });
    at("previous").addEventListener("click", () => this.#stepBy(-1));
    at("next").addEventListener("click", () => this.#stepBy(1));
    this.forget();
  }

  /** Shows nothing. */
  forget() {
    this.#shown = null;
    this.#isPinned = false;
    delete at("inspector").dataset.shown;
    at("inspector_title").textContent = "The tree of a pass";
    at("inspector_text").textContent = HINT;
    at("inspector_text").title = "";
    at("previous").disabled = at("next").disabled = true;
    at("tree").replaceChildren();
  }

  /** Shows the newest pass of a text that streams, at most once a frame. */
  follow(transcript) {
    if (this.#isPinned || this.#isPending) return;
    this.#isPending = true;
    requestAnimationFrame(() => {
      this.#isPending = false;
      const index = transcript.steps.findLastIndex((step) => step.texts.length >= step.tokens);
      if (!this.#isPinned && !transcript.finish && index >= 0) this.#select(transcript, index);
    });
  }

  /** Shows the most telling pass of a text that has ended, unless a person chose one. */
  settle(transcript) {
    if (this.#isPinned) return;
    const index = mostTelling(transcript);
    this.#select(transcript, index);
    transcript.reveal(index);
  }

  /** Shows what a person points at. */
  choose(transcript, index) {
    const isShown = this.#shown?.transcript === transcript && this.#shown.index === index;
    if (this.#isPinned && isShown && "shown" in at("inspector").dataset) return;
    this.#isPinned = true;
    at("inspector").dataset.shown = "";
    this.#select(transcript, index);
  }

  #select(transcript, index) {
    this.#shown?.transcript.unmark();
    this.#shown = { transcript, index };
    transcript.mark(index);
    const pass = transcript.pass(index);
    const which = ` · ${transcript.title.toLowerCase()}`;
    at("inspector_title").textContent = index ? `Pass ${index}${which}` : `The prompt's pass${which}`;
    at("inspector_text").textContent = at("inspector_text").title = describe(pass);
    draw(at("tree"), pass);
    at("previous").disabled = index <= 0;
    at("next").disabled = !transcript.steps[index + 1]?.element;
  }

  #stepBy(delta) {
    if (!this.#shown) return;
    this.#isPinned = true;
    const { transcript, index } = this.#shown;
    this.#select(transcript, index + delta);
    transcript.steps[index + delta].element.scrollIntoView({ block: "nearest" });
  }
}

// The first pass whose tree says most: a few tokens accepted, and others rejected beside them.
function mostTelling(transcript) {
  const worth = ({ element, accepted, drafted }) =>
    element ? 2 * Math.min(accepted.length, 4) + Math.min(drafted.length - accepted.length, 4) : -1;
  const steps = transcript.steps;
  return steps.reduce((best, step, index) => (worth(step) > worth(steps[best]) ? index : best), 0);
}
