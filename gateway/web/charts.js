// Small charts without a library: a line over time, bars, and a bar split in parts.

const SVG = "http://www.w3.org/2000/svg";

/** A number for people: 3 significant digits, thousands with k and M. */
export function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
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

/**
 * A line with an area under it.
 *
 * @param {HTMLElement} element
 * @param {(number | null)[]} values One a second, newest last; null where there is none.
 * @param {number} span How many values the width holds.
 * @param {string} unit
 */
export function line(element, values, span, unit) {
  const present = values.filter((value) => value !== null);
  const top = niceCeiling(Math.max(0, ...present));
  const x = (index) => 100 - ((values.length - 1 - index) * 100) / (span - 1);
  const y = (value) => 100 - (value / top) * 96;
  let path = "";
  let area = "";
  let start = null;
  values.forEach((value, index) => {
    if (value === null) {
      if (start !== null) area += `L${x(index - 1)} 100Z`;
      start = null;
      return;
    }
    const point = `${x(index).toFixed(2)} ${y(value).toFixed(2)}`;
    path += `${start === null ? "M" : "L"}${point}`;
    area += start === null ? `M${x(index).toFixed(2)} 100L${point}` : `L${point}`;
    start ??= index;
  });
  if (start !== null) area += `L${x(values.length - 1)} 100Z`;

  const svg = shape("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" });
  const now = present.length ? short(present.at(-1)) : "nothing yet";
  svg.setAttribute("aria-label", `Last two minutes in ${unit}: now ${now}, at most ${present.length ? short(Math.max(...present)) : 0}`);
  svg.append(shape("path", { class: "area", d: area }), shape("path", { class: "base", d: "M0 100H100" }), shape("path", { class: "line", d: path }));
  const scale = document.createElement("span");
  scale.textContent = present.length ? short(top) : "";
  const frame = document.createElement("div");
  frame.className = "chart-frame";
  frame.append(svg, scale);
  element.replaceChildren(frame);
}

/** Bars with their values on top. `items` are [label, share from 0 to 1]. */
export function bars(element, items) {
  element.replaceChildren(
    ...items.map(([label, share]) => {
      const column = document.createElement("div");
      const value = document.createElement("b");
      const bar = document.createElement("i");
      value.textContent = percent(share);
      bar.style.height = `${Math.max(0, Math.min(1, share)) * 78}%`;
      column.append(value, bar, label);
      return column;
    }),
  );
  element.setAttribute("aria-label", items.map(([label, share]) => `depth ${label}: ${percent(share)}`).join(", "));
}

/** One bar in parts, and its key. `parts` are [name, size, text]; the last one is what is left over. */
export function split(element, keys, parts) {
  const total = parts.reduce((sum, [, size]) => sum + size, 0);
  element.replaceChildren();
  keys.replaceChildren();
  parts.forEach(([name, size, text], index) => {
    const part = document.createElement("i");
    part.className = index === parts.length - 1 ? "tone-rest" : `tone-${index + 1}`;
    part.style.flex = `${total ? size / total : 0} 0 0`;
    if (size > 0) element.append(part);
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = part.className;
    const value = document.createElement("b");
    value.textContent = text;
    item.append(swatch, name, value);
    keys.append(item);
  });
  element.setAttribute("aria-label", parts.map(([name, , text]) => `${name} ${text}`).join(", "));
}

/** A share of 1 in percent. */
export function percent(share) {
  return Number.isFinite(share) ? `${(share * 100).toFixed(share && share < 0.1 ? 1 : 0)} %` : "–";
}

function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= value);
}

function shape(name, attributes) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
