// Small charts without a library: a line over time with axes and a cursor, bars, and a bar split in parts.

const SVG = "http://www.w3.org/2000/svg";
const [LEFT, RIGHT, TOP, BOTTOM] = [34, 8, 8, 18];
const STEPS = [5, 10, 15, 30, 60, 120, 300, 600]; // seconds between labels of the time axis
const LABEL_WIDTH = 62;

/** A number for people: 3 significant digits, thousands with k and M. */
export function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100 || Number.isInteger(value)) return String(Math.round(value));
  return value.toFixed(size >= 10 ? 1 : 2);
}

/** Seconds as ms or s. */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  return seconds < 1 ? `${short(seconds * 1000)} ms` : `${short(seconds)} s`;
}

/** A share of 1 in percent. */
export function percent(share) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %` : "–";
}

const charts = new Set(); // they share one cursor

/** A line with an area under it, over time. Draws itself anew when its width changes. */
export class TimeChart {
  #element;
  #unit;
  #whole;
  #points = [];
  #from = 0;
  #to = 1;
  #scale = null;
  #cursor = null;
  #tip;

  /**
   * @param {HTMLElement} element
   * @param {{unit: string, whole?: boolean}} about What is shown, and whether there are whole numbers only.
   */
  constructor(element, { unit, whole = false }) {
    this.#element = element;
    this.#unit = unit;
    this.#whole = whole;
    this.#tip = document.createElement("span");
    this.#tip.className = "tip";
    this.#tip.hidden = true;
    element.tabIndex = 0;
    element.setAttribute("role", "img");
    for (const kind of ["pointermove", "pointerdown"]) {
      element.addEventListener(kind, (event) => pointAll(this.#timeAt(event.clientX)));
    }
    for (const kind of ["pointerleave", "blur"]) element.addEventListener(kind, () => pointAll(null));
    element.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.#points.length) return;
      event.preventDefault();
      pointAll(this.#neighbour(step));
    });
    new ResizeObserver(() => this.#draw()).observe(element);
    charts.add(this);
  }

  /** Shows points of {time, value}, oldest first, times in seconds since 1970; value is null where there is none. */
  show(points, from, to) {
    [this.#points, this.#from, this.#to] = [points, from, to];
    this.#draw();
  }

  /** Marks the point next to a time; null marks none. */
  point(time) {
    this.#cursor?.remove();
    this.#cursor = null;
    const near = time === null || !this.#scale ? null : this.#nearest(time);
    this.#tip.hidden = near === null;
    if (near === null) return;
    const [x, y] = [this.#scale.x(near.time), this.#scale.y(near.value)];
    this.#cursor = shape("g", {});
    this.#cursor.append(
      shape("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: this.#scale.bottom }),
      shape("circle", { class: "dot", cx: x, cy: y, r: 4 }),
    );
    this.#element.querySelector("svg").append(this.#cursor);
    this.#tip.textContent = `${clock(near.time, true)} · ${short(near.value)} ${this.#unit}`;
    const isRight = x > this.#scale.width / 2;
    this.#tip.style.left = isRight ? "" : `${x + 10}px`;
    this.#tip.style.right = isRight ? `${this.#scale.width - x + 10}px` : "";
  }

  #timeAt(clientX) {
    if (!this.#scale) return null;
    return this.#scale.time(clientX - this.#element.getBoundingClientRect().left);
  }

  #nearest(time) {
    const present = this.#points.filter(({ value }) => value !== null);
    if (!present.length) return null;
    return present.reduce((best, point) => (Math.abs(point.time - time) < Math.abs(best.time - time) ? point : best));
  }

  #neighbour(step) {
    const present = this.#points.filter(({ value }) => value !== null);
    const index = present.findIndex((point) => point.time >= (pointed ?? Infinity));
    const next = index < 0 ? present.length - 1 : index + step;
    return present[Math.min(Math.max(next, 0), present.length - 1)]?.time ?? null;
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#element;
    if (width < LEFT + RIGHT + 20) return;
    const present = this.#points.filter(({ value }) => value !== null);
    const ticks = ticksOf(Math.max(0, ...present.map(({ value }) => value)), this.#whole);
    const [top, bottom] = [ticks.at(-1), height - BOTTOM];
    const span = this.#to - this.#from || 1;
    const inside = width - LEFT - RIGHT;
    const x = (time) => LEFT + ((time - this.#from) / span) * inside;
    const y = (value) => bottom - (value / top) * (bottom - TOP);
    this.#scale = { x, y, bottom, width, time: (at) => this.#from + ((at - LEFT) / inside) * span };

    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const tick of ticks) {
      svg.append(shape("line", { class: tick ? "grid" : "base", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
      svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 3.5, "text-anchor": "end" }, short(tick).replace(/\.(\d*?)0+$/, ".$1").replace(/\.$/, "")));
    }
    for (const time of labels(this.#from, this.#to, inside)) {
      svg.append(shape("line", { class: "grid", x1: x(time), x2: x(time), y1: TOP, y2: bottom }));
      svg.append(shape("text", { x: x(time), y: height - 4, "text-anchor": "middle" }, clock(time, span < 300)));
    }
    const { area, path } = outline(this.#points, x, y, bottom);
    svg.append(shape("path", { class: "area", d: area }), shape("path", { class: "line", d: path }));
    this.#element.replaceChildren(svg, this.#tip);
    if (!present.length) this.#element.append(nothing());
    const now = present.length ? `now ${short(present.at(-1).value)}, at most ${short(Math.max(...present.map(({ value }) => value)))}` : "nothing yet";
    this.#element.setAttribute("aria-label", `Last ${Math.round(span / 60) || 1} minutes in ${this.#unit}: ${now}`);
    this.point(pointed);
  }
}

let pointed = null;

function pointAll(time) {
  pointed = time;
  for (const chart of charts) chart.point(time);
}

function outline(points, x, y, bottom) {
  let [path, area, start] = ["", "", null];
  points.forEach(({ time, value }, index) => {
    if (value === null) {
      if (start !== null) area += `L${x(points[index - 1].time)} ${bottom}Z`;
      start = null;
      return;
    }
    const at = `${x(time).toFixed(1)} ${y(value).toFixed(1)}`;
    // A lone point shows as a dot, by the line's round end.
    path += start === null ? `M${at}L${at}` : `L${at}`;
    area += start === null ? `M${x(time).toFixed(1)} ${bottom}L${at}` : `L${at}`;
    start ??= index;
  });
  if (start !== null) area += `L${x(points.at(-1).time)} ${bottom}Z`;
  return { path, area };
}

/** Labels of the value axis from 0 on, three or four of them. */
function ticksOf(most, isWhole) {
  if (most <= 0) return [0, 1];
  const power = 10 ** Math.floor(Math.log10(most / 3));
  let step = [1, 2, 2.5, 5, 10].map((size) => size * power).find((size) => size * 4 >= most) ?? 10 * power;
  if (isWhole) step = Math.max(1, Math.ceil(step));
  const count = Math.max(1, Math.ceil(most / step - 1e-9));
  return Array.from({ length: count + 1 }, (_, index) => index * step);
}

/** Round times between two. */
function labels(from, to, width) {
  const most = Math.max(1, Math.floor(width / LABEL_WIDTH));
  const step = STEPS.find((seconds) => (to - from) / seconds <= most) ?? STEPS.at(-1);
  const offset = new Date().getTimezoneOffset() * 60;
  const first = Math.ceil((from - offset) / step) * step + offset;
  const margin = ((to - from) * 16) / width; // half a label
  const times = [];
  for (let time = first; time <= to - margin; time += step) if (time >= from + margin / 2) times.push(time);
  return times;
}

/** A time of the day. */
function clock(time, withSeconds) {
  const options = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(withSeconds ? { second: "2-digit" } : {}) };
  return new Date(time * 1000).toLocaleTimeString([], options);
}

function nothing() {
  const text = document.createElement("span");
  text.className = "empty";
  text.textContent = "nothing yet";
  return text;
}

/** Bars with their values on top. `items` are [label, share from 0 to 1]. */
export function bars(element, items) {
  element.replaceChildren(
    ...items.map(([label, share]) => {
      const [column, track, bar, value] = ["div", "span", "i", "b"].map((tag) => document.createElement(tag));
      value.textContent = String(Math.round(share * 100));
      bar.style.height = `${Math.max(0, Math.min(1, share)) * 100}%`;
      track.append(bar);
      column.append(value, track, label);
      return column;
    }),
  );
  element.setAttribute("aria-label", items.map(([label, share]) => `depth ${label}: ${percent(share)}`).join(", "));
}

/** One bar in parts, and its key. `parts` are [name, size, text, note]; the last one is what is left over. */
export function split(element, keys, parts) {
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  element.replaceChildren();
  keys.replaceChildren();
  parts.forEach(([name, size, text, note], index) => {
    const part = document.createElement("i");
    part.className = index === parts.length - 1 ? "tone-rest" : `tone-${index + 1}`;
    part.style.flex = `${total ? size / total : 0} 0 0`;
    if (size > 0) element.append(part);
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = part.className;
    const about = document.createElement("span");
    about.append(name);
    if (note) about.append(document.createElement("br"), small(note));
    const value = document.createElement("b");
    value.textContent = text;
    item.append(swatch, about, value);
    keys.append(item);
  });
  element.setAttribute("aria-label", parts.map(([name, , text]) => `${name} ${text}`).join(", "));
}

function small(text) {
  const element = document.createElement("small");
  element.textContent = text;
  return element;
}

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
